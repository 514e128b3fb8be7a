"""Temporary folders; those of killed processes are removed by the next process on the host.

A folder belongs to the process that has locked it; the kernel releases the lock when that process ends.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from rlightning.run_lock import WITHOUT_LOCKS

PREFIX = "rlightning."
LONGEST_PARENT = 18
"""Maximum length of the temporary folder's path; else /tmp is used. Ray appends 88 characters, of a socket's 107."""
SHARED_MEMORY = Path("/dev/shm")
VLLM_NAME = "vllm_dist_*"
"""Pattern of vLLM's file in an engine's folder; its workers' shared memory on a CPU has the same name with a suffix."""


class ScratchFolder:
    """A temporary folder of this process; constructing one removes folders of ended processes.

    Args:
        kind: part of the folder's name.

    Attributes:
        path: the folder.
    """

    def __init__(self, kind: str) -> None:
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= LONGEST_PARENT else "/tmp"
        for left in Path(parent).glob(f"{PREFIX}{kind}.*"):
            with contextlib.suppress(OSError):  # it was removed, is another user's or in use, or the disk has no locks
                lock = _lock(left)
                remove_scratch(left)
                os.close(lock)
        self._descriptor: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}.", dir=parent))
            try:
                self._descriptor = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):  # another process is removing it, or has removed it
                continue
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                return  # no other process can lock it either, and so none removes it
            if self.path.exists():
                return
            os.close(self._descriptor)  # another process has just removed it

    def __fspath__(self) -> str:
        return str(self.path)

    def remove(self) -> None:
        """Remove the folder and its shared memory. May be called twice."""
        remove_scratch(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove_scratch(folder: Path) -> None:
    """Remove an unused scratch folder, and the shared memory that vLLM named after a file in it."""
    names = [path.name for path in folder.glob(VLLM_NAME)]
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        for segment in SHARED_MEMORY.glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                segment.unlink()


def _lock(folder: Path) -> int:
    """Lock a folder; return the file descriptor that holds the lock.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
