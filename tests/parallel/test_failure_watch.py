"""The first failure ends all ranks: real processes in plain PyTorch, failing and being interrupted in several ways."""

import contextlib
import errno
import os
import signal
import socket
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fork_server import START_BY_EXEC
from rank_processes import end_ranks, start_ranks
from waiting import wait_for

from rlightning import intervals
from rlightning.error_report import exit_code
from rlightning.errors import ConfigError
from rlightning.parallel.failure_server import FailureServer, connect_rank
from rlightning.parallel.failure_watch import SIGNAL, FailureWatch, PeerFailure
from rlightning.parallel.rank_failure import Failure, describe, is_failure
from rlightning.rpc import LoopThread, Peer
from rlightning.rpc.peer import Method
from rlightning.rpc.server import MAX_UNAUTHENTICATED

LOOP = """\
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what was started in the background
import torch, torch.distributed as dist
from rlightning import intervals
from rlightning.parallel.failure_watch import FailureWatch

intervals.FAILURE_ANSWER_TIMEOUT = 60  # however slow rank 0 is

class TearDown:
    def __del__(self, write=os.write):
        write(2, b"the interpreter goes\\n")

def is_in_call(path):
    pid = path.read_text().strip() if path.exists() else ""
    if not pid:
        return False
    state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    return state == "S" or others == "device"  # the main thread sleeps; one that waits for a device may spin

def tell_of_wait(thread):
    # A file says that the main thread is in number.item(): twice at the same instruction of that line.
    lines, before = Path(__file__).read_text().splitlines(), None
    while True:
        frame = sys._current_frames()[thread]
        place = (frame.f_code.co_name, frame.f_lasti)
        if place == before and "number.item()" in lines[frame.f_lineno - 1]:
            at_work[rank].write_text(str(os.getpid()))
            return
        before = place
        time.sleep(0.5)

last = TearDown()
rank, failing, how, others = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("nccl" if others == "device" else "gloo")
at_work = [Path(__file__).with_name(f"at-work-{i}") for i in range(dist.get_world_size())]
with FailureWatch(grace=2 if others == "stuck" and rank != failing else 600):
    try:
        if others == "device":
            number, pair = torch.ones(1, device=f"cuda:{rank}"), dist.new_group()
            for group in (dist.group.WORLD, pair):  # their communicators are there from here on
                dist.all_reduce(number, group=group)
            assert number.tolist() == [dist.get_world_size() ** 2]
        elif others != "stuck":
            at_work[rank].write_text(str(os.getpid()))
        if failing in (rank, -1):
            awaited = [path for i, path in enumerate(at_work) if how != "end" and i != rank == failing]
            while not all(is_in_call(path) for path in awaited):
                time.sleep(0.02)
            Path(__file__).with_name("struck").touch()
            if how == "raise":
                raise ValueError("boom")
            if how == "exit":
                sys.exit(7)
            if how == "fork" and (child := os.fork()) == 0:
                os.closerange(0, 3)
                time.sleep(600)  # with copies of this rank's connections
                os._exit(0)
            if how == "fork":
                Path(__file__).with_name("child").write_text(str(child))
            if how in ("kill", "fork"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
        elif others == "sleep":
            time.sleep(600)
        elif others == "process":
            subprocess.run(["sleep", "600"])
        elif others == "collective":
            dist.all_reduce(torch.ones(1))
        elif others == "device":
            threading.Thread(target=tell_of_wait, args=(threading.get_ident(),), daemon=True).start()
            for group in (dist.group.WORLD, pair):  # an abort has to end both
                dist.all_reduce(number, group=group)
            number.item()
        elif others == "stuck":
            # Like a collective on a device: no signal gets through to Python. The shell says that this rank is in it.
            command = f"exec >/dev/null 2>&1; echo $PPID >'{at_work[rank]}'; exec tail -f /dev/null --pid=$PPID"
            ctypes.CDLL(None).system(command.encode())
        elif others == "work":
            time.sleep(rank)
    finally:
        sys.stderr.write(f"rank {rank} cleans up\\n")
        Path(__file__).with_name(f"cleaned-up-{rank}").touch()
sys.stderr.write(f"rank {rank} is through\\n")
"""


