"""A run's folder is one run's at a time, and has to be writable; both are said in a line before anything is loaded."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
from cli_project import environment, fit, fit_here, make_project, rlightning
from disks import failing
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import make_data, make_grpo, make_trainer
from waiting import wait_for

from rlightning.callbacks import RunReport
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import last_checkpoint
from rlightning.run_lock import LOCK, FolderTakenError, check_writable, lock_run, relock_run, unlock_run

HOLD = """
import os, sys, time
from pathlib import Path
from rlightning.run_lock import lock_run
lock_run(Path(sys.argv[1]))
child = os.fork() if len(sys.argv) > 2 else 1
print(os.getpid(), flush=True)
time.sleep(600)
"""


def hold(folder: Path, *more: str) -> "subprocess.Popen[str]":
    """Have another process take a folder; with an argument more, a child that it forks lives on."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.processes
def test_folder_is_one_process_until_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = hold(folder)
    try:
        message = rf"^trainer\.default_root_dir={folder}: another run is at work there \(process {holder.pid} on .*\)\."
        with pytest.raises(ConfigError, match=message):
            lock_run(folder)
    finally:
        end(holder)
    assert lock_run(folder)
    assert not lock_run(folder)  # this process has it
    unlock_run(folder)
    assert list(folder.iterdir()) == []  # which another process has made
    assert lock_run(tmp_path / "own")
    unlock_run(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_unlock_removes_empty_folders_that_it_made(tmp_path: Path) -> None:
    lock_run(tmp_path / "runs" / "first")
    unlock_run(tmp_path / "runs" / "first")
    assert tmp_path.exists() and not (tmp_path / "runs").exists()
    lock_run(tmp_path / "runs" / "first")
    lock_run(tmp_path / "runs" / "second")
    unlock_run(tmp_path / "runs" / "first")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["second"]
    unlock_run(tmp_path / "runs" / "second")  # which has not made the folder above
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.processes
def test_forked_child_does_not_keep_a_dead_runs_folder(tmp_path: Path) -> None:
    holder = hold(tmp_path, "fork")
    try:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        wait_for(lambda: is_free(tmp_path))  # once the child, which has the file too, has closed it
    finally:
        end(holder)


def is_free(folder: Path) -> bool:
    """Whether a run could take a folder now."""
    try:
        lock_run(folder)
    except FolderTakenError:
        return False
    unlock_run(folder)
    return True


def test_disk_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    assert lock_run(tmp_path)
    assert f"{tmp_path}: this disk has no file locks." in caplog.text
    unlock_run(tmp_path)


def test_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(ConfigError, match=r"nothing can be written there, since No space left on device\."):
            lock_run(tmp_path)
    assert not (tmp_path / LOCK).exists()
    assert lock_run(tmp_path)
    unlock_run(tmp_path)


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^dirpath=.*/file/ck: nothing can be written there, since .*/file is no folder"
    ):
        check_writable(tmp_path / "file/ck", "dirpath")
    with pytest.raises(ConfigError, match=r"^trainer\.default_root_dir=/proc/run: nothing can be written there"):
        lock_run(Path("/proc/run"))
    check_writable(tmp_path / "a/b/c", "dirpath")
    assert not (tmp_path / "a").exists()


class RemoveFolder(Callback):
    """Removes the run's folder before the second step, and notes whether another run could take it in the third."""

    was_free: bool | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        folder = Path(trainer.default_root_dir)
        if trainer.global_step == 1:
            shutil.rmtree(folder)
        elif trainer.global_step == 2:
            with (folder / LOCK).open() as file:
                self.was_free = can_lock(file)


