"""Requirements of an engine on its host: an error of one line names a missing one before a process is started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import START_BY_EXEC

from rlightning.rollout.host_check import check_host

PROGRAM = """\
import resource, sys
from rlightning.errors import EngineStartError
from rlightning.rollout.host_check import check_host, raise_open_files
try:
    check_host(int(sys.argv[1]))
    raise_open_files()
    print("ok", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except EngineStartError as error:
    print(error)
"""


def say(folder: Path, limit: str, *namespaces: str, num_workers: int = 1) -> str:
    """What the program says after a shell command that limits the host, in namespaces of its own where it takes any."""
    if namespaces and (
        shutil.which("unshare") is None or subprocess.run(["unshare", *namespaces, "true"], check=False).returncode
    ):
        pytest.skip(f"needs the right to unshare {' '.join(namespaces)}")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = ["sh", "-c", f"{limit} && exec {sys.executable} {program} {num_workers}"]
    done = subprocess.run(
        ["unshare", *namespaces, *command] if namespaces else command,
        env={**os.environ, START_BY_EXEC: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_this_host_can_have_an_engine() -> None:
    check_host(1)
    check_host(2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "num_workers", "found"),
    [
        ("512k", 1, "0.5 of 0.5 MiB free, and 1 MiB are"),
        ("32m", 2, "32.0 of 32.0 MiB free, and 64 MiB are"),
        ("32m", 1, ""),
    ],
)
def test_full_shared_memory_is_named_with_its_size(size: str, num_workers: int, found: str, tmp_path: Path) -> None:
    """Several workers need more of it."""
    said = say(tmp_path, f"mount -t tmpfs -o size={size} tmpfs /dev/shm", "--mount", num_workers=num_workers)
    refusal = f"An engine cannot start on this host: /dev/shm has {found} needed. Remove what "
    assert said.startswith(refusal if found else "ok")
    assert ("docker run --shm-size=8g" in said) == bool(found)


@pytest.mark.processes
def test_host_without_interface_is_named(tmp_path: Path) -> None:
    said = say(tmp_path, "true", "--net")
    assert said.startswith("An engine cannot start on this host: it has no network interface that is up")
    assert said.endswith("ip link set lo up.")


@pytest.mark.processes
def test_few_open_files_are_named(tmp_path: Path) -> None:
    said = say(tmp_path, "ulimit -n 64")
    assert said == (
        "An engine cannot start on this host: a process may have 64 files open at once, and 256 are needed. Raise the "
        "hard limit: ulimit -n 65536, or docker run --ulimit nofile=65536."
    )


@pytest.mark.processes
def test_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    assert say(tmp_path, "ulimit -S -n 64 && ulimit -H -n 1000") == "ok 1000"