def run_ranks(folder: Path, failing: int, how: str, others: str, num_ranks: int = 3) -> tuple[list[int], list[str]]:
    """Exit codes and standard errors of the ranks, of which one fails, or all if ``failing`` is -1."""
    script = folder / "loop.py"
    script.write_text(LOOP)
    ranks = start_ranks(script, num_ranks, str(failing), how, others)
    try:
        errors = [process.communicate(timeout=500)[1] for process in ranks]
    finally:
        end_ranks(ranks)
    return [process.returncode for process in ranks], errors


@pytest.mark.processes
@pytest.mark.parametrize(("failing", "others"), [(1, "sleep"), (0, "collective"), (2, "stuck")])
def test_exception_ends_all_ranks_shown_once(tmp_path: Path, failing: int, others: str) -> None:
    codes, errors = run_ranks(tmp_path, failing, "raise", others)
    assert codes == [1, 1, 1], errors
    for rank, error in enumerate(errors):
        assert error.count("Traceback") == (rank == failing)
        line = f"rank {rank} ends because rank {failing} failed: ValueError: boom"
        assert error.count(line) == (rank != failing)
        assert "is through" not in error
        # A thread of gloo's may still hold tensors of the broken collective.
        assert "the interpreter goes" not in error
        # What nothing interrupts is ended when the grace is over, without cleaning up.
        assert (f"rank {rank} cleans up" in error) == (rank == failing or others != "stuck")


@pytest.mark.processes
def test_killed_ranks_have_exit_code_of_the_failed(tmp_path: Path) -> None:
    """Rank 0 is in a call that nothing interrupts, until the grace is over."""
    codes, errors = run_ranks(tmp_path, 1, "exit", "stuck", num_ranks=2)
    assert codes == [7, 7], errors


def test_interrupted_waiting_ranks_end_with_first_exit_code() -> None:
    """Which of the two ends a rank 0 that waits for the others depends on the moment."""
    watch, server = FailureWatch(), cast(Any, SimpleNamespace(is_over=threading.Event()))
    watch._first = Failure(1, "failed", 7)
    for end in (partial(watch._interrupt, SIGNAL, None), partial(watch._await_others, server)):
        watch._is_ending = False
        with pytest.raises(PeerFailure) as raised:
            end()
        assert raised.value.code == 7


AT_EXIT = """\
import os, torch.distributed as dist
from rlightning.errors import ConfigError
from rlightning.parallel.failure_watch import FailureWatch

dist.init_process_group("gloo")
watch = FailureWatch()
watch.start()
watch.stop_at_exit()
if os.environ["RANK"] == "1":
    raise ConfigError("boom")
"""


@pytest.mark.processes
def test_finished_ranks_exit_with_failed_ranks_code(tmp_path: Path) -> None:
    """Rank 0 waits for the others at its exit, and rank 1's exception is uncaught."""
    script = tmp_path / "at_exit.py"
    script.write_text(AT_EXIT)
    ranks = start_ranks(script, 2)
    try:
        errors = [process.communicate(timeout=500)[1] for process in ranks]
    finally:
        end_ranks(ranks)
    assert [process.returncode for process in ranks] == [2, 2], errors


@pytest.mark.processes
def test_an_exception_of_all_ranks_has_one_traceback(tmp_path: Path) -> None:
    codes, errors = run_ranks(tmp_path, -1, "raise", "sleep", num_ranks=2)
    assert codes == [1, 1], errors
    assert sum(error.count('raise ValueError("boom")') for error in errors) == 1
    assert all("cleans up" in error for error in errors)


@pytest.mark.processes
@pytest.mark.parametrize(("failing", "others", "num_ranks"), [(1, "process", 4), (0, "stuck", 3)])
def test_a_killed_rank_ends_the_others(tmp_path: Path, failing: int, others: str, num_ranks: int) -> None:
    codes, errors = run_ranks(tmp_path, failing, "kill", others, num_ranks)
    assert [code for rank, code in enumerate(codes) if rank != failing] == [1] * (num_ranks - 1)
    for rank, error in enumerate(errors):
        if rank != failing:
            assert f"rank {rank} ends because rank {failing} is gone" in error
            assert "Traceback" not in error


