"""Ranks that hang are named by the others, and the run ends; and the stacks of its processes, on SIGUSR1 too."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from programs import run_python
from rank_processes import end_ranks, start_ranks
from waiting import wait_for

from rlightning import intervals
from rlightning.parallel import stacks
from rlightning.parallel.hang_watch import RankState, Status, describe_wait, find_missing, is_known
from rlightning.parallel.last_seen import Position, find_position
from rlightning.processes.process_table import find_children, identify_process, kill_process

PROGRAM = """\
import os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from rlightning import intervals
from rlightning.console import show_log_lines
from rlightning.parallel.barrier import barrier
from rlightning.parallel.cpu_group import set_barrier_timeout
from rlightning.parallel.failure_watch import FailureWatch

show_log_lines()
rank, hanging, how, others = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2], sys.argv[3]
folder = Path(__file__).parent

def is_stopped(path):
    state = Path("/proc", path.read_text(), "stat").read_text().rpartition(")")[2].split()[0] if path.exists() else ""
    return state == "T"

def hang_here():
    if how == "stop":
        (folder / "writing").write_text(str(os.getpid()))
        (folder / "writing").rename(folder / "stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "loop":
        os.nice(5)  # what else runs goes before the core that it burns
    while how == "loop":
        if hanging == 0:
            time.sleep(0.05)  # one case that burns a core will do
    (folder / "hangs").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)

def is_in_collective(thread):
    frame, names = sys._current_frames()[thread], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "all_reduce" in names

def tell_of_collective(thread):
    while not is_in_collective(thread):
        time.sleep(0.05)
    (folder / f"in-collective-{rank}").touch()

def await_engine():
    time.sleep(10)

def await_rewards():
    time.sleep(10)

dist.init_process_group("gloo", timeout=timedelta(seconds=600))
with FailureWatch(grace=60, folder=folder):
    barrier("start")  # the ranks' own start takes its time, and so does that of other cases
    (folder / f"ready-{rank}").touch()
    while not (folder / "begin").exists():
        time.sleep(0.02)
    intervals.HEARTBEAT_INTERVAL, intervals.HANG_GRACE = 0.1, 1
    # One that runs may be kept from a heartbeat for seconds. Rank 0 hears of all others, these of rank 0 alone.
    delay = 10 if how == "stop" and hanging != 0 else 2
    intervals.SILENT_AFTER = delay if how == "stop" else 60
    intervals.WAIT_REPORT_DELAY, intervals.MIN_STORE_TIMEOUT = delay, delay
    set_barrier_timeout({"wait": 600, "work": 5}.get(how, 3.5 * delay))
    try:
        if how == "work":
            await_engine() if rank == 0 else await_rewards()
            set_barrier_timeout(600)  # each has begun in its turn
        if rank == hanging:
            (folder / "hangs").touch()
            hang_here()
        while how in ("loop", "stop") and not (folder / "hangs").exists():
            time.sleep(0.02)  # what is waited for is a rank that hangs, not one that has yet to have its turn
        if how == "wait":
            threading.Thread(target=tell_of_collective, args=(threading.get_ident(),), daemon=True).start()
        if others == "raise" and rank == 1:
            while not is_stopped(folder / "stopped"):
                time.sleep(0.05)
            raise ValueError("boom")
        barrier("save") if others == "barrier" else dist.all_reduce(torch.ones(1))
    finally:
        sys.stderr.write(f"rank {rank} cleans up\\n")
"""


def start_program(folder: Path, hanging: int, how: str, others: str) -> "list[subprocess.Popen[str]]":
    script = folder / "hanging.py"
    script.write_text(PROGRAM)
    return start_ranks(script, 3, str(hanging), how, others)


Outcome = tuple[list[int], list[str]]
"""Exit codes and standard errors of a program's ranks."""


def run_all(cases: Mapping[Path, tuple[int, str, str]]) -> dict[Path, Outcome]:
    """Run the program in each folder, all at once: most of the time they wait."""
    programs = {folder: start_program(folder, *case) for folder, case in cases.items()}
    ranks = [rank for program in programs.values() for rank in program]
    try:
        wait_for(lambda: all((folder / f"ready-{rank}").exists() for folder in cases for rank in range(3)))
        for folder in cases:
            (folder / "begin").touch()
        errors = {
            folder: [rank.communicate(timeout=300)[1] for rank in program] for folder, program in programs.items()
        }
    finally:
        end_ranks(ranks)
    return {folder: ([rank.returncode for rank in programs[folder]], errors[folder]) for folder in cases}


