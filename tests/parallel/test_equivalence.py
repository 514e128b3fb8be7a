"""The same completions give the same weights, whatever the strategy and the number of ranks."""

from typing import Any

import pytest
import torch
from equivalence_run import ACCUMULATED, BF16_DISTANCE, LR, distance, run_each, train
from tiny import save_model

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": {},
    "data-accumulated": {"max_tokens_per_microbatch": ACCUMULATED},
    "data-late": {
        "strategy": {"reduce_every_microbatch": False, "reshard_after_forward": False},
        "max_tokens_per_microbatch": ACCUMULATED,
    },
    "tensor": {
        "strategy": {"tensor_parallel_size": 2},
        "max_tokens_per_microbatch": ACCUMULATED,
        "gradient_checkpointing": True,
    },
    "parameters-offloaded": {"strategy": {"cpu_offload": "parameters"}},
    "optimizer-offloaded": {"strategy": {"cpu_offload": "optimizer"}},
    "moved-in-rollouts": {"offload": {"parameters": True}, "max_tokens_per_microbatch": ACCUMULATED},
    "tensor-compiled": {"compile": True, "gradient_checkpointing": True, "strategy": {"tensor_parallel_size": 2}},
    "tensor-moved-in-rollouts": {"offload": {"parameters": True}, "strategy": {"tensor_parallel_size": 2}},
    "bf16": {"precision": "bf16-mixed"},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "data-tensor": {"strategy": {"tensor_parallel_size": 2}, "max_tokens_per_microbatch": ACCUMULATED},
    "hybrid": {"strategy": {"shard_size": 2}, "max_tokens_per_microbatch": ACCUMULATED},
}
FLOAT32_TOLERANCE = 0.01 * LR
"""Of a weight after three steps, in which it moves by up to 3 x LR.

Sums in another order differ by some 1e-7 of their size. AdamW divides a gradient by its own size, so that what is left
of a difference does not shrink with the gradient: a weight whose gradient is nearly 0 may move by a few thousandths of
LR more or less. An omitted reduction, a wrong normaliser or a norm that is not global moves weights by about LR.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of each run, by name."""
    folder = tmp_path_factory.mktemp("equivalence")
    model = save_model(folder / "model", num_key_value_heads=2)
    found = {
        "one": train(folder, model, "auto"),
        "one-accumulated": train(folder, model, "auto", max_tokens_per_microbatch=ACCUMULATED),
    }
    return found | run_each(folder, 2, model, TWO_RANKS) | run_each(folder, 4, model, FOUR_RANKS)


@pytest.mark.parametrize("name", ["one-accumulated", *TWO_RANKS, *FOUR_RANKS])
def test_three_steps_equal_those_of_one_process(name: str, runs: dict[str, Any]) -> None:
    one, other = runs["one"], runs[name]
    start = one["reference"]
    assert max((one["actor"][key] - start[key]).abs().max() for key in start) > 2 * LR, "the test trains nothing"
    assert one["actor"].keys() == other["actor"].keys()
    for key, weight in one["actor"].items():
        assert other["actor"][key].dtype == torch.float32
        if name != "bf16":
            torch.testing.assert_close(other["actor"][key], weight, atol=FLOAT32_TOLERANCE, rtol=0.0)
        held = torch.bfloat16 if name == "bf16" else torch.float32  # as it is computed with
        assert other["reference"][key].dtype == held
        assert torch.equal(other["reference"][key], start[key].to(held))
    assert distance(one, other) <= BF16_DISTANCE


@pytest.mark.parametrize("name", ["one-accumulated", *TWO_RANKS, *FOUR_RANKS])
def test_metrics_are_global(name: str, runs: dict[str, Any]) -> None:
    """Among them the norm of all gradients, thirty times what it is clipped to."""
    tolerance = 0.02 if name == "bf16" else 1e-4
    for expected, logged in zip(runs["one"]["logged"], runs[name]["logged"], strict=True):
        got = {key: value for key, value in logged.items() if key in expected or "moved" not in name}
        assert got == pytest.approx(expected, abs=tolerance)
        assert got["optim/grad_norm"] > 1.0


@pytest.mark.parametrize("name", ["one", *TWO_RANKS])
def test_prompts_are_computed_once_whatever_the_strategy(name: str, runs: dict[str, Any]) -> None:
    """Where a micro-batch has room for a group."""
    if "max_tokens_per_microbatch" not in TWO_RANKS.get(name, {}):
        assert min(runs[name]["shared_shares"]) > 0.3


def test_ranks_share_the_batch_out(runs: dict[str, Any]) -> None:
    """16 completions: all of them for tensor-parallel neighbours, half for data-parallel ranks, in whole groups."""
    (total, *_), (of_one_rank, *_) = runs["one"]["num_tokens"], runs["data"]["num_tokens"]
    assert total != 2 * of_one_rank, "a normaliser of the rank's own would pass"
    num_sequences = {name: run["num_sequences"][0] for name, run in runs.items()}
    assert num_sequences["one"] == num_sequences["tensor"] == 16
    assert num_sequences["data"] == num_sequences["data-tensor"] == 8
    assert num_sequences["hybrid"] == 4


@pytest.mark.parametrize("name", ["moved-in-rollouts", "tensor-moved-in-rollouts"])
def test_shards_were_away_in_rollouts(name: str, runs: dict[str, Any]) -> None:
    """Half of the actor's parameters, of both its moments and of the reference's parameters."""
    run = runs[name]
    num_bytes = 4 * sum(w.numel() for w in (*run["actor"].values(), *run["actor"].values(), *run["actor"].values()))
    num_bytes += 4 * sum(weight.numel() for weight in run["reference"].values())
    assert run["offloaded"]["memory/offloaded_gib"] * 2**30 == pytest.approx(num_bytes / 2, rel=0.2)
