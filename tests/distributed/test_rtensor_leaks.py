"""Steps of a controller with 2 x 2 workers leave nothing behind: two hundred where only heads' results are seen to."""

from pathlib import Path

import pytest
from controller_leaks_run import MEASURED_EVERY, PAYLOAD_BYTES, RUNS
from controller_process import finish, start_controller
from tiny import save_model

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "controller_leaks_run.py"
# Rank = 2 x data-parallel rank + tensor-parallel rank.
HEADS, OTHERS = ("worker0", "worker2"), ("worker1", "worker3")
PROCESSES = ("controller", *HEADS, *OTHERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaks")
    save_model(folder / "model", num_key_value_heads=2)
    finish([start_controller(SCRIPT, str(folder))])
    return folder


def read(folder: Path, run: str, process: str) -> list[list[int]]:
    """By step: its number, entries and bytes at the end of the one before and after that, and resident bytes."""
    lines = (folder / run / f"{process}.levels").read_text().splitlines()
    rows = [[int(word) for word in line.split()] for line in lines]
    assert [row[0] for row in rows] == list(range(RUNS[run] + 1))
    return rows


@pytest.mark.parametrize("run", ["with, lax", "without"])
def test_nothing_is_left_of_a_step(folder: Path, run: str) -> None:
    for process in PROCESSES:
        rows = read(folder, run, process)
        assert [row[3:5] for row in rows] == [[0, 0]] * len(rows), process
        stores = process in HEADS or (process in OTHERS and run == "without")
        assert [row[1] for row in rows[1:]] == [int(stores)] * (len(rows) - 1), process


def test_resident_memory_is_flat(folder: Path) -> None:
    """A megabyte a step would be 100 MB in the second hundred of steps; a tenth is what allocators may do in it."""
    for process in PROCESSES:
        resident = {row[0]: row[5] for row in read(folder, "with, lax", process) if row[0] % MEASURED_EVERY == 0}
        assert resident[200] - resident[100] < 100 * PAYLOAD_BYTES / 10, (process, resident)


def test_without_the_callback_what_is_acknowledged_by_nobody_grows(folder: Path) -> None:
    """Each step leaves its batch, as large as that of the head, and the payload."""
    run = "without, lax"
    for process in ("controller", *HEADS):
        assert all(row[3:5] == [0, 0] for row in read(folder, run, process)), process
    for head, other in zip(HEADS, OTHERS, strict=True):
        batch_bytes = 0
        for (step, _, of_batch, *_), row in zip(read(folder, run, head), read(folder, run, other), strict=True):
            batch_bytes += of_batch
            assert row[3:5] == [2 * step, batch_bytes + step * PAYLOAD_BYTES], (other, step)
