"""The barrier between real processes: in order, and with a rank that sleeps, raises, or is gone."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_processes import end_ranks, results, run_script, start_ranks
from torch._C._distributed_c10d import HashStore

from rlightning import intervals
from rlightning.parallel import barrier as barriers
from rlightning.parallel.barrier import BarrierError, add_barrier_hook, barrier, remove_barrier_hook
from rlightning.parallel.cpu_group import Connection
from rlightning.parallel.rank_store import RankStore

CLOSED = "a connection between the ranks closed"
MEET = """\
import json, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from rlightning.parallel.barrier import BarrierError, add_barrier_hook, barrier
from rlightning import intervals
from rlightning.parallel import barrier as barriers, cpu_group
from rlightning.parallel.cpu_group import set_barrier_timeout

rank, result = int(os.environ["RANK"]), {}

def note(key, name, **kwargs):
    start = time.monotonic()
    try:
        barrier(name, **kwargs)
        result[key] = None
    except BarrierError as error:
        result[key] = str(error)
        result[key + " missing"] = list(error.missing_ranks)
    result[key + " seconds"] = time.monotonic() - start

def tell(what):
    Path(f"{what}-{rank}").touch()

def wait_for(what, *ranks):
    while not all(Path(f"{what}-{other}").exists() for other in ranks):
        time.sleep(0.02)

def leave(what):
    tell(what)
    if rank == 0:
        wait_for(what, 1, 2)  # which ask rank 0's store

ports = os.environ["FREE_PORTS"].split()

def connect():
    if dist.is_initialized():
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = ports.pop()  # rank 0 may be the last to let go of the old store
    dist.init_process_group("gloo")

connect()
"""

LIVING = (
    MEET
    + """
# The last to come is not early, and nobody leaves before.
time.sleep(rank * 0.2)
came = time.monotonic()  # one clock for all processes
barrier("first")
result["came"], result["left"] = came, time.monotonic()
heard = []
add_barrier_hook(lambda: heard.append(rank))
for _ in range(50):
    barrier("again")
result["hooks"] = len(heard)

if rank == 1:
    wait_for("gave up", 0, 2)
note("late", "save", timeout=600 if rank == 1 else 10)
tell("gave up")
note("after", "next")  # a rank that goes on regardless learns of it at once

leave("went on")
connect()
set_barrier_timeout(200)
note("other name", "left" if rank == 2 else "right")

leave("met elsewhere")
connect()
if rank == 2:
    wait_for("did not meet", 0, 1)
note("never made", "very first", timeout=10)
tell("did not meet")
print(json.dumps(result), flush=True)
leave("is through")
"""
)

GOING = (
    MEET
    + """
barrier("start")
# The barrier's own timeout ends the waiting for a store that does not answer.
intervals.STORE_TIMEOUT, intervals.MIN_STORE_TIMEOUT = 600, 15
intervals.BARRIER_REPORT_GRACE = 15  # also who is slow answers
if rank == int(sys.argv[1]):
    shared = cpu_group.connection()
    for other in {0, 1, 2} - {rank}:  # have left the first one and come to the next
        while json.loads(shared.store.get(f"arrival/{other}"))[0] == shared.num_barriers:
            time.sleep(0.02)
    if sys.argv[2] == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sys.argv[2]])
note("gone", "save", timeout=6 if sys.argv[2] == "stop" else 600)
print(json.dumps(result), flush=True)
os._exit(0)  # the group would wait for the missing at its end
"""
)


@pytest.mark.processes
def test_barrier_of_living_ranks_names_the_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "living.py"
    script.write_text(LIVING)
    told = run_script(script, 3)
    assert max(one["came"] for one in told) <= min(one["left"] for one in told)
    assert [one["hooks"] for one in told] == [50, 50, 50]
    assert [one["late missing"] for one in told] == [[1]] * 3
    late = {one["late"] for one in told}
    assert len(late) == 1
    assert late.pop().startswith(
        "Barrier 'save' was not reached by rank 1 within 10 s: rank 1 was last seen at barrier"
    )
    assert all(one["late seconds"] < 300 for one in told)  # of rank 1's 600, too: it learns of it at once
    assert [one["after"] for one in told] == [one["late"] for one in told]
    assert {one["other name"] for one in told} == {
        "The ranks met at different barriers: rank 2 at 'left'; ranks 0 and 1 at 'right'. "
        "They must come to the same ones in one order."
    }
    assert {one["never made"] for one in told} == {
        "Barrier 'very first' was not reached by rank 2 within 10 s: rank 2 has reached no barrier yet."
    }


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "message"),
    [
        (1, "raise", f"Barrier 'save' broke: {CLOSED}; rank 1 was last seen at barrier 'start'"),
        (2, "kill", f"Barrier 'save' broke: {CLOSED}; rank 2 was last seen at barrier 'start'"),
        (1, "stop", "Barrier 'save' was not reached by rank 1 within 6 s: rank 1 was last seen at barrier 'start'"),
        (0, "kill", "Barrier 'save' broke: the ranks' store does not answer. Rank 0, which hosts it"),
        (0, "stop", "Barrier 'save' broke: the ranks' store does not answer. Rank 0, which hosts it"),
    ],
)
def test_lost_rank_is_named_on_all_others(tmp_path: Path, rank: int, how: str, message: str) -> None:
    script = tmp_path / "going.py"
    script.write_text(GOING)
    ranks = start_ranks(script, 3, str(rank), how)
    others = [process for i, process in enumerate(ranks) if i != rank]
    try:
        told = results(others)
        if how == "stop":
            ranks[rank].send_signal(signal.SIGKILL)
    finally:
        end_ranks(ranks)
    assert len({one["gone"] for one in told}) == 1
    for one in told:
        assert one["gone"].startswith(message)
        assert one["gone missing"] == [rank]
        assert one["gone seconds"] < 300


class Failed(dist.Work):
    """An all-reduce whose connection closed, or whose time is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *args: Any) -> bool:
        raise RuntimeError("gloo says which, in words of its own")


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (600.0, f"Barrier 'save' broke: {CLOSED}; rank 1 has reached no barrier yet."),
        (0.0, "Barrier 'save' was not reached by rank 1 within 0 s: rank 1 has reached no barrier yet."),
    ],
)
def test_barrier_failure_after_deadline_is_reported_as_timeout(
    seconds: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rank that stalls beyond the deadline the all-reduce fails before the deadline is checked."""
    monkeypatch.setattr(intervals, "BARRIER_REPORT_GRACE", 0)
    shared = Connection(RankStore(HashStore(), "", rank=0, world_size=2), num_barriers=1)
    meeting = barriers._Barrier("save", seconds, shared)
    monkeypatch.setattr(barriers, "_start_max", lambda tensor, seconds: Failed())
    monkeypatch.setattr(meeting, "has_group", True)
    with pytest.raises(BarrierError) as caught:
        meeting.wait()
    assert (str(caught.value), caught.value.missing_ranks) == (message, (1,))
    shared.store.close()


def test_single_process_barrier_runs_hooks_and_returns() -> None:
    heard: list[str] = []

    def hear() -> None:
        heard.append("hook")

    add_barrier_hook(hear)
    barrier("alone")
    remove_barrier_hook(hear)
    barrier("alone")
    assert heard == ["hook"]
    assert barriers._hooks == []