@pytest.mark.processes
def test_killed_rank_with_forked_child_ends_the_others(tmp_path: Path) -> None:
    """The child does not keep the connection to the failure watch open."""
    try:
        codes, errors = run_ranks(tmp_path, 1, "fork", "sleep", num_ranks=2)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # which is still there
    assert codes == [1, -signal.SIGKILL], errors
    assert "rank 0 ends because rank 1 is gone" in errors[0]


@pytest.mark.parametrize(
    ("how", "num_ranks"),
    [
        pytest.param("raise", 2, marks=pytest.mark.multigpu),
        pytest.param("kill", 2, marks=pytest.mark.multigpu),
        pytest.param("kill", 4, marks=pytest.mark.multigpu(4)),
    ],
)
def test_failure_ends_ranks_blocked_in_device_collective(tmp_path: Path, how: str, num_ranks: int) -> None:
    """Within seconds, with a grace of ten minutes: their communicators are aborted, and they clean up."""
    codes, errors = run_ranks(tmp_path, 1, how, "device", num_ranks)
    struck = (tmp_path / "struck").stat().st_mtime
    for rank in set(range(num_ranks)) - {1}:
        assert codes[rank] == 1, errors
        assert f"rank {rank} ends because rank 1 " in errors[rank]
        assert f"rank {rank} cleans up" in errors[rank] and "is through" not in errors[rank]
        assert "Traceback" not in errors[rank]
        assert (tmp_path / f"cleaned-up-{rank}").stat().st_mtime - struck < 30


@pytest.mark.processes
def test_an_interrupt_of_one_rank_ends_all(tmp_path: Path) -> None:
    codes, errors = run_ranks(tmp_path, 1, "interrupt", "sleep")
    assert codes[0] == codes[2] == 130
    assert codes[1] in (130, -signal.SIGINT)
    assert [error.count("KeyboardInterrupt") for error in errors] == [0, 1, 0]
    assert all("cleans up" in error for error in errors)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_finishing_at_different_times_do_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_BY_EXEC, "1")  # it is about an interpreter's own end
    codes, errors = run_ranks(tmp_path, 0, "end", "work", num_ranks=2)
    assert codes == [0, 0], errors
    assert [error.splitlines() for error in errors] == [
        [f"rank {rank} cleans up", f"rank {rank} is through", "the interpreter goes"] for rank in range(2)
    ]


class Hub:
    """A failure server of some ranks in this process, with what it has been told and has decided."""

    def __init__(self, world_size: int) -> None:
        self.decided: list[Failure] = []
        self.reported: list[int] = []
        self.left: list[int] = []
        self.ends: dict[int, dict[str, Any]] = {}
        self.loop = LoopThread("failure-server")
        self.server = FailureServer(
            world_size,
            on_first=self.decided.append,
            find_cause=self.find_cause,
            on_report=lambda rank, status: self.reported.append(rank),
            on_leave=self.left.append,
        )
        self.loop.run(self.server.start())

    async def find_cause(self, rank: int) -> str:
        return "died"

    def connect(self, number: int, key: bytes | None = None) -> Peer:
        async def rank() -> int:
            return number

        async def end(failure: dict[str, Any]) -> None:
            self.ends[number] = failure

        methods: dict[str, Method] = {"rank": rank, "end": end}
        return self.loop.run(connect_rank(["localhost"], self.server.port, key or self.server.key, methods), 60)

    def send(self, peer: Peer, method: str, *arguments: Any) -> None:
        self.loop.run(peer.call(method, *arguments), 60)

    def close(self) -> None:
        self.loop.run(self.server.close(), 60)
        self.loop.close()


