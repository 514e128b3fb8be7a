"""A tool that executes the policy's Python programs, each in its own process with limits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line

log = logging.getLogger(__name__)

SUPERVISOR = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_process.py"))]
GRACE = 30.0
"""Seconds by which the supervising process may outlast its program, and that it may take to exit."""
PREFIX = "rlightning-sandbox-"
PROBE_PROCESSES = 4
PROBE = """
import json, os, socket, sys

def can(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

def fork():
    if os.fork() == 0:
        os.read(reader, 1)
        os._exit(0)

asked = json.load(sys.stdin)
trainer = asked["trainer"]
reader, writer = os.pipe()
holds = {
    "network": not can(socket.create_connection, ("127.0.0.1", asked["port"]), 1),
    "variables": not can(open, f"/proc/{trainer}/environ"),
    "signals": os.getppid() == 0 or not can(os.kill, trainer, 0),
    "writes": not can(open, asked["public"], "a"),
    "reads": not can(open, asked["private"]),
    "processes": asked["is_counted"] and not all(can(fork) for _ in range(asked["max_processes"])),
}
print(json.dumps([name for name in holds if holds[name]]))
"""
GUARANTEES = {
    "network": ("no network", "the network can be reached"),
    "variables": ("no access to the trainer's environment variables", "the trainer's /proc/PID/environ can be read"),
    "signals": ("no signals to other processes", "processes of the trainer's user can be killed"),
    "writes": ("writes to its own folder only", "other files can be written, where permissions allow it"),
    "reads": ("no access to private files of the trainer's user", "files of the trainer's user can be read"),
    "processes": ("a limit on processes", "processes beyond the limit run for some 0.1 s"),
}
"""Guarantees that depend on the host, each with its text if the probe finds that it holds, and if not."""


class SandboxResult(NamedTuple):
    """The result of running a program.

    Attributes:
        stdout: the program's output; only its beginning and end if it is too long.
        stderr: the program's error output, shortened in the same way.
        exit_code: minus the signal's number if a signal ended the program.
        status: "finished" with any exit code; "timeout" of CPU or wall time; "memory" for a MemoryError; "killed" by a
            signal or for too many processes.
    """

    stdout: str
    stderr: str
    exit_code: int
    status: str


class CodeRunner(Protocol):
    """An object that runs programs for tools and rewards: a :class:`PythonSandbox`, or a user's safer service."""

    async def run(self, code: str, stdin: str = "") -> SandboxResult:
        """Run a program with ``stdin`` as its input, and return its output and status. Raises an exception if the
        service fails, never for an error of the program.
        """


class SandboxError(RuntimeError):
    """The sandbox failed to run a program, for a reason other than the program."""


class PythonSandbox:
    """Runs Python programs, each in its own process and folder, with limits and without network access.

    A program's folder and processes are removed after its run, after a cancellation, and if the trainer is killed. Some
    guarantees depend on the host (:meth:`describe`); those that do not hold are logged at the start.

    Args:
        cpu_seconds: maximum CPU time of each process.
        memory_mb: maximum address space of each process.
        wall_seconds: maximum duration of a program.
        max_output_bytes: bytes that are kept of each output; the rest is read and dropped.
        max_file_mb: maximum size of a file, or of all of the program's files if mounts are possible.
        max_processes: maximum number of concurrent processes and threads. If the system cannot enforce it, a program
            that exceeds it is killed.
        python: the programs' interpreter; None for this process's.

    Raises:
        ConfigError: the interpreter cannot run a program.
    """

    def __init__(
        self,
        cpu_seconds: float = 5,
        memory_mb: int = 1024,
        wall_seconds: float = 10,
        max_output_bytes: int = 16384,
        max_file_mb: int = 16,
        max_processes: int = 32,
        python: str | None = None,
    ) -> None:
        rules = {
            f"cpu_seconds={cpu_seconds} must be at least 1": cpu_seconds >= 1,
            f"memory_mb={memory_mb} must be at least 64": memory_mb >= 64,
            f"wall_seconds={wall_seconds} must be above 0": wall_seconds > 0,
            f"max_output_bytes={max_output_bytes} must be at least 2": max_output_bytes >= 2,
            f"max_file_mb={max_file_mb} must be at least 1": max_file_mb >= 1,
            f"max_processes={max_processes} must be at least 1": max_processes >= 1,
        }
        check_rules(rules)
        self.python = os.path.abspath(os.path.expanduser(python or sys.executable))
        self.wall_seconds = wall_seconds
        self._isolation = probe(self.python)
        self._limits: dict[str, float] = {
            "cpu_seconds": cpu_seconds,
            "memory_mb": memory_mb,
            "wall_seconds": wall_seconds,
            "max_output_bytes": max_output_bytes,
            "max_file_mb": max_file_mb,
            "max_processes": max_processes,
        }

    def describe(self) -> str:
        """Return one line that says which isolation this host supports."""
        return self._isolation.describe()

    async def run(self, code: str, stdin: str = "") -> SandboxResult:
        """Run a program with ``stdin`` as its input, and return its output and status; raises a SandboxError if the
        sandbox fails.
        """
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
            request = make_request(code, stdin, self.python, folder, self._isolation, self._limits)
            process = await asyncio.create_subprocess_exec(
                *SUPERVISOR,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={},
                start_new_session=True,
            )
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request)
                answer = await asyncio.wait_for(process.stdout.read(), self.wall_seconds + GRACE)
            except asyncio.TimeoutError:
                answer = b""
            finally:
                process.stdin.close()
                await asyncio.shield(asyncio.ensure_future(end(process)))
        if not answer:
            raise SandboxError(f"The process that supervises a program ended without a result ({process.returncode}).")
        return SandboxResult(**json.loads(answer))


