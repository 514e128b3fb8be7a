"""Real processes that have to end, with real shared memory that has to go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, is_running, wait_for

from rlightning.processes.process_group import end_group

pytestmark = pytest.mark.processes

# A process that ignores signals, its child, and shared memory that nobody unlinks.
STUBBORN = """
import multiprocessing as mp, signal, sys, time
from multiprocessing.shared_memory import SharedMemory

def child(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    SharedMemory(name=name)
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = SharedMemory(create=True, size=1000)
    process = mp.get_context("spawn").Process(target=child, args=(memory.name,))
    process.start()
    print(memory.name, process.pid, flush=True)
    time.sleep(600)
"""

# As the engine's process does it when the trainer is gone.
ENDS_ITSELF = """
import subprocess, sys
from pathlib import Path
from multiprocessing.shared_memory import SharedMemory
from rlightning.processes.process_group import end_own_group
memory = SharedMemory(create=True, size=1000)
child = subprocess.Popen(["sleep", "600"])
print(memory.name, child.pid, flush=True)
end_own_group(Path(sys.argv[1]))
"""


def start(tmp_path: Path, source: str, *arguments: str) -> tuple["subprocess.Popen[str]", Path, int]:
    """The process, its shared memory, and its child's id."""
    script = tmp_path / "script.py"
    script.write_text(source)
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    name, child = process.stdout.readline().split()
    return process, Path("/dev/shm") / name, int(child)


def test_group_ends_with_its_shared_memory(tmp_path: Path) -> None:
    process, memory, child = start(tmp_path, STUBBORN)
    assert memory.exists() and is_running(child)
    end_group(process.pid)
    assert process.wait(PATIENCE_SECONDS) == -9
    assert not is_running(child)
    assert not memory.exists()
    end_group(process.pid)  # there is none any more


def test_group_without_its_first_process_ends(tmp_path: Path) -> None:
    process, memory, child = start(tmp_path, STUBBORN)
    process.kill()
    process.wait()
    end_group(process.pid)
    assert not is_running(child) and not memory.exists()


def test_a_group_ends_itself(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").touch()
    process, memory, child = start(tmp_path, ENDS_ITSELF, str(scratch))
    assert process.wait(PATIENCE_SECONDS) == -9
    wait_for(lambda: not memory.exists())
    assert not is_running(child) and not scratch.exists()


def test_torch_memory_of_a_group_is_removed(tmp_path: Path) -> None:
    process, _, child = start(tmp_path, STUBBORN)
    segments = [Path(f"/dev/shm/torch_{pid}_123_0") for pid in (process.pid, child, os.getpid())]
    for segment in segments:
        segment.touch()
    end_group(process.pid)
    assert [segment.exists() for segment in segments] == [False, False, True]
    segments[2].unlink()


def test_other_groups_are_left_alone(tmp_path: Path) -> None:
    process, _, child = start(tmp_path, STUBBORN)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    end_group(process.pid)
    assert other.poll() is None and not is_running(child) and is_running(os.getpid())
    other.kill()
    other.wait()
