"""A process between the trainer and one program of :mod:`~rlightning.environments.python_sandbox`, which supervises it.

The process reads a request, a line of JSON, from its standard input, and writes the result to its standard output. The
end of its input, as when the trainer was killed, ends the program. The file is run by its path, in Python 3.10 or later
without packages, so that it starts quickly.

    trainer -> this process -> program and its child processes
                            -> init of the program's process namespace, with which the namespace ends
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MS_PRIVATE = 442, -100, 0x8000, 1, 1 << 18
MS_NOSUID_NODEV = 2 | 4

FIRST_USER = 1_900_000_000
"""Smallest user id of a program if the trainer is root: above the ids that systems assign."""
INNER_USER = 1000
"""User id in the program's user namespace; not 0, which would keep capabilities there."""
MEMORY_FOLDER = "/dev/shm"
"""Mount point of the program's folder: every Linux has it, and programs expect their shared memory there."""
OPEN_FILES = 256
COUNT_INTERVAL = 0.1
"""Seconds between two counts of the program's processes, where the system does not limit them."""
MEMORY_ERROR = re.compile(r"^[\w.]*MemoryError\b")
VARIABLES = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LOGNAME": "sandbox",
    "USER": "sandbox",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),  # threads count as processes
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read a request from standard input, run its program, and write the result to standard output as JSON."""
    line = sys.stdin.buffer.readline()
    if line.endswith(b"\n") and (result := run(**json.loads(line))) is not None:
        json.dump(result, sys.stdout)


def run(
    code: str, stdin: str, python: str, folder: str, isolation: list[str], is_counted: bool, limits: dict[str, float]
) -> dict[str, str | int] | None:
    """Run a program, and return the fields of a SandboxResult; None if the trainer closed the request.

    Args:
        code, stdin, python: the program, its input and its interpreter.
        folder: an empty folder, which is removed at the end.
        isolation: some of "user", "namespaces", "mounts"; python_sandbox has probed that they work.
        is_counted: whether the system counts the program's processes separately from others.
        limits: limits by the names of PythonSandbox's arguments.
    """
    # Processes that the program leaves behind become children of this process.
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    if "mounts" in isolation:
        os.rmdir(folder)
    if "user" in isolation:
        become_own_user(None if "mounts" in isolation else folder)
    init = enter_namespaces("mounts" in isolation) if "namespaces" in isolation else None
    limits["max_processes"] += 1 if init is None else 2  # this process and the namespace's init
    if "mounts" in isolation:
        mount_folder(int(limits["max_file_mb"]))
        folder = MEMORY_FOLDER
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program must not read this process's memory
    try:
        process = start_program(code, stdin, python, Path(folder), is_counted, limits)
        return watch_program(process, init, limits, math.inf if is_counted else COUNT_INTERVAL)
    finally:
        if "mounts" not in isolation:
            shutil.rmtree(folder, ignore_errors=True)


def start_program(
    code: str, stdin: str, python: str, folder: Path, is_counted: bool, limits: dict[str, float]
) -> subprocess.Popen[bytes]:
    """Start the program in its folder, with limits and with pipes for its outputs, and return the process; see
    :func:`run`.
    """
    (folder / "main.py").write_bytes(code.encode(errors="surrogatepass"))
    (folder / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))
    with (folder / "stdin").open("rb") as given:
        (folder / "stdin").unlink()
        return subprocess.Popen(
            [python, "main.py"],
            cwd=folder,
            env={**VARIABLES, "HOME": str(folder), "TMPDIR": str(folder)},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: limit_program(limits, is_counted),
        )


def watch_program(
    process: subprocess.Popen[bytes], init: Init | None, limits: dict[str, float], count_interval: float
) -> dict[str, str | int] | None:
    """Wait until the program exits, exceeds a limit, or the trainer closes the request; then kill its processes. Return
    the fields of a SandboxResult; None if the request was closed.
    """
    assert process.stdout is not None and process.stderr is not None
    outputs = {pipe.fileno(): Output(int(limits["max_output_bytes"])) for pipe in (process.stdout, process.stderr)}
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    deadline = time.monotonic() + limits["wall_seconds"]
    count_at = time.monotonic() + count_interval
    end = ""
    with selectors.DefaultSelector() as selector:
        for file in (sys.stdin.fileno(), woken, *outputs):
            selector.register(file, selectors.EVENT_READ)
        while not end and not has_ended(process.pid):
            for key, _ in selector.select(min(deadline, count_at) - time.monotonic()):
                data = os.read(key.fd, 1 << 16)
                if key.fd == sys.stdin.fileno():
                    end = "closed"
                elif not data:
                    selector.unregister(key.fd)
                elif key.fd in outputs:
                    outputs[key.fd].add(data)
            if not end and time.monotonic() >= deadline:
                end = "timeout"
            elif not end and time.monotonic() >= count_at:
                count_at = time.monotonic() + count_interval
                end = "killed" if count_tasks(os.getpid()) > limits["max_processes"] else ""
    end_program(process, init)
    if end == "closed":
        return None
    for file, output in outputs.items():
        os.set_blocking(file, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(file, 1 << 16):
                output.add(data)
    stdout, stderr = (output.text() for output in outputs.values())
    status = end or find_status(process.returncode, stderr, limits["cpu_seconds"])
    return {"stdout": stdout, "stderr": stderr, "exit_code": process.returncode, "status": status}


class Output:
    """The first and last bytes of an output stream; half of ``limit`` are from the end, where errors usually are."""

    def __init__(self, limit: int) -> None:
        self.half = limit // 2
        self.size = 0
        self.head = self.tail = b""

    def add(self, data: bytes) -> None:
        """Append bytes of the program's stdout or stderr; of a stream longer than the limit, the middle is not kept."""
        room = self.half - len(self.head)
        self.size += len(data)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-self.half :]

    def text(self) -> str:
        """Return the kept output as text; a line with the number of omitted bytes replaces an omitted middle."""
        missing = self.size - len(self.head) - len(self.tail)
        cut = f"\n... {missing} bytes left out ...\n".encode() if missing else b""
        return (self.head + cut + self.tail).decode(errors="replace")