class Isolation(NamedTuple):
    """The mechanisms that separate programs from the trainer on this host.

    Attributes:
        names: some of "user", "namespaces", "mounts".
        is_counted: whether a program's processes can be counted separately from the trainer's.
        holds: names of the GUARANTEES that hold.
    """

    names: tuple[str, ...]
    is_counted: bool
    holds: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line for the log: the guarantees that hold on this host, and those that do not."""
        holding = [holds for name, (holds, _) in GUARANTEES.items() if name in self.holds]
        missing = [lacks for name, (_, lacks) in GUARANTEES.items() if name not in self.holds]
        line = "; ".join(["Python sandbox: limits on time, memory, output and file sizes", *holding])
        return f"{line}. Not isolated on this host: {'; '.join(missing)}." if missing else f"{line}."


@lru_cache
def probe(python: str) -> Isolation:
    """Return the strongest isolation in which a test program runs on this host, with the guarantees that it found to
    hold.

    Raises a ConfigError if no isolation works.
    """
    reason = ""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o711)
        files = {name: Path(folder, name) for name in ("public", "private")}
        for name, mode in {"public": 0o666, "private": 0o600}.items():
            files[name].touch()
            files[name].chmod(mode)
        paths = {name: str(path) for name, path in files.items()}
        asked = {"trainer": os.getpid(), "port": server.getsockname()[1], "max_processes": PROBE_PROCESSES, **paths}
        for isolation in possible_isolations():
            stdout, reason = run_probe(python, isolation, asked)
            if stdout:
                found = isolation._replace(holds=tuple(json.loads(stdout)))
                log.log(logging.WARNING if set(GUARANTEES) - {*found.holds} else logging.INFO, "%s", found.describe())
                return found
    raise ConfigError(f"python={python} cannot run a program of PythonSandbox: {cut_line(reason)}")


def possible_isolations() -> Iterator[Isolation]:
    """Yield the isolations that may work on this host, the strongest first."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    counts_by_namespace = release is not None and tuple(map(int, release.groups())) >= (5, 14)
    is_root = os.geteuid() == 0
    for names in (("namespaces", "mounts"), ("namespaces",), ()):
        if is_root:
            yield Isolation(("user", *names), is_counted=True)
        # The system does not count root's processes.
        yield Isolation(names, is_counted=bool(names) and counts_by_namespace and not is_root)


def run_probe(python: str, isolation: Isolation, asked: dict[str, object]) -> tuple[str, str]:
    """Run the probe program in an isolation; return (its output, "") or ("", the reason why it could not run)."""
    limits: dict[str, float] = {"cpu_seconds": 5, "memory_mb": 1024, "wall_seconds": GRACE, "max_output_bytes": 4096}
    limits |= {"max_file_mb": 1, "max_processes": PROBE_PROCESSES}
    stdin = json.dumps({**asked, "is_counted": isolation.is_counted})
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        request = make_request(PROBE, stdin, python, folder, isolation, limits)
        pipe = subprocess.PIPE
        command = subprocess.Popen(SUPERVISOR, stdin=pipe, stdout=pipe, stderr=pipe, env={}, start_new_session=True)
        with command as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(request)
            process.stdin.flush()
            answer, errors = process.stdout.read(), process.stderr.read()
    if not answer:
        lines = errors.decode(errors="replace").strip().splitlines()
        return "", lines[-1] if lines else f"exit code {process.returncode}"
    result = SandboxResult(**json.loads(answer))
    return (result.stdout, "") if result.status == "finished" and result.exit_code == 0 else ("", result.stderr)


def make_request(
    code: str, stdin: str, python: str, folder: str, isolation: Isolation, limits: dict[str, float]
) -> bytes:
    """Return the request to run a program, as a line of JSON for the supervising process."""
    program = {"code": code, "stdin": stdin, "python": python, "folder": folder, "limits": limits}
    return json.dumps({**program, "isolation": isolation.names, "is_counted": isolation.is_counted}).encode() + b"\n"


async def end(process: asyncio.subprocess.Process) -> None:
    """Wait for a supervising process to exit, after its standard input is closed; kill it after a grace period."""
    try:
        await asyncio.wait_for(process.wait(), GRACE)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