def can_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.long
def test_removed_folder_is_warned_of_once_and_locked_again(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, data, remove = tmp_path / "run", make_data(tmp_path), RemoveFolder()
    make_trainer(folder, 3, remove, RunReport(str(folder / "report.html"))).fit(make_grpo(model_folder), data)
    said = [record.getMessage() for record in caplog.records if "was removed" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"The run's folder {folder}, or {LOCK} in it, was removed")
    assert remove.was_free is False
    assert [path.name for path in folder.iterdir()] == ["report.html"]


def test_removed_folder_that_another_run_took_ends_this_one(tmp_path: Path) -> None:
    lock_run(tmp_path)
    (tmp_path / LOCK).unlink()
    with (tmp_path / LOCK).open("w") as other:
        assert can_lock(other)
        with pytest.raises(FolderTakenError, match="another run is at work there"):
            relock_run(tmp_path)
    relock_run(tmp_path)
    assert not lock_run(tmp_path)
    unlock_run(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_read_only_run_folder_is_one_line(
    command: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "ro" and access(path, mode))
    (project / "ro").mkdir()
    code, errors = fit_here(capsys, "--config", "run.yaml", "--trainer.default_root_dir", "ro/run", command=command)
    assert code == 2
    line = errors.splitlines()[-1]
    assert line.startswith("error: trainer.default_root_dir=ro/run: nothing can be written there, since ")
    code, errors = fit_here(
        capsys, "--config", "run.yaml", "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath", "ro/ck"
    )
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: dirpath of ModelCheckpoint=")
    assert not list((project / "ro").iterdir())


@pytest.mark.slow
@pytest.mark.processes
def test_second_run_is_refused_and_a_resume_goes_on(tmp_path: Path) -> None:
    make_project(tmp_path)
    folder = ("--trainer.default_root_dir", "run")
    holder = hold(tmp_path / "run")
    try:
        two_ranks = ("--trainer.devices", "2", "--trainer.strategy", "fsdp2")
        for options in ((), two_ranks):
            refused = fit(tmp_path, *folder, *options, exit_code=2)
            (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
            assert line.startswith("error: trainer.default_root_dir=run: another run is at work there (process ")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
        saved = tmp_path / "run/checkpoints/last.ckpt"
        saved.parent.mkdir()
        saved.touch()
        refused = fit(tmp_path, *folder, exit_code=2)
        assert "error: trainer.default_root_dir=run: another run is at work there (process " in refused.stderr
        shutil.rmtree(saved.parent)
        fit(tmp_path)  # a run without a folder has one of its own
    finally:
        end(holder)
    fit(tmp_path, *folder)
    assert not (tmp_path / "run" / LOCK).exists()
    fit(tmp_path, *folder, "--ckpt_path", "last", "--trainer.max_steps", "4", *two_ranks)
    assert sorted(path.name for path in (tmp_path / "run").glob("config*")) == ["config-2.yaml", "config.yaml"]


@pytest.mark.processes
def test_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    make_project(tmp_path)
    refused = rlightning(tmp_path, "fit", "--config", "run.yaml", "--model.model", "nope")
    assert refused.returncode == 2
    assert not (tmp_path / "runs").exists()


class Look(Callback):
    """Notes what other processes are told of the run's folder while it is at work."""

    answers: tuple[int, str] | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        code = HOLD.partition("child")[0]
        done = subprocess.run(
            [sys.executable, "-c", code, str(trainer.default_root_dir)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        self.answers = done.returncode, done.stderr


@pytest.mark.processes
def test_scripts_fit_locks_its_folder_while_running(model_folder: str, tmp_path: Path) -> None:
    look = Look()
    for max_steps, others in ((1, [RunReport()]), (2, [])):  # a checkpoint alone is enough
        trainer = make_trainer(tmp_path, max_steps, look, *others, ModelCheckpoint(tmp_path), enable_checkpointing=True)
        trainer.fit(make_grpo(model_folder), make_data(tmp_path), ckpt_path=last_checkpoint(tmp_path))
        assert look.answers is not None
        assert look.answers[0] == 1 and f"another run is at work there (process {os.getpid()} on" in look.answers[1]
        assert not (tmp_path / LOCK).exists()


def test_fit_that_writes_elsewhere_takes_no_folder(model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    seen = []

    class See(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((tmp_path / LOCK).exists())

    report = RunReport(str(tmp_path.parent / f"{tmp_path.name}.html"))
    make_trainer(tmp_path, 1, See(), report).fit(make_grpo(model_folder), make_data(tmp_path))
    assert seen == [False]