class Init:
    """Starts process 1 of the program's process namespace, which reaps orphans. It exits with this process or at
    :meth:`end`; the kernel then kills all other processes of the namespace.
    """

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                os.closerange(0, reader)
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                os.read(reader, 1)
            finally:
                os._exit(0)
        os.close(reader)

    def end(self) -> None:
        """Kill all processes of the program's process namespace, by ending its process 1, and wait until they have
        exited.
        """
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def become_own_user(folder: str | None) -> None:
    """Change from root to a user id that no other process has, and make that user the owner of the folder."""
    user = FIRST_USER + os.getpid()
    if folder is not None:
        os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else this process may not write its id maps


def enter_namespaces(has_mounts: bool) -> Init:
    """Put this process's future children into new namespaces (no network, no other processes visible), and return
    process 1 of their process namespace.
    """
    user, group = os.getuid(), os.getgid()
    flags = NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_IPC | (NEW_MOUNTS if has_mounts else 0)
    check(libc.unshare(flags), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_USER} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_USER} {group} 1")
    return Init()


def mount_folder(size_mb: int) -> None:
    """Mount a writable file system in memory on the program's folder, and make all other files read-only."""
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, MS_PRIVATE, 0)
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only)), "mount_setattr")
    options = f"size={size_mb}m,mode=700".encode()
    check(libc.mount(b"tmpfs", MEMORY_FOLDER.encode(), b"tmpfs", MS_NOSUID_NODEV, options), "mount")


def limit_program(limits: dict[str, float], is_counted: bool) -> None:
    """Set resource limits on this process, before it executes the program."""
    mb = 1 << 20
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] * mb),
        (resource.RLIMIT_FSIZE, limits["max_file_mb"] * mb),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, limits["max_processes"])] if is_counted else []),
    ):
        limit(kind, int(value), int(value))
    cpu = max(int(limits["cpu_seconds"]), 1)
    limit(resource.RLIMIT_CPU, cpu, cpu + 1)  # SIGXCPU, then SIGKILL
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(kind: int, soft: int, hard: int) -> None:
    """Set one resource limit (``RLIMIT_*``) of this process, or keep its current hard limit where that is lower."""
    _, most = resource.getrlimit(kind)
    is_lower = most != resource.RLIM_INFINITY
    resource.setrlimit(kind, (min(soft, most), min(hard, most)) if is_lower else (soft, hard))


def has_ended(pid: int) -> bool:
    """Return whether a child has exited, without reaping it, so that the id of its process group is not reused."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def count_tasks(pid: int) -> int:
    """Return how many threads a process and all of its descendants have."""
    total, waiting = 0, [str(pid)]
    while waiting:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                total += 1
                waiting += (task / "children").read_text().split()
    return total


def end_program(process: subprocess.Popen[bytes], init: Init | None) -> None:
    """Kill the program and all processes that it started, and wait until all have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if init is not None:
        init.end()
        return
    children = Path("/proc/thread-self/children")
    while pids := [int(pid) for pid in children.read_text().split()]:  # processes in their own sessions
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def find_status(exit_code: int, stderr: str, cpu_seconds: float) -> str:
    """Return how a program ended that this process did not kill: "timeout" of CPU time, "killed" by a signal, "memory"
    for a MemoryError, or "finished".
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    is_over = exit_code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= cpu_seconds
    if exit_code == -signal.SIGXCPU or is_over:
        return "timeout"
    if exit_code < 0:
        return "killed"
    lines = stderr.rstrip().splitlines()
    return "memory" if exit_code == 1 and lines and MEMORY_ERROR.match(lines[-1]) else "finished"


def check(result: int, call: str) -> None:
    """Raise an OSError with the text of errno if ``result``, returned by the C function named ``call``, is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
