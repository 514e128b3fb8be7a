"""Writes the stacks of a run's processes to ``stacks.txt`` in its folder: on SIGUSR1, and before a timeout ends it.

``faulthandler`` writes them without Python's lock, even while the main thread waits in a collective.
"""

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlightning import intervals

FILE_NAME = "stacks.txt"
SIGNAL = signal.SIGUSR1


class StackRecorder(threading.Thread):
    """Thread that appends this process's stack traces to the run's ``stacks.txt``, on SIGUSR1 or on request.

    Args:
        name: name of this process in the file, such as "rank 1".

    Attributes:
        forward: called with a reason to have the other processes of the run record their stacks.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name="stack-recorder", daemon=True)
        self.path, self.process_name = path, name
        self.forward: Callable[[str], None] = do_nothing
        self._raw = os.memfd_create("stacks")  # needs no disk, and stays open until the process ends
        self._num_read = 0
        self._lock = threading.Lock()

    def take_signal(self) -> None:
        """Record stack traces on SIGUSR1 from now on, unless the program has its own handler for it.

        After the run the signal is ignored, since its default action would end the process.
        """
        if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            return
        faulthandler.unregister(SIGNAL)
        # Lightning's requeueing under SLURM takes the signal only where it is not ignored.
        if threading.current_thread() is threading.main_thread() and "SLURM_NTASKS" not in os.environ:
            signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, file=self._raw, all_threads=True)
        if not self.is_alive():
            self.start()

    def run(self) -> None:
        """Poll whether SIGUSR1 has arrived, and record the stacks if so."""
        while True:
            size = os.fstat(self._raw).st_size
            time.sleep(intervals.POLL_INTERVAL)
            with self._lock:
                is_complete = os.fstat(self._raw).st_size == size  # the handler writes in many parts
                text = self._take_raw() if is_complete else ""
            if text:
                reason = f"{SIGNAL.name} to {self.process_name}"
                self.append(reason, text)
                self.forward(reason)

    def record(self, reason: str) -> None:
        """Append the current stacks of all threads of this process to the run's file."""
        with self._lock:
            faulthandler.dump_traceback(self._raw, all_threads=True)
            text = self._take_raw()
        self.append(reason, text)

    def append(self, reason: str, text: str, *, name: str | None = None) -> None:
        """Append a section with a reason and stack traces to the file in one write.

        Args:
            reason: why they are recorded, in the section's first line.
            text: the stack traces.
            name: whose stack traces these are; None for this process.
        """
        here = f"{name or f'{self.process_name}, process {os.getpid()}'} on {socket.gethostname()}"
        section = f"=== {here}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n{text.rstrip()}\n\n"
        with suppress(OSError):  # it only observes, and the process ends soon
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:  # so that a section is one write
                file.write(section.encode(errors="replace"))

    def _take_raw(self) -> str:
        """Return the output of ``faulthandler`` since the last call."""
        size = os.fstat(self._raw).st_size
        data = os.pread(self._raw, size - self._num_read, self._num_read)
        self._num_read = size
        return data.decode(errors="replace")


def do_nothing(reason: str) -> None:
    """Do nothing: ``StackRecorder.forward`` in a run of one process, which has no others to record."""


_recorder: StackRecorder | None = None


def start_recorder(folder: Path, name: str) -> StackRecorder:
    """Start this process's recorder of stack traces, and return it.

    A recorder that runs already continues with the new folder and name.

    Args:
        folder: the run's folder, for ``stacks.txt``.
        name: name of this process in the file, such as "rank 1".
    """
    global _recorder
    is_left = _recorder is not None and _recorder.ident is not None and not _recorder.is_alive()
    if _recorder is None or is_left:  # by the process that this one was forked from
        _recorder = StackRecorder(folder / FILE_NAME, name)
    _recorder.path, _recorder.process_name = folder / FILE_NAME, name
    _recorder.take_signal()
    return _recorder


def run_folder(root_dir: str) -> Path:
    """Return the folder for a run's ``stacks.txt``: ``root_dir``, or the working directory if that is a URL."""
    return Path() if "://" in root_dir else Path(root_dir).expanduser()


def record_own(reason: str) -> None:
    """Append this process's stack traces to the run's ``stacks.txt``, if it has a recorder."""
    if _recorder is not None:
        _recorder.record(reason)


def record_all(reason: str) -> None:
    """Have all processes of the run write their stack traces to ``stacks.txt``, and give them a short time for it.

    Without a recorder, do nothing.
    """
    record_own(reason)
    if _recorder is not None:
        _recorder.forward(reason)
        time.sleep(intervals.STACKS_GRACE)
