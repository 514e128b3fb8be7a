"""The process that async reward functions run in, on one event loop from its start to its end.

The parent can see at any time whether the loop gets on and whose task runs (:class:`LoopState`), also when a call holds
the interpreter's lock or has ended the process. It ends a process whose loop a call blocks, and starts another.
"""

import faulthandler
import mmap
import os
import select
import signal
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlightning import intervals
from rlightning.rewards.calls import Answered, Outcome
from rlightning.rewards.event_loop import EventLoopPool, LoopFunction, Owner
from rlightning.rewards.loop_thread import LoopThread, free_loop
from rlightning.rewards.worker import Loaded, load_functions

NOBODY = -1
"""The key of no call."""
STATE_BYTES = 16
STACK_SIGNAL = signal.SIGUSR1
"""Has a worker write the stacks of all its threads into its log, also while a call holds the interpreter's lock."""


class LoopState:
    """What a process shows of its event loop, in memory that it shares with its parent.

    Args:
        fd: of a file of :data:`STATE_BYTES`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, STATE_BYTES)
        self._fields = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls) -> "LoopState":
        """Make one that a child process can open by its file descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("rlightning-rewards")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.pwrite(fd, bytes(STATE_BYTES), 0)
        state = cls(fd)
        state.show(NOBODY)
        return state

    def show(self, running: int) -> None:
        """Say that the loop gets on.

        Args:
            running: the key of the call that the running task belongs to, or :data:`NOBODY`.
        """
        self._fields[1] = running
        self._fields[0] += 1

    @property
    def progress(self) -> int:
        """A count that grows as long as the loop gets on."""
        return int(self._fields[0])

    @property
    def running(self) -> int:
        """The key of the call that the running task belongs to, or :data:`NOBODY`."""
        return int(self._fields[1])

    def close(self) -> None:
        """Free the memory."""
        self._fields.release()
        self._memory.close()
        os.close(self.fd)


def serve(connection_fd: int, log_fd: int, state_fd: int) -> None:
    """Run calls until the parent says that it needs no more (None), closes the connection, or dies.

    A list of calls starts these; a frozenset of samples cancels the calls on them. Each answer is a call's key and its
    outcome.
    """
    _end_with_parent(connection_fd)
    connection: Connection[Any, Any] = Connection(connection_fd)
    functions = load_functions(connection, log_fd)
    faulthandler.register(STACK_SIGNAL, file=log_fd, all_threads=True)
    thread = free_loop()
    thread.watch = partial(_show, LoopState(state_fd))

    def report(answer: Answered | BaseException) -> None:
        assert isinstance(answer, Answered)  # this pool reports no other errors
        connection.send((answer.call.key, answer.outcome))

    pool = EventLoopPool([_bind(function) for function in functions], 1, report)
    connection.send("ready")
    try:
        while (message := connection.recv()) is not None:
            if isinstance(message, frozenset):
                pool.withdraw(message)
            else:
                pool.submit(message)
    except (EOFError, OSError):
        pass
    pool.close()
    thread.close()
    os.killpg(0, signal.SIGKILL)  # and what the functions have started


def _end_with_parent(connection_fd: int) -> None:
    """Fork a process that kills this one's group when the parent has died and a call keeps this one from ending itself.

    The kernel's own signal (``PR_SET_PDEATHSIG``) would come with the end of the parent's thread, which is there for as
    long as calls are.
    """
    if not hasattr(os, "pidfd_open"):
        return
    parent, this = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
    if os.fork() != 0:
        os.close(parent)
        os.close(this)
        return
    os.close(connection_fd)
    ended, _, _ = select.select([parent, this], [], [])
    if this not in ended and not select.select([this], [], [], 3 * intervals.CANCEL_GRACE)[0]:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _show(state: LoopState, thread: LoopThread) -> None:
    call = thread.current.call if isinstance(thread.current, Owner) else None
    state.show(NOBODY if call is None else call.key)


def _bind(loaded: Loaded) -> LoopFunction:
    function = partial(_give, loaded.function) if isinstance(loaded.function, Outcome) else loaded.function
    return LoopFunction(function, is_async=True, timeout=loaded.timeout)


async def _give(outcome: Outcome, /, **arguments: Any) -> Outcome:
    return outcome
