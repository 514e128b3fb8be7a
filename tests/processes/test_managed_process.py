"""Real child processes: their start, calls to them, and their end, with everything that they have started."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import in_event_loop, is_running, still_running

from rlightning.processes.managed_process import ManagedProcess, python_command
from rlightning.rpc import ConnectionLostError, ProcessStartError, connect_process, end_process

pytestmark = pytest.mark.processes

CHILD = Path(__file__).with_name("child.py")


def start(*arguments: str, log_file: Path | None = None) -> ManagedProcess:
    command = [sys.executable, str(CHILD), *arguments]
    return ManagedProcess(command, name="test child", log_file=log_file)


@in_event_loop
async def test_child_ends_with_all_it_started(tmp_path: Path) -> None:
    process = start(log_file=tmp_path / "child.log")
    peer = await connect_process(process, {}, ready_timeout=300)
    _, pid, group, _ = await peer.call("describe", timeout=60)
    assert pid == group == process.pid and process.exit_code is None
    grandchild = int(await peer.call("start_child", timeout=60))
    assert is_running(grandchild)
    assert await end_process(process, peer) == "SIGKILL" and process.exit_code == -signal.SIGKILL
    assert still_running([grandchild]) == []
    with pytest.raises(ConnectionLostError, match="test child"):
        await peer.call("describe")


@in_event_loop
async def test_death_fails_call_with_code_and_log(tmp_path: Path) -> None:
    process = start(log_file=tmp_path / "child.log")
    peer = await connect_process(process, {}, ready_timeout=300)
    # The connection breaks if the process has not read a heartbeat by then.
    with pytest.raises(ConnectionLostError, match=r"test child: (it closed the connection|the connection broke)"):
        await peer.call("leave", 7, timeout=60)
    assert await end_process(process, peer) == "exit code 7"
    assert process.log_tail() == "its last words"


@in_event_loop
async def test_process_with_many_connections_starts_children(tmp_path: Path) -> None:
    """select() takes no file descriptor from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1100:
            taken.append(os.dup(taken[0]))
        process = start(log_file=tmp_path / "child.log")
        peer = await connect_process(process, {}, ready_timeout=300)
        assert (await peer.call("describe", timeout=60))[1] == process.pid
        assert await end_process(process, peer) == "SIGKILL"
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("argument", "timeout", "reason"),
    [
        ("early", 300.0, r"test child ended before it was ready \(exit code 3\)\nits last words"),
        ("late", 0.01, r"test child was not ready after 0\.01 s"),
    ],
)
@in_event_loop
async def test_child_that_does_not_get_ready_is_ended(
    tmp_path: Path, argument: str, timeout: float, reason: str
) -> None:
    process = start(argument, log_file=tmp_path / "child.log")
    with pytest.raises(ProcessStartError, match=reason):
        await connect_process(process, {}, ready_timeout=timeout)
    assert process.exit_code is not None


def test_killed_parent_ends_child_in_regular_expression(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_managed_process import connect_process, start\n"
        "async def main():\n"
        "    process = start()\n"
        "    peer = await connect_process(process, {}, ready_timeout=300)\n"
        "    print(process.pid, await peer.call('start_child'), flush=True)\n"
        "    await peer.call('backtrack')\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, str(script), str(CHILD.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    assert still_running(pids) == []


@in_event_loop
async def test_other_interpreter_loads_package_from_folder(tmp_path: Path) -> None:
    """A virtual environment of its own stands for another interpreter: of what is installed it has only msgpack."""
    import msgpack

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    site_packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site_packages / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    (site_packages / "child.py").write_text(CHILD.read_text())
    command = python_command("child", interpreter=interpreter)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = ManagedProcess(command, name="other interpreter", environment=environment)
    peer = await connect_process(process, {}, ready_timeout=300)
    executable, _, _, modules = await peer.call("describe", timeout=60)
    assert executable == interpreter and modules == []
    await end_process(process, peer)
