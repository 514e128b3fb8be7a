"""Two hundred steps of 2 x 2 Ray workers: nothing stays behind; and what does without head-only storing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from controller_leaks_run import MEASURED_EVERY, NUM_STEPS, PAYLOAD_BYTES
from controller_process import finish, start_controller
from rtensor_training import NUM_TOKENS, RESULT_BYTES, TrainingWorker, resident_bytes
from rtensor_worker import start_workers
from test_ray_store import become, used_megabytes
from tiny import save_model

from rlightning.distributed.rtensor import localize

SCRIPT = Path(__file__).parent / "controller_leaks_run.py"
pytestmark = pytest.mark.slow
MB = 1 << 20
NOTHING = [(0, 0)] * 4
ONE = (1, RESULT_BYTES)
HEADS, OTHERS = (0, 2), (1, 3)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Rank = 2 x data-parallel rank + tensor-parallel rank."""
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=400 * MB, log_to_driver=False)
    started = start_workers(4, kind=TrainingWorker)
    folder = tmp_path_factory.mktemp("ranks")
    ray.get([worker.join.remote(folder, rank) for rank, worker in enumerate(started)])
    yield started
    ray.shutdown()


def ask(workers: list[Any], name: str, *args: Any) -> list[Any]:
    """All workers' answers."""
    answers: list[Any] = ray.get([getattr(worker, name).remote(*args) for worker in workers])
    return answers


def take_step(workers: list[Any], number: int) -> list[tuple[int, int]]:
    """One step: the controller reads what the heads have computed and acknowledges it to them, as it knows no other.

    Returns:
        Live entries and bytes by rank, while the controller has all replies.
    """
    replies = ask(workers, "step", number)
    during = ask(workers, "live")
    for rank in HEADS:
        logits = localize(replies[rank])["logits"]
        assert logits.shape == (NUM_TOKENS, 3) and torch.isfinite(logits).all()
        workers[rank].acknowledge.remote(number)
    return [tuple(level) for level in during]


def measure(workers: list[Any]) -> list[int]:
    """Resident bytes, by rank and last of the controller."""
    return [*ask(workers, "resident_bytes"), resident_bytes()]


def test_two_hundred_steps_of_a_controller_leave_nothing_behind(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_key_value_heads=2)
    finish([start_controller(SCRIPT, str(tmp_path))])
    for name in ("controller", *(f"worker{rank}" for rank in range(4))):
        for run, num_steps in (("with", NUM_STEPS), ("without", 5)):
            lines = (tmp_path / run / f"{name}.levels").read_text().splitlines()
            rows = [[int(word) for word in line.split()] for line in lines]
            assert [row[0] for row in rows] == list(range(num_steps + 1)), name
            assert all(row[3:5] == [0, 0] for row in rows), (name, run)
            stores = name in ("worker0", "worker2") or (run == "without" and name != "controller")
            assert {row[1] > 0 for row in rows[1:]} == {stores}, (name, run)
            if run == "with":
                _, warm, *_, last = (row[5] for row in rows if row[5])
                # A tenth of what the payloads alone would leave behind.
                assert last - warm < (NUM_STEPS - MEASURED_EVERY) * PAYLOAD_BYTES / 10, (name, warm, last)


def test_without_the_callback_each_rank_stores_what_its_neighbour_has(workers: list[Any]) -> None:
    ask(workers, "begin", False, False)
    logits = [reply["logits"] for reply in localize(ask(workers, "step", 0))]
    for head, other in zip(HEADS, OTHERS, strict=True):
        assert torch.equal(logits[head], logits[other])
    assert not torch.equal(logits[0], logits[2])
    for number in range(20):
        assert take_step(workers, number) == [ONE] * 4
        # The controller has dropped all replies, those that it never read too, and so nothing is left.
        assert become(NOTHING, lambda: [tuple(level) for level in ask(workers, "live")]) == NOTHING, number


def test_without_the_callback_what_is_remembered_for_nobody_grows(workers: list[Any]) -> None:
    ask(workers, "begin", False, True)
    num_steps = 100
    resident = measure(workers)
    for number in range(num_steps):
        take_step(workers, number)
    kept = (num_steps, num_steps * RESULT_BYTES)
    expected = [(0, 0), kept, (0, 0), kept]
    assert become(expected, lambda: [tuple(level) for level in ask(workers, "live")]) == expected
    grown = [after - before for before, after in zip(resident, measure(workers), strict=True)]
    assert min(grown[rank] for rank in OTHERS) > 40 * MB, grown
    assert used_megabytes() > 90
    ask(workers, "begin", False, False)  # forgets the replies: the last references
    assert become(NOTHING, lambda: [tuple(level) for level in ask(workers, "live")]) == NOTHING
