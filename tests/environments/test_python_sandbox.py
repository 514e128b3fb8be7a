"""Programs in the sandbox: what they do is reported, what they may not do fails, and nothing of them is left."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import CannedPolicy
from python_tool import PythonTool
from waiting import wait_for

from rlightning.environments import python_sandbox
from rlightning.environments.python_sandbox import CodeRunner, Isolation, PythonSandbox, SandboxError, SandboxResult
from rlightning.errors import ConfigError
from rlightning.types import Prompt

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
MB = 1 << 20
BEGUN = "print('begun', flush=True)"
LONG = 600.0
"""Seconds in which a program ends on any machine."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where programs' folders are made."""
    folder = Path("/tmp", f"sandbox-test-{uuid.uuid4()}")  # which any user can reach, unlike pytest's
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["strongest", "weakest"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this host has, and what any host has."""
    if request.param == "weakest":
        weakest = [*python_sandbox.possible_isolations()][-1]
        monkeypatch.setattr(python_sandbox, "possible_isolations", lambda: iter([weakest]))
        monkeypatch.setattr(python_sandbox, "probe", python_sandbox.probe.__wrapped__)


def run(code: str, stdin: str = "", **arguments: float) -> SandboxResult:
    limits: dict[str, Any] = {"wall_seconds": LONG, **arguments}
    return asyncio.run(PythonSandbox(**limits).run(code, stdin))


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def lingering(mark: str) -> str:
    """A program that sleeps, as do two that it starts, one in a session of its own."""
    return (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}]\n"
        "subprocess.Popen(command)\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "print('started', flush=True)\n"
    )


# What programs do


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("code", "stdout", "error", "exit_code", "status", "limits"),
    [
        ("print('h\\u00e9', 1 + 1)", "hé 2\n", "", 0, "finished", {}),
        ("print(input())", "given\n", "", 0, "finished", {}),
        ("print('before')\n1 / 0", "before\n", "ZeroDivisionError: division by zero", 1, "finished", {}),
        ("print(", "", "SyntaxError", 1, "finished", {}),
        ("raise SystemExit(3)", "", "", 3, "finished", {}),
        ("bytearray(10 << 30)", "", "MemoryError", 1, "memory", {}),
        ("import os; os.abort()", "", "", -signal.SIGABRT, "killed", {}),
        (f"{BEGUN}\nwhile 1: pass", "begun\n", "", -signal.SIGXCPU, "timeout", {"cpu_seconds": 1}),
        ("open('big', 'wb').write(bytes(8 << 20))", "", "OSError", 1, "finished", {"max_file_mb": 2}),
    ],
)
def test_run_reports_what_a_program_did(
    code: str, stdout: str, error: str, exit_code: int, status: str, limits: dict[str, float]
) -> None:
    result = run(code, "given\n", **limits)
    assert (result.stdout, result.exit_code, result.status) == (stdout, exit_code, status), result.stderr
    assert error in result.stderr and bool(error) == bool(result.stderr)


@pytest.mark.usefixtures("isolation")
def test_wall_time_ends_program_and_keeps_its_output() -> None:
    seconds = 0.5
    while not (result := run(f"{BEGUN}\nimport time; time.sleep({LONG})", wall_seconds=seconds)).stdout:
        assert result.status == "timeout"
        seconds *= 2  # in which a busy machine has not come to its first line
    assert (result.stdout, result.stderr) == ("begun\n", "")
    assert (result.exit_code, result.status) == (-signal.SIGKILL, "timeout")


def test_flood_keeps_its_first_and_last_bytes() -> None:
    code = "import sys\nprint('first')\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))\nprint('last')"
    result = run(code, max_output_bytes=1000)
    assert result.status == "finished"
    assert result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxxlast\n")
    assert f"\n... {64 * MB + 11 - 1000} bytes left out ...\n" in result.stdout
    assert len(result.stdout) < 1100


@pytest.mark.usefixtures("isolation")
def test_fork_bomb_is_contained() -> None:
    code = (
        "import os, time\n"
        "for number in range(60):\n"
        "    try: pid = os.fork()\n"
        "    except BlockingIOError: break\n"
        "    if pid == 0: time.sleep(600)\n"
        "print(number, flush=True)\n"
        "if number == 59: time.sleep(600)\n"
    )
    for python in {sys.executable, "/usr/bin/python3"}:  # the latter any user may run
        if Path(python).exists():
            sandbox = PythonSandbox(max_processes=8, python=python, wall_seconds=LONG)
            result = asyncio.run(sandbox.run(code))
            if "a limit on processes" in sandbox.describe():
                assert result.stdout in ("7\n", "8\n") and result.status == "finished", result
            else:
                assert result.status == "killed", result


# What programs cannot reach


@pytest.mark.usefixtures("isolation")
def test_environment_variables_of_the_trainer_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_SECRET", "hunter2")
    sandbox = PythonSandbox(wall_seconds=LONG)
    result = asyncio.run(sandbox.run("import os; print(sorted(os.environ))"))
    assert "PATH" in result.stdout and "SANDBOX_SECRET" not in result.stdout
    result = asyncio.run(sandbox.run(f"open('/proc/{os.getpid()}/environ')"))
    is_held = "no access to the trainer's environment variables" in sandbox.describe()
    assert ("PermissionError" in result.stderr) == is_held, result.stderr


@pytest.mark.usefixtures("isolation")
def test_network_is_unreachable_where_described() -> None:
    sandbox = PythonSandbox(wall_seconds=LONG)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 60); print('connected')"
        result = asyncio.run(sandbox.run(code))
    assert (result.stdout == "") == ("no network" in sandbox.describe()), result


@pytest.mark.usefixtures("isolation")
def test_files_are_confined_to_the_folder_where_described(folder: Path) -> None:
    sandbox = PythonSandbox(wall_seconds=LONG)
    path = folder / "file"
    path.touch()
    path.chmod(0o666)
    code = f"open('own', 'w').write('a'); print(open('own').read(), flush=True); open({str(path)!r}, 'w').write('a')"
    result = asyncio.run(sandbox.run(code))
    assert result.stdout == "a\n"
    assert path.read_text() == ("" if "writes to its own folder only" in sandbox.describe() else "a")


def test_missing_guarantees_are_described_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(python_sandbox, "possible_isolations", lambda: iter([Isolation((), is_counted=False)]))
    monkeypatch.setattr(python_sandbox, "probe", python_sandbox.probe.__wrapped__)
    line = PythonSandbox().describe()
    assert line.partition("Not isolated on this host: ")[2].startswith("the network can be reached; ")
    assert "\n" not in line and caplog.messages == [line]


# What is left


@pytest.mark.usefixtures("isolation")
def test_run_leaves_no_process_and_no_folder(folder: Path) -> None:
    mark = str(uuid.uuid4())
    result = run(lingering(mark))
    assert result.stdout == "started\n" and result.status == "finished"
    assert processes_with(mark) == [] and [*folder.iterdir()] == []


@pytest.mark.usefixtures("isolation")
def test_cancellation_leaves_no_process_and_no_folder(folder: Path) -> None:
    mark = str(uuid.uuid4())

    async def cancel() -> None:
        task = asyncio.create_task(PythonSandbox(wall_seconds=LONG).run(f"{lingering(mark)}time.sleep(600)"))
        while len(processes_with(mark)) < 2:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert processes_with(mark) == [] and [*folder.iterdir()] == []


@pytest.mark.usefixtures("isolation")
def test_killed_trainer_leaves_no_process_and_no_folder(folder: Path) -> None:
    mark = str(uuid.uuid4())
    names = PythonSandbox()._isolation.names
    program = (
        "import asyncio\nfrom rlightning.environments import python_sandbox as s\n"
        f"s.possible_isolations = lambda: iter([s.Isolation({names}, False)])\n"
        f"asyncio.run(s.PythonSandbox(wall_seconds={LONG}).run({lingering(mark)!r} + 'time.sleep(600)'))\n"
    )
    variables = {**os.environ, "TMPDIR": str(folder)}
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=variables)
    wait_for(lambda: len(processes_with(f"sleep(600)\0{mark}")) == 2)
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not processes_with(mark))
    wait_for(lambda: not [*folder.iterdir()])


def test_64_programs_run_at_once(folder: Path) -> None:
    async def run_all() -> list[SandboxResult]:
        sandbox = PythonSandbox(wall_seconds=LONG)
        return await asyncio.gather(*(sandbox.run(f"import time; time.sleep(1); print({n})") for n in range(64)))

    assert [result.stdout for result in asyncio.run(run_all())] == [f"{n}\n" for n in range(64)]
    assert [*folder.iterdir()] == []


# What goes wrong


def test_supervisor_without_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = PythonSandbox()
    monkeypatch.setattr(python_sandbox, "SUPERVISOR", [sys.executable, "-c", "raise SystemExit(5)"])
    with pytest.raises(SandboxError, match=r"without a result \(5\)"):
        asyncio.run(sandbox.run("print(1)"))


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"python=/nowhere/python cannot run a program .*No such file"):
        PythonSandbox(python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"memory_mb=1 must be at least 64"):
        PythonSandbox(memory_mb=1)


# The example


def test_example_observes_output_and_answers() -> None:
    policy = CannedPolicy("Compute:\n```python\nprint(6 * 7)\n```", "```python\n1 / 0\n```", "It is 42")
    runner: CodeRunner = PythonSandbox(wall_seconds=LONG)
    outcome = asyncio.run(PythonTool(runner=runner).run(Prompt(0, "6 * 7?", [1], {"answer": 42}), policy))
    observations = [message["content"] for heard in policy.heard for message in heard]
    assert observations[0] == "42\n" and observations[1].endswith("ZeroDivisionError: division by zero\n")
    assert (outcome.reward, outcome.metrics) == (1.0, {"num_programs": 2})