def sections(folder: Path) -> list[str]:
    """The heads of the processes' parts of the file with stacks."""
    path = folder / "stacks.txt"
    text = path.read_text() if path.exists() else ""
    return re.findall(r"^=== (rank \d(?:, seen from rank \d)?)", text, re.MULTILINE)


@pytest.mark.processes
@pytest.mark.parametrize(
    "cases",
    [
        [(0, "stop", "collective"), (1, "loop", "collective")],
        pytest.param(
            [
                (0, "stop", "barrier"),
                (1, "stop", "collective"),
                (0, "loop", "collective"),
                (1, "stop", "barrier"),
                (0, "loop", "barrier"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["usual", "others"],
)
def test_hanging_rank_is_named_and_run_ends(cases: list[tuple[int, str, str]], tmp_path: Path) -> None:
    """The collective's own timeout is ten minutes, and nothing but the watch ends it."""
    folders = {tmp_path / "-".join(map(str, case)): case for case in cases}
    for folder in folders:
        folder.mkdir()
    for folder, outcome in run_all(folders).items():
        assert_named(folder, *folders[folder], *outcome)


def assert_named(folder: Path, hanging: int, how: str, others: str, codes: list[int], errors: list[str]) -> None:
    living = [rank for rank in range(3) if rank != hanging]
    assert codes[hanging] == (-signal.SIGKILL if how == "stop" else 1), errors
    assert [codes[rank] for rank in living] == [1, 1], errors
    all_lines = "".join(errors)
    if others == "collective" or (hanging, how) == (0, "stop"):
        for rank in living:
            assert f"rank {rank} ends because rank {hanging} hangs: " in errors[rank]
            assert f"rank {rank} cleans up" in errors[rank]
    else:
        seconds = 35 if how == "stop" else 7
        assert f"Barrier 'save' was not reached by rank {hanging} within {seconds} s" in all_lines

    # Who is waited for, and where that one is: after a while, and again after at least twice the time.
    pattern = rf"Waiting: ranks? .* waited (\d+) s (.*) for rank {hanging}: rank {hanging} (.*)\."
    found = re.findall(pattern, all_lines)
    waits = [int(seconds) for seconds, _, _ in found]
    assert len(waits) >= 2 and waits[0] >= 2, all_lines
    assert all(after >= 2 * before - 1 for before, after in itertools.pairwise(waits))  # rounded
    at = "at barrier 'save'" if others == "barrier" else "in a collective, in <module> ("
    assert all(where.startswith(at) for _, where, _ in found)
    state = "does not run, and was last seen" if how == "stop" else "is in hang_here ("
    assert all(place.startswith(state) for _, _, place in found)

    heads = sections(folder)
    assert {f"rank {rank}" for rank in living} <= set(heads)
    observer = 1 if hanging == 0 else 0
    assert (f"rank {hanging}, seen from rank {observer}" if how == "stop" else f"rank {hanging}") in heads
    if how == "loop":
        assert "in hang_here" in (folder / "stacks.txt").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_own_work_goes_on_own_error_shows(tmp_path: Path) -> None:
    """Ranks that work each on their own, for 10 s, where a hang ends a run after 6 s; a rank 0 that does not run."""
    work, fail = tmp_path / "work", tmp_path / "fail"
    work.mkdir()
    fail.mkdir()
    outcomes = run_all({work: (-1, "work", "barrier"), fail: (0, "stop", "raise")})
    codes, errors = outcomes[work]
    assert codes == [0, 0, 0], errors
    all_lines = "".join(errors)
    assert re.search(r"Waiting: rank 0 has been [2-9] s in await_engine \(", all_lines)
    assert ", perhaps waiting for ranks 1 and 2: rank 1 is in await_rewards (" in all_lines
    assert "hangs" not in all_lines and sections(work) == []

    codes, errors = outcomes[fail]
    assert codes == [-signal.SIGKILL, 1, 1], errors
    assert errors[1].count("ValueError: boom") == 1 and "ends because" not in errors[1]
    assert "Traceback" not in errors[2] and "rank 2 ends because rank 0 " in errors[2]


@pytest.mark.processes
def test_sigusr1_to_one_rank_records_stacks_of_all(tmp_path: Path) -> None:
    """Also of the rank that is in a collective, whose main thread takes no signal."""
    ranks = start_program(tmp_path, 0, "wait", "collective")
    (tmp_path / "begin").touch()
    try:
        at_work = [tmp_path / name for name in ("hangs", "in-collective-1", "in-collective-2")]
        wait_for(lambda: all(path.exists() for path in at_work))
        ranks[1].send_signal(signal.SIGUSR1)
        wait_for(lambda: len(sections(tmp_path)) == 3)
    finally:
        (tmp_path / "go").touch()
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
        end_ranks(ranks)
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0, 0], errors
    text = (tmp_path / "stacks.txt").read_text()
    assert sorted(sections(tmp_path)) == ["rank 0", "rank 1", "rank 2"]
    assert text.count(": SIGUSR1 to rank 1\n") == 3
    assert "in hang_here" in text and "in all_reduce" in text


COLLECTIVE, BARRIER = "in a collective, in step (my.py, line 5)", "at barrier 'save'"


def at(where: str, waits_in: str, seconds: float, silent: float = 0.0) -> RankState:
    return RankState(Status(where, waits_in, seconds), silent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "waiting", "missing", "known"),
    [
        # One does not run, whatever the other waits in.
        ({0: at(COLLECTIVE, "collective", 70), 1: at("in save (my.py, line 9)", "", 0, 70)}, [0], [1], True),
        ({0: at("in item (my.py, line 7)", "", 70), 1: at("in save (my.py, line 9)", "", 0, 70)}, [0], [1], True),
        # Not heard of for a moment, while the other works at one place for long: not a wait for it.
        (
            {0: at("in generate (my.py, line 7)", "", 70), 1: at("in generate (my.py, line 7)", "", 0, 20)},
            [],
            [],
            False,
        ),
        # It runs, and moves, but not to where it is waited for.
        ({0: at(BARRIER, "barrier", 70), 1: at("in save (my.py, line 9)", "", 0)}, [0], [1], True),
        # Both wait for an engine each, at the same place.
        ({0: at("in generate (my.py, line 7)", "", 70), 1: at("in generate (my.py, line 7)", "", 70)}, [], [], False),
        # Neither moves, at different places: a device may wait for a collective, or each for something of its own.
        ({0: at("in item (my.py, line 7)", "", 70), 1: at("in sleep (my.py, line 9)", "", 70)}, [0], [1], False),
        # One works at one place for long, the other moves: nobody waits.
        ({0: at("in generate (my.py, line 7)", "", 70), 1: at("in sleep (my.py, line 9)", "", 0)}, [], [], False),
        # Not yet for long enough.
        ({0: at(BARRIER, "barrier", 50), 1: at("in save (my.py, line 9)", "", 0)}, [], [], False),
        # All at the same barrier, which is about to open; and at two that never will.
        ({0: at(BARRIER, "barrier", 70), 1: at(BARRIER, "barrier", 0)}, [], [], False),
        ({0: at(BARRIER, "barrier", 70), 1: at("at barrier 'other'", "barrier", 70)}, [0, 1], [1], True),
        # Two wait for the third.
        (
            {0: at(BARRIER, "barrier", 65), 1: at("in save (my.py, line 9)", "", 0), 2: at(BARRIER, "barrier", 70)},
            [0, 2],
            [1],
            True,
        ),
    ],
)
def test_find_missing_tells_who_waits_for_whom(
    seen: dict[int, RankState], waiting: list[int], missing: list[int], known: bool
) -> None:
    assert find_missing(seen, 60) == (waiting, missing)
    assert is_known(waiting, missing, seen) == known


def test_wait_is_described_by_places_of_all() -> None:
    seen = {
        0: at(BARRIER, "barrier", 65),
        1: at("in save (my.py, line 9)", "", 0, 66),
        2: at(BARRIER, "barrier", 70),
        3: at("in load (my.py, line 4)", "", 0),
        4: RankState(None, 61),
    }
    assert describe_wait([0, 2], [1, 3, 4], seen) == (
        "ranks 0 and 2 have waited 65 s at barrier 'save' for ranks 1, 3 and 4: rank 1 does not run, and was last seen "
        "66 s ago in save (my.py, line 9); rank 3 is in load (my.py, line 4); rank 4 has given no heartbeat yet."
    )


def test_position_follows_own_code() -> None:
    may_end, is_there = threading.Event(), threading.Event()

    def wait_here() -> None:
        is_there.set()
        may_end.wait()  # in Python's library
        is_there.set()
        threading.Event().wait(60 * 60)

    thread = threading.Thread(target=wait_here, daemon=True)
    thread.start()
    is_there.wait()
    line = wait_here.__code__.co_firstlineno

    def find(number: int) -> Position:
        """Its position, once it is in so many lines from its first."""
        assert thread.ident is not None
        ident = thread.ident
        wait_for(lambda: f"line {line + number})" in find_position(ident).where)
        return find_position(ident)

    assert thread.ident is not None
    name = "test_position_follows_own_code.<locals>.wait_here"
    before = find(2)
    assert before.where == f"in {name} (parallel/test_hang_watch.py, line {line + 2})"
    assert find_position(thread.ident).key == before.key and not before.is_in_collective
    assert before.stack.splitlines()[-1] == f"  parallel/test_hang_watch.py, line {line + 2} in {name}"
    may_end.set()
    assert find(4).key != before.key


@pytest.mark.processes
def test_kill_process_spares_other_process_with_same_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        identity = identify_process(process.pid)
        start = identity.rpartition("/")[0]
        kill_process(f"{start}/1")  # one that had this number before
        kill_process("")
        assert process.poll() is None
        assert process.pid in find_children(os.getpid()) and process.pid not in find_children(process.pid)
        kill_process(identity)
        assert process.wait(60) == -signal.SIGKILL
        assert identify_process(process.pid) == ""
        assert identify_process(os.getpid()).split("/")[2] == str(os.getpid())
    finally:
        process.kill()
        process.wait()


def test_sigusr1_records_stacks_in_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "POLL_INTERVAL", 0.01)
    asked: list[str] = []
    recorder = stacks.start_recorder(tmp_path / "run", "rank 0")
    monkeypatch.setattr(recorder, "forward", asked.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    path = tmp_path / "run" / "stacks.txt"
    wait_for(lambda: bool(asked))
    text = path.read_text()
    assert text.startswith(f"=== rank 0, process {os.getpid()} on ")
    assert "SIGUSR1 to rank 0" in text.splitlines()[0]
    assert "in test_sigusr1_records_stacks_in_run_folder" in text
    assert asked == ["SIGUSR1 to rank 0"]

    recorder.record("it hangs")
    assert path.read_text().count("=== ") == 2 and path.read_text().count(": it hangs\n") == 1
    assert stacks.start_recorder(tmp_path / "next", "rank 1") is recorder
    recorder.record("again")
    assert (tmp_path / "next" / "stacks.txt").read_text().startswith("=== rank 1, ")


SIGNALLED = """\
import os, signal, sys, time
from pathlib import Path
from lightning.pytorch.demos.boring_classes import BoringModel
import rlightning
from rlightning.parallel.stacks import start_recorder

folder = Path(sys.argv[1])

def await_sections(number):
    os.kill(os.getpid(), signal.SIGUSR1)
    path = folder / "stacks.txt"
    while not path.exists() or path.read_text().count("=== rank 0, ") < number:
        time.sleep(0.05)

trainer = rlightning.Trainer(rollout=None, barebones=True, accelerator="cpu", max_steps=1, default_root_dir=folder)
await_sections(1)
trainer.fit(BoringModel())
os.kill(os.getpid(), signal.SIGUSR1)
start_recorder(folder, "rank 0")  # as the next run does
await_sections(2)
"""


@pytest.mark.processes
def test_sigusr1_before_and_after_run_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SIGNALLED)
    run_python(tmp_path / "program.py", tmp_path / "run")
    assert (tmp_path / "run/stacks.txt").read_text().count("=== rank 0, ") == 2


def test_stacks_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stacks.StackRecorder(tmp_path / "file" / "stacks.txt", "rank 0").record("there is no such folder")


def test_run_folder_is_one_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert stacks.run_folder("~/run") == Path("/home/me/run")
    assert stacks.run_folder("s3://bucket/run") == Path()
