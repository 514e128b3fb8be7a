"""Two and four GPUs, over NCCL, take the steps that one takes."""

from pathlib import Path
from typing import Any

import pytest
from equivalence_run import ACCUMULATED, BF16_DISTANCE, LR, adapter_distance, distance, run_each, train
from tiny import save_model

from rlightning.models import Adapter

ADAPTER = Adapter(rank=3)  # which two ranks cannot share out evenly
TWO_GPUS: dict[str, dict[str, Any]] = {
    "data": {"max_tokens_per_microbatch": ACCUMULATED},
    "hybrid": {"strategy": {"shard_size": 1}, "max_tokens_per_microbatch": ACCUMULATED},
    "tensor": {"strategy": {"tensor_parallel_size": 2}, "gradient_checkpointing": True},
    "parameters-offloaded": {"strategy": {"cpu_offload": "parameters"}},
    "optimizer-offloaded": {"strategy": {"cpu_offload": "optimizer", "tensor_parallel_size": 2}},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-tensor": {"precision": "bf16-mixed", "strategy": {"tensor_parallel_size": 2}},
    "adapter": {"adapter": ADAPTER, "max_tokens_per_microbatch": ACCUMULATED},
    "adapter-ddp": {"adapter": ADAPTER, "strategy": "ddp"},
    "adapter-bf16": {"adapter": ADAPTER, "precision": "bf16-mixed"},
}
FOUR_GPUS: dict[str, dict[str, Any]] = {
    "data": {"max_tokens_per_microbatch": ACCUMULATED},
    "hybrid": {"strategy": {"shard_size": 2}, "max_tokens_per_microbatch": ACCUMULATED},
    "data-and-tensor": {"strategy": {"tensor_parallel_size": 2}},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-data-and-tensor": {"precision": "bf16-mixed", "strategy": {"tensor_parallel_size": 2}},
    "adapter-hybrid": {"adapter": ADAPTER, "strategy": {"shard_size": 2}},
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("num_gpus", "runs"),
    [
        pytest.param(2, TWO_GPUS, marks=pytest.mark.multigpu, id="two"),
        pytest.param(4, FOUR_GPUS, marks=pytest.mark.multigpu(4), id="four"),
    ],
)
def test_training_on_several_gpus_matches_single_gpu_weights(
    num_gpus: int, runs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """In float32 up to the order of sums, as on the CPU."""
    model = save_model(tmp_path / "model", num_key_value_heads=2)
    full, adapted = (train(tmp_path, model, "auto", accelerator="gpu", adapter=one) for one in (None, ADAPTER))
    arms = {name: {"accelerator": "gpu", **arguments} for name, arguments in runs.items()}
    others = run_each(tmp_path, num_gpus, model, arms)
    for name, arguments in runs.items():
        other, one = others[name], adapted if "adapter" in arguments else full
        measure = adapter_distance if "adapter" in arguments else distance
        assert measure(one, other) <= BF16_DISTANCE, name
        if "precision" in arguments:
            continue
        for key, weight in one["actor"].items():
            assert (other["actor"][key] - weight).abs().max() <= 0.01 * LR, (name, key)
