"""Two GPUs, over NCCL, take the steps that one takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import ACCUMULATED, BF16_DISTANCE, LR, distance, train
from rank_processes import end_ranks, start_ranks
from tiny import save_model

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
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
def test_three_steps_on_two_gpus_lead_to_the_weights_of_one(tmp_path: Path) -> None:
    """In float32 up to the order of sums, as on the CPU."""
    model = save_model(tmp_path / "model", num_key_value_heads=2)
    one = train(tmp_path, model, "auto", accelerator="gpu")
    arms = {name: {"accelerator": "gpu", **arguments} for name, arguments in RUNS.items()}
    ranks = start_ranks(Path(__file__).parent / "equivalence_run.py", 2, str(tmp_path), model, json.dumps(arms))
    try:
        for process in ranks:
            _, error = process.communicate(timeout=350)
            assert process.returncode == 0, error
    finally:
        end_ranks(ranks)
    for name, arguments in RUNS.items():
        other = torch.load(tmp_path / f"{name}.pt")
        assert distance(one, other) <= BF16_DISTANCE, name
        if "precision" in arguments:
            continue
        for key, weight in one["actor"].items():
            assert (other["actor"][key] - weight).abs().max() <= 0.01 * LR, (name, key)
