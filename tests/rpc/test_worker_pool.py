"""Calls on real worker processes: what a hang, a death or a cancellation costs, and what starts again."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import in_event_loop, still_running

from rlightning import intervals
from rlightning.rpc import ConnectionLostError, ProcessStartError, RemoteError, pooled_worker
from rlightning.rpc.run_key import RUN_KEY_VARIABLE
from rlightning.rpc.worker_pool import WorkerExitError, WorkerHungError, WorkerLostError, WorkerPool

pytestmark = pytest.mark.processes

HANG_TIMEOUT = 1.5
LONG_HANG_TIMEOUT = 5.0
"""Of calls any of which may be the one that hangs: a busy host may stop those that do not for seconds, too."""


def make_pool(num_workers: int = 1, max_calls: int = 8, setup: str = "") -> WorkerPool:
    command = [sys.executable, str(Path(__file__).with_name("pool_worker.py"))]
    return WorkerPool(
        command,
        name="test worker",
        num_workers=num_workers,
        max_calls=max_calls,
        setup=[setup],
    )


def count(folder: Path, deed: str) -> int:
    return len(list(folder.glob(f"{deed}.*")))


@in_event_loop
async def test_failures_cost_their_own_calls_only(tmp_path: Path) -> None:
    """One pool: its process is replaced again and again."""

    async def do(pool: WorkerPool, *deeds: str) -> list[Any]:
        all_hang = "backtrack in a thread" in deeds  # a hang that is no call's step lasts as long as any call may
        usual = LONG_HANG_TIMEOUT if all_hang else 60.0
        timeouts = [HANG_TIMEOUT if deed in ("block", "backtrack", "stop") else usual for deed in deeds]
        calls = [pool.call(deed, str(tmp_path), hang_timeout=s) for deed, s in zip(deeds, timeouts, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    pool = make_pool()
    [first] = await do(pool, "a")
    results = await do(pool, "slow", "raise", "b")
    assert results[0] == results[2] == first and isinstance(results[1], RemoteError)
    expected: list[tuple[str, type[WorkerLostError], str, int]] = [
        ("block", WorkerHungError, "in do", 1),
        ("backtrack", WorkerHungError, "in backtrack", 1),
        # Suspended: nobody can write its stacks.
        ("stop", WorkerHungError, "", 1),
        ("exit", WorkerExitError, "", 1),
        # Which call it was shows only as each is run alone.
        ("backtrack in a thread", WorkerHungError, "in backtrack", 2),
    ]
    for deed, kind, frame, num_calls in expected:
        slow, failed, other = await do(pool, "slow", deed, "c")
        assert type(failed) is kind and frame in failed.stacks, (deed, failed)
        assert count(tmp_path, deed) == num_calls, deed
        assert isinstance(slow, int) and isinstance(other, int) and slow != first
    assert str((await do(pool, "exit"))[0]) == "exit code 3"
    await pool.close()


@in_event_loop
async def test_late_stacks_are_awaited_while_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_worker, "STACK_SECONDS", 3600.0)
    pool = make_pool()
    for deed, stacks in (("write stacks late", "a late frame"), ("stop", ""), ("die for stacks", "")):
        with pytest.raises(WorkerHungError) as caught:
            await pool.call(deed, str(tmp_path), hang_timeout=HANG_TIMEOUT)
        assert caught.value.stacks == stacks
    await pool.close()


@in_event_loop
async def test_idle_death_and_close_start_new_processes(tmp_path: Path) -> None:
    pool = make_pool(num_workers=2, max_calls=1)
    folder = str(tmp_path)
    first = await asyncio.gather(*(pool.call("slow", folder, hang_timeout=60) for _ in range(4)))
    assert len(set(first)) <= 2
    os.kill(first[0], signal.SIGKILL)
    again = [await pool.call("a", folder, hang_timeout=60) for _ in range(3)]
    assert first[0] not in again
    holding = asyncio.ensure_future(pool.call("hold", folder, hang_timeout=60))
    while not count(tmp_path, "hold"):
        await asyncio.sleep(0.01)
    await pool.close()
    with pytest.raises(ConnectionLostError, match="the pool was closed"):
        await holding
    assert await pool.call("a", folder, hang_timeout=60) not in again
    await pool.close()


@in_event_loop
async def test_cancelled_call_ends_in_its_process(tmp_path: Path) -> None:
    pool = make_pool()
    call = asyncio.ensure_future(pool.call("hold", str(tmp_path), hang_timeout=60))
    while not count(tmp_path, "hold"):
        await asyncio.sleep(0.01)
    call.cancel()
    while not (tmp_path / "cleaned up").exists():
        await asyncio.sleep(0.01)
    assert isinstance(await pool.call("a", str(tmp_path), hang_timeout=60), int)
    await pool.close()


@pytest.mark.parametrize(
    ("setup", "timeout", "reason"),
    [
        ("exit", 300.0, r"test worker ended before it was ready \(exit code 5\)"),
        ("raise", 300.0, "test worker could not be set up: ValueError: raise"),
        ("hold", 2.0, "test worker was not ready after 2 s"),
    ],
)
@in_event_loop
async def test_worker_that_cannot_start_fails_all_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, timeout: float, reason: str
) -> None:
    monkeypatch.setattr(intervals, "WORKER_START_TIMEOUT", timeout)
    pool = make_pool(setup=setup)
    calls = [pool.call("a", str(tmp_path), hang_timeout=60) for _ in range(3)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        with pytest.raises(ProcessStartError, match=reason):
            raise error
    await pool.close()


@in_event_loop
async def test_check_starts_all_workers_without_the_runs_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret")
    pool = make_pool(num_workers=2)
    await pool.check()
    assert len(pool._workers) == 2
    assert await pool.call("has key", str(tmp_path), hang_timeout=60) == 0
    await pool.close()


@in_event_loop
async def test_worker_failing_to_start_leaves_calls(tmp_path: Path) -> None:
    pool, folder = make_pool(num_workers=2, setup=str(tmp_path)), str(tmp_path)
    await pool.call("a", folder, hang_timeout=60)
    calls = [pool.call("slow", folder, hang_timeout=60) for _ in range(2)]
    assert all(isinstance(one, int) for one in await asyncio.gather(*calls))
    assert count(tmp_path, "slow") == 2
    await pool.close()


UNCLOSED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from test_worker_pool import make_pool
from rlightning.rpc.client import LoopThread
pid = LoopThread("calls").run(make_pool().call("a", sys.argv[1], hang_timeout=60.0))
if sys.argv[2] == "killed":
    os.kill(pid, signal.SIGKILL)
print(pid)
"""


@pytest.mark.parametrize("end", ["alive", "killed"])
def test_program_without_pool_close_ends_its_worker_silently(end: str, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path), end, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert still_running([int(done.stdout)]) == []
    assert done.stderr == ""