def test_failure_server_reports_death_over_concurrent_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' connections to the dead break, too, and may be seen first."""
    monkeypatch.setattr(intervals, "FAILURE_DECISION_DELAY", 600)  # a death decides at once
    hub = Hub(3)
    first, second, third = (hub.connect(rank) for rank in range(3))
    for rank, peer in enumerate((first, second, third)):
        hub.send(peer, "report", rank, {})
    failure = {"rank": 1, "text": "failed: RuntimeError: Connection closed by peer", "exit_code": 1}
    hub.loop.run(second.notify("fail", 1, failure), 60)
    wait_for(lambda: hub.server.cleaning_up == {1})
    hub.loop.run(third.close(), 60)
    wait_for(lambda: 0 in hub.ends)
    assert hub.ends[0]["rank"] == 2 and hub.ends[0]["text"] == "died"
    assert [failure.rank for failure in hub.decided] == [2]
    hub.close()


def test_failure_server_reports_failure_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "FAILURE_DECISION_DELAY", 600)
    hub = Hub(2)
    first, second = hub.connect(0), hub.connect(1)
    hub.send(first, "report", 0, {})
    hub.send(second, "report", 1, {})
    hub.loop.run(second.notify("fail", 1, {"rank": 1, "text": "failed: ValueError: boom"}), 60)
    wait_for(lambda: hub.server.cleaning_up == {1})
    hub.loop.run(second.close(), 60)
    wait_for(lambda: 0 in hub.ends)
    assert hub.decided == [Failure(1, "failed: ValueError: boom")]
    hub.close()


@pytest.mark.long
def test_failure_server_keeps_first_of_two_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to all ranks ends two at once: the one that ends earlier has said why, and did not die unexplained."""
    monkeypatch.setattr(intervals, "FAILURE_DECISION_DELAY", 0.5)
    hub = Hub(2)
    first, second = hub.connect(0), hub.connect(1)
    signalled = [Failure(rank, "was ended by a signal", 143, is_foreseen=True) for rank in (0, 1)]
    hub.loop.run(first.notify("fail", 0, asdict(signalled[0])), 60)
    wait_for(lambda: hub.server.cleaning_up == {0})
    hub.send(second, "fail", 1, asdict(signalled[1]))
    hub.loop.run(second.close(), 60)
    wait_for(lambda: 0 in hub.ends)
    assert hub.decided == [signalled[0]]
    hub.close()


def test_failure_server_refuses_strangers_and_ends() -> None:
    hub = Hub(1)
    with pytest.raises(ConnectionError, match="it has another key"):
        hub.connect(0, b"guessed")
    hub.send(hub.connect(0), "leave", 0)
    assert hub.server.is_over.wait(60)
    assert hub.decided == [] and hub.left == [0]
    hub.close()


@pytest.mark.long
def test_failure_server_outlives_many_silent_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "JOIN_TIMEOUT", 60.0)
    hub = Hub(2)
    peers = [hub.connect(rank) for rank in range(2)]
    monkeypatch.setattr(hub.server._server, "_timeout", 1.0)  # of those who connect from here on
    address = ("localhost", hub.server.port)
    babbler = socket.create_connection(address, 60)
    with contextlib.suppress(OSError):
        babbler.sendall(b"[" * 100_000)
    assert is_closed(babbler)
    assert is_closed(socket.create_connection(address, 60)), "after a second"
    accept, left = socket.socket.accept, iter(range(3))

    def fail_thrice(server: socket.socket) -> Any:
        if next(left, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", fail_thrice)
    crowd = [socket.create_connection(address, 60) for _ in range(MAX_UNAUTHENTICATED + 4)]
    assert is_closed(crowd[0])
    for rank, peer in enumerate(peers):
        hub.send(peer, "leave", rank)
    assert hub.server.is_over.wait(60) and hub.decided == []
    hub.close()


def is_closed(stranger: socket.socket) -> bool:
    """Whether the server ends the connection, after its part of the handshake."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(4096):
            pass
    return True


def test_exceptions_map_to_failures_exit_codes_and_descriptions() -> None:
    assert [is_failure(SystemExit(code)) for code in (None, 0, 3)] == [False, False, True]
    errors = (SystemExit(3), KeyboardInterrupt(), ConfigError("x"), ValueError("x"))
    assert [exit_code(error) for error in errors] == [3, 130, 2, 1]
    assert describe(ValueError("one\ntwo")) == "failed: ValueError: one"
    assert describe(ValueError()) == "failed: ValueError"
