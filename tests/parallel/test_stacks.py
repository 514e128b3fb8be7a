"""The stacks of a process that is alone, on SIGUSR1."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from rlightning import intervals
from rlightning.parallel import stacks


def test_sigusr1_records_stacks_in_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "POLL_INTERVAL", 0.01)
    asked: list[str] = []
    recorder = stacks.start_recorder(tmp_path / "run", "rank 0")
    monkeypatch.setattr(recorder, "forward", asked.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    path = tmp_path / "run" / "stacks.txt"
    wait_for(lambda: bool(asked))
    text = path.read_text()
    assert text.startswith(f"=== rank 0, process {os.getpid()} on ")
    assert "SIGUSR1 to rank 0" in text.splitlines()[0]
    assert "in test_sigusr1_records_stacks_in_run_folder" in text
    assert asked == ["SIGUSR1 to rank 0"]

    recorder.record("it hangs")
    assert path.read_text().count("=== ") == 2 and path.read_text().count(": it hangs\n") == 1
    assert stacks.start_recorder(tmp_path / "next", "rank 1") is recorder
    recorder.record("again")
    assert (tmp_path / "next" / "stacks.txt").read_text().startswith("=== rank 1, ")


PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
from lightning.pytorch.demos.boring_classes import BoringModel
import rlightning
from rlightning.parallel.stacks import start_recorder

folder = Path(sys.argv[1])

def await_sections(number):
    os.kill(os.getpid(), signal.SIGUSR1)
    path = folder / "stacks.txt"
    while not path.exists() or path.read_text().count("=== rank 0, ") < number:
        time.sleep(0.05)

trainer = rlightning.Trainer(rollout=None, barebones=True, accelerator="cpu", max_steps=1, default_root_dir=folder)
await_sections(1)
trainer.fit(BoringModel())
os.kill(os.getpid(), signal.SIGUSR1)
start_recorder(folder, "rank 0")  # as the next run does
await_sections(2)
"""


@pytest.mark.processes
def test_sigusr1_is_recorded_before_a_run_and_ends_no_process_after_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/stacks.txt").read_text().count("=== rank 0, ") == 2


def test_stacks_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stacks.StackRecorder(tmp_path / "file" / "stacks.txt", "rank 0").record("there is no such folder")


def test_run_folder_is_one_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert stacks.run_folder("~/run") == Path("/home/me/run")
    assert stacks.run_folder("s3://bucket/run") == Path()
