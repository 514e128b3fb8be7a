"""Two GPUs, over NCCL, take the steps that one takes."""

from pathlib import Path
from typing import Any

import pytest
from equivalence_run import ACCUMULATED, BF16_DISTANCE, LR, distance, run_each, train
from tiny import save_model

pytestmark = pytest.mark.multigpu
RUNS: dict[str, dict[str, Any]] = {
    "data": {"max_tokens_per_microbatch": ACCUMULATED},
    "hybrid": {"strategy": {"shard_size": 1}, "max_tokens_per_microbatch": ACCUMULATED},
    "tensor": {"strategy": {"tensor_parallel_size": 2}, "gradient_checkpointing": True},
    "parameters-offloaded": {"strategy": {"cpu_offload": "parameters"}},
    "optimizer-offloaded": {"strategy": {"cpu_offload": "optimizer", "tensor_parallel_size": 2}},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-tensor": {"precision": "bf16-mixed", "strategy": {"tensor_parallel_size": 2}},
}


@pytest.mark.timeout(400)
def test_two_gpu_training_matches_single_gpu_weights(tmp_path: Path) -> None:
    """In float32 up to the order of sums, as on the CPU."""
    model = save_model(tmp_path / "model", num_key_value_heads=2)
    one = train(tmp_path, model, "auto", accelerator="gpu")
    arms = {name: {"accelerator": "gpu", **arguments} for name, arguments in RUNS.items()}
    others = run_each(tmp_path, 2, model, arms)
    for name, arguments in RUNS.items():
        other = others[name]
        assert distance(one, other) <= BF16_DISTANCE, name
        if "precision" in arguments:
            continue
        for key, weight in one["actor"].items():
            assert (other["actor"][key] - weight).abs().max() <= 0.01 * LR, (name, key)
