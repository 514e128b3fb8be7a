"""Locks a run's folder, so that no two runs overwrite each other's checkpoints, completions and report."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from rlightning.errors import ConfigError

log = logging.getLogger(__name__)

LOCK = ".run.lock"
"""Lock file in the folder of a running run, which the system unlocks when the process ends."""
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Error numbers of file systems without locks, such as NFS or Lustre mounted without them."""

_held: dict[Path, tuple[int, list[Path]]] = {}
"""File descriptor, and the folders that this process has created for it, innermost first, by lock file."""


class FolderTakenError(ConfigError):
    """Another run uses the folder."""


def lock_run(folder: Path) -> bool:
    """Lock a run's folder, created if necessary, until :func:`unlock_run` or the end of this process.

    Args:
        folder: the run's folder; only rank 0, or the controller, locks it.

    Returns:
        Whether this call locked the folder; False if this process had already locked it.

    Raises:
        FolderTakenError: another run uses the folder.
        ConfigError: the folder is not writable.
    """
    path = folder.absolute() / LOCK
    if path in _held:
        return False
    check_writable(folder, "trainer.default_root_dir")
    created = [one for one in (path.parent, *path.parent.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _held[path] = _open_locked(path), created
    except BlockingIOError:
        raise _taken(folder, path) from None
    except OSError as error:
        raise _not_writable(folder, "trainer.default_root_dir", error.strerror) from error
    return True


def relock_run(folder: Path) -> None:
    """Lock a run's folder again, with a warning, if the folder or its lock file was removed.

    Args:
        folder: the run's folder; ignored if this process has not locked it.

    Raises:
        FolderTakenError: another run has locked the folder meanwhile.
    """
    path = folder.absolute() / LOCK
    if path not in _held or _is_same(path, _held[path][0]):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(path)
    except BlockingIOError:
        raise _taken(folder, path) from None
    except OSError:
        return  # a later write to the folder reports the error
    old, created = _held[path]
    os.close(old)
    _held[path] = descriptor, created
    log.warning(
        "The run's folder %s, or %s in it, was removed while the run was at work: what had been written there may be "
        "lost. The run goes on, and writes there again.",
        folder,
        LOCK,
    )


def unlock_run(folder: Path) -> None:
    """Unlock a run's folder, and remove it, and then folders above it, if empty and created by this process."""
    path = folder.absolute() / LOCK
    descriptor, created = _held.pop(path, (None, []))
    if descriptor is None:
        return
    with contextlib.suppress(OSError):  # the disk may be gone, or a folder has files
        path.unlink(missing_ok=True)
        for one in created:
            one.rmdir()
    os.close(descriptor)


def unlock_all() -> None:
    """Unlock every folder that this process has locked."""
    for path in list(_held):
        unlock_run(path.parent)


def check_writable(folder: Path, key: str) -> None:
    """Raise a ConfigError if a folder is not writable, or does not exist and cannot be created; nothing is created.

    Args:
        folder: a folder, which need not exist.
        key: the configuration key that names the folder.
    """
    there = next(above for above in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(above))
    if not there.is_dir():
        raise _not_writable(folder, key, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(folder, key, f"{there} is read-only, or another user's")


def _taken(folder: Path, lock: Path) -> FolderTakenError:
    return FolderTakenError(
        f"trainer.default_root_dir={folder}: another run is at work there ({_holder(lock)}). Name another folder, "
        "or wait for its end."
    )


def _not_writable(folder: Path, key: str, reason: str | None) -> ConfigError:
    return ConfigError(f"{key}={folder}: nothing can be written there, since {reason}. Name another folder.")


def _open_locked(path: Path) -> int:
    """Open a lock file and lock it.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(descriptor)
                raise
            log.warning("%s: this disk has no file locks. Make sure that no other run uses the folder.", path.parent)
        if _is_same(path, descriptor):
            _write_holder(path, descriptor)
            return descriptor
        os.close(descriptor)  # the lock's holder has just removed the file


def _write_holder(path: Path, descriptor: int) -> None:
    """Write this process's identity to the lock file; if writing fails, release the lock."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)
        raise


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:  # gone, or under a file
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") or "it has just begun"
    return "it has just begun"


def _forget_in_child() -> None:
    """Close a forked child's copies of the locks, which would otherwise outlive the run."""
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
