"""The child process of a :class:`~rlightning.rpc.worker_pool.WorkerPool`, which runs the pool's calls."""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from io import TextIOWrapper

from rlightning.processes.process_group import end_with_parent
from rlightning.rpc.peer import Method, Peer
from rlightning.rpc.progress import ProgressFile
from rlightning.rpc.server import serve_parent

STACK_SIGNAL = signal.SIGUSR1
"""Signal at which a worker writes the stacks of all threads, even while a call holds the interpreter's lock."""


class Worker:
    """Makes this process a worker of a pool, from four arguments that the pool has appended to its command line.

    The process ends with the pool's process, ignores Ctrl-C, and writes its output to standard error.

    Attributes:
        progress: object in which the worker has to record which call it executes.
    """

    def __init__(self) -> None:
        progress, stacks, self._connection, lifeline = map(int, sys.argv[-4:])
        end_with_parent(lifeline)
        os.dup2(2, 1)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # buffered lines would be late, and lost in a crash
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.enable(stacks)
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        self.progress = ProgressFile(progress)

    async def connect(self, methods: Mapping[str, Method]) -> Peer:
        """Connect to the pool and report that this process is ready.

        Args:
            methods: ``setup`` is called with the pool's ``setup``, ``call`` with a call's key and arguments, ``finish``
                without arguments.
        """
        parent = await serve_parent(self._connection, methods)
        await parent.notify("ready")
        return parent
