"""Several ranks roll out with real engines: one a rank, or one that they share."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_run import save_model
from rank_processes import end_ranks, start_ranks

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "ranks_rollout_run.py"
RESUME_SCRIPT = Path(__file__).parent / "ranks_resume_run.py"


def run(folder: Path, ranks_per_engine: int, **arguments: Any) -> list[dict[str, Any]]:
    save_model(folder / "model", num_key_value_heads=2)  # one a tensor-parallel rank
    return run_ranks(SCRIPT, folder, str(ranks_per_engine), json.dumps(arguments))


def run_ranks(script: Path, folder: Path, *arguments: str, exit_code: int = 0) -> list[dict[str, Any]]:
    ranks = start_ranks(script, 2, str(folder), *arguments)
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=500)
            assert process.returncode == exit_code, errors[-4000:]
    finally:
        end_ranks(ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def check_steps(first: dict[str, Any], second: dict[str, Any], oversample: float) -> None:
    """The ranks sampled different prompts, from the weights of the step, and learned what the engines sampled.

    They begin more than they need, and stop the rest, which the next step goes on with.
    """
    seen: list[int] = []
    for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True)):
        assert len(one["sampled"]) == len(other["sampled"]) == 6
        assert not set(one["sampled"]) & set(other["sampled"])
        seen += sorted({*one["sampled"], *other["sampled"]})
        assert one["versions"] == other["versions"] == [number]
        # One learning rate moves log-probabilities by far more than this.
        assert one["policy/rollout_gap_max"] == other["policy/rollout_gap_max"] < 1e-3
        assert one["reward/mean"] == other["reward/mean"]
        assert one["stopped"] == other["stopped"] == 4 * oversample
    assert len(first["in_flight"]) == 2  # also where a step may begin one of them: each rank has taken one
    seen += first["in_flight"]
    assert len(seen) == len(set(seen)) == 14


def test_ranks_with_own_engines_recover_killed_engine(tmp_path: Path) -> None:
    first, second = run(tmp_path, 1, oversample=0.25)
    check_steps(first, second, 0.25)
    assert first["num_engines"] == 1
    assert second["num_engines"] == 2
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert sorted(one["updated"] + other["updated"]) == sorted(one["sampled"] + other["sampled"])
        longest = 3 * (5 + one["completion/length_max"])  # a group
        assert abs(one["tokens"] - other["tokens"]) <= longest
    assert (tmp_path / "engine.0.log").exists() and (tmp_path / "engine.1.log").exists()


@pytest.mark.slow
def test_tensor_parallel_ranks_recover_killed_shared_engine(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, oversample=0.5)
    check_steps(first, second, 0.5)
    assert (first["num_engines"], second["num_engines"]) == (2, 0)
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert one["updated"] == other["updated"] == one["sampled"] + other["sampled"]


@pytest.mark.slow
def test_ranks_sharing_standalone_engines_recover_killed_engine(tmp_path: Path) -> None:
    first, second = run(tmp_path, 1, placement="standalone", num_engines=2, max_staleness=1)
    assert second["num_engines"] == 0  # they belong to rank 0, which saw one of them come back
    seen: list[int] = []
    for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True)):
        assert len(one["sampled"]) == len(other["sampled"]) == 6
        seen += one["sampled"][::3] + other["sampled"][::3]
        assert all(number - 1 <= version <= number for version in one["versions"] + other["versions"])
        assert one["reward/mean"] == other["reward/mean"]
    assert len(first["in_flight"]) == 4
    # Sixteen prompts: in three steps and in flight each comes once.
    assert sorted(seen + first["in_flight"]) == list(range(16))


@pytest.mark.slow
def test_resumed_ranks_neither_lose_nor_repeat_prompts(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    begun = run_ranks(RESUME_SCRIPT, tmp_path, "begin", exit_code=1)
    resumed = run_ranks(RESUME_SCRIPT, tmp_path, "resume")
    assert [rank["updates"] for rank in begun + resumed] == [2, 2, 3, 3]
    assert [len(rank["steps"]) for rank in begun + resumed] == [3, 3, 1, 1]  # the third step is done again
    seen: list[int] = []
    for one, other in zip(begun, resumed, strict=True):
        for number, step in enumerate(one["steps"][:2] + other["steps"]):
            assert len(step["sampled"]) == 6
            assert all(number - 1 <= version <= number for version in step["versions"])
            seen += step["sampled"][::3]
    in_flight = resumed[0]["in_flight"]
    assert len(in_flight) == 4
    # Sixteen prompts: in three steps and in flight each comes once.
    assert sorted(seen + in_flight) == list(range(16))
