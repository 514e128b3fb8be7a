"""A signal to stop leaves a checkpoint within the grace period, whatever the step is at; a second one ends at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_project import environment, make_project
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from programs import logged_steps
from tiny import heed_ctrl_c, make_data, make_grpo, make_trainer, write_sums

from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import last_checkpoint, read_state
from rlightning.parallel.stop_signal import StopSignal, stop_signal

heed_ctrl_c()

GRACE = 400.0
"""Seconds; long, for busy machines: tests move the clock that counts them."""


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    """As in a new process: a test that has used Ray leaves its handler of SIGTERM, which ends the process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Hang(Callback):
    """Sends a signal in a hook of step 3 and stays there, as a rollout from an engine that hangs does.

    Args:
        hook: a callback's.
        number: the signal.
        seconds: that it stays there.
        waited: the share of the grace period that is over then, by the clock that counts it.
    """

    def __init__(self, hook: str, number: signal.Signals, seconds: float = 600, waited: float = 0.51) -> None:
        setattr(self, hook, self.hang)
        self.number, self.seconds, self.waited = number, seconds, waited

    def hang(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), self.number)
            stop = stop_signal(trainer)
            stop.asked_at -= stop.grace_period * self.waited
            self.stay(stop)

    def stay(self, stop: StopSignal) -> None:
        time.sleep(self.seconds)


def fit_until_stopped(folder: Path, model_folder: str, hang: Hang) -> None:
    """Run until a signal ends it; checkpoints are in the folder ``ck``."""
    keep = ModelCheckpoint(folder / "ck", save_last="link", enable_version_counter=False, every_n_train_steps=100)
    trainer = make_trainer(folder, 5, hang, keep, enable_checkpointing=True)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray leaves a handler of its own in a process
    try:
        with pytest.raises(SIGTERMException) as stop:
            trainer.fit(make_grpo(model_folder, stop_grace=GRACE), make_data(folder))
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 128 + hang.number


def saved_step(folder: Path) -> int:
    last = last_checkpoint(folder)
    assert last is not None
    state = read_state(last)
    assert state is not None and state.is_resumable
    return state.step


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "number"),
    [
        ("on_train_batch_start", signal.SIGTERM),
        ("on_rollout_start", signal.SIGTERM),
        pytest.param("on_rollout_start", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("on_reward_start", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_hung_step_is_left_previous_saved(
    hook: str, number: signal.Signals, model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlightning")
    fit_until_stopped(tmp_path, model_folder, Hang(hook, number))
    assert saved_step(tmp_path / "ck") == 2
    assert f"{number.name}: the run ends after the step under way, at most 400 s from now" in caplog.text
    assert f"The state after step 2 is saved. Go on with:\n  trainer.fit(..., ckpt_path='{tmp_path}/ck/" in caplog.text


@pytest.mark.long
def test_resume_repeats_the_step_left(model_folder: str, tmp_path: Path) -> None:
    whole = make_grpo(model_folder)
    make_trainer(tmp_path, 5).fit(whole, make_data(tmp_path))
    fit_until_stopped(tmp_path, model_folder, Hang("on_rollout_start", signal.SIGTERM))
    resumed = make_grpo(model_folder)
    make_trainer(tmp_path, 5).fit(resumed, make_data(tmp_path), ckpt_path=tmp_path / "ck/last.ckpt")
    for (name, weight), (_, expected) in zip(resumed.named_weights(), whole.named_weights(), strict=True):
        assert torch.equal(weight, expected), name


@pytest.mark.long
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_start"])
def test_step_ending_in_time_is_saved(hook: str, model_folder: str, tmp_path: Path) -> None:
    # An update is not left, though half of the grace period is over.
    seconds, waited = (1.0, 0.51) if hook == "on_before_optimizer_step" else (0.0, 0.0)
    fit_until_stopped(tmp_path, model_folder, Hang(hook, signal.SIGTERM, seconds, waited))
    assert saved_step(tmp_path / "ck") == 3


class KeepWhileCut(Hang):
    """As :class:`Hang`, until the step is to be left; the update begins just before the signal for that comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("on_rollout_start", signal.SIGTERM)
        self.is_sending, self.has_begun = threading.Event(), False
        self._send = signal.pthread_kill
        monkeypatch.setattr(signal, "pthread_kill", self.send_late)

    def send_late(self, thread: int, number: int) -> None:
        self.is_sending.set()
        time.sleep(0.5)
        self._send(thread, number)

    def stay(self, stop: StopSignal) -> None:
        assert self.is_sending.wait(60)
        stop.keep_step()
        self.has_begun = True


@pytest.mark.long
def test_update_does_not_begin_amid_interruption(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = KeepWhileCut(monkeypatch)
    fit_until_stopped(tmp_path, model_folder, hang)
    assert not hang.has_begun
    assert saved_step(tmp_path / "ck") == 2


@pytest.mark.long
def test_hung_validation_is_left(model_folder: str, tmp_path: Path) -> None:
    hang = Hang("on_validation_batch_start", signal.SIGTERM)
    data = make_data(tmp_path, validation=write_sums(tmp_path))
    keep = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=100)
    trainer = make_trainer(
        tmp_path, 5, hang, keep, enable_checkpointing=True, val_check_interval=2, check_val_every_n_epoch=None
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(make_grpo(model_folder, stop_grace=GRACE), data)
    assert saved_step(tmp_path / "ck") == 2


class SlowSave(Hang, Checkpoint):
    """As :class:`Hang`, in a hook in which checkpoints are saved, for a second."""

    def __init__(self, hook: str) -> None:
        super().__init__(hook, signal.SIGTERM, 1.0)
        self.is_whole = False

    def hang(self, trainer: Any, *_: Any, **__: Any) -> None:
        super().hang(trainer)
        self.is_whole |= trainer.global_step == 2


@pytest.mark.long
@pytest.mark.parametrize("hook", ["on_validation_end", pytest.param("on_train_epoch_end", marks=pytest.mark.slow)])
def test_checkpoint_that_is_being_saved_is_not_left(hook: str, model_folder: str, tmp_path: Path) -> None:
    save = SlowSave(hook)
    data = make_data(tmp_path, validation=write_sums(tmp_path))
    trainer = make_trainer(
        tmp_path, 5, save, enable_checkpointing=True, limit_train_batches=2, limit_val_batches=1, max_epochs=3
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(make_grpo(model_folder, stop_grace=GRACE), data)
    assert save.is_whole


@pytest.mark.long
def test_interrupt_at_prompt_raises_and_saves(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    keep = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=100)
    hang = Hang("on_rollout_start", signal.SIGINT)
    trainer = make_trainer(tmp_path, 5, hang, keep, enable_checkpointing=True)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(make_grpo(model_folder), make_data(tmp_path))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from then on
    assert saved_step(tmp_path / "ck") == 2


def test_grace_period_has_to_be_positive(model_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^stop_grace=0 must be positive and finite\. Use a minute or two"):
        make_grpo(model_folder, stop_grace=0)


# The command line

SLOW = """\
import threading
import time

from rlightning.algorithms import SFT
from rlightning.parallel.stop_signal import stop_signal


class Slow(SFT):
    \"\"\"Says when it is in its third step; sleeps there, in a rollout so to speak, or in its update.\"\"\"

    def __init__(self, model: str, *, place: str = "rollout", awake_rank: int = -1, **kwargs):
        super().__init__(model, **kwargs)
        self.place, self.awake_rank = place, awake_rank

    def collect(self, prompts):
        self.sleep("rollout")
        return super().collect(prompts)

    def update(self, batch):
        self.sleep("update")
        return super().update(batch)

    def sleep(self, place):
        if self.trainer.global_step == 2 and self.place == place:
            stop = stop_signal(self.trainer)
            if self.trainer.global_rank == self.awake_rank:
                threading.Thread(target=self.hurry, args=(stop,), daemon=True).start()
                return
            print("in the third step", flush=True)
            self.hurry(stop)
            time.sleep(600)

    def hurry(self, stop):
        while not stop.signum:
            time.sleep(0.1)
        if stop.grace_period >= 100:  # which is long for busy machines, and goes by faster here
            stop.asked_at -= 0.51 * stop.grace_period
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    (folder / "slow.py").write_text(SLOW)
    return folder


def start(project: Path, run: str, *options: str) -> "subprocess.Popen[str]":
    """Begin a run; return once it is in its third step."""
    command = [sys.executable, "-m", "rlightning", "fit", "--config", "run.yaml", "--model", "slow.Slow"]
    process = subprocess.Popen(
        [*command, "--trainer.default_root_dir", run, *options],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "in the third step" in line:
            return process
    raise AssertionError("".join(lines))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "last_line"),
    [pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.slow), (signal.SIGTERM, "ended by SIGTERM")],
)
def test_resume_command_is_shown_and_works(project: Path, number: signal.Signals, last_line: str) -> None:
    run = number.name
    process = start(project, run, "--model.stop_grace", "400")
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + number, output
    assert output.splitlines()[-1] == last_line and "Traceback" not in output
    command = (
        f"rlightning fit --config run.yaml --model slow.Slow --trainer.default_root_dir {run} --model.stop_grace 400 "
        "--ckpt_path last"
    )
    assert f"The state after step 2 is saved. Go on with:\n  {command}\n" in output
    if number == signal.SIGINT:
        return  # it is the same command
    arguments = command.replace("slow.Slow", "rlightning.algorithms.SFT").split()[1:]
    continued = subprocess.run(
        [sys.executable, "-m", "rlightning", *arguments], cwd=project, env=environment(), capture_output=True, text=True
    )
    assert continued.returncode == 0, continued.stderr
    assert logged_steps(project / run / "metrics" / "version_1") == [3]


@pytest.mark.processes
def test_update_that_hangs_ends_with_the_grace_period(project: Path) -> None:
    options = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "1")
    process = start(project, "update", "--model.place", "update", "--model.stop_grace", "2", *options)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "ended, since the step under way was not over 2 s after the signal"
    assert saved_step(project / "update/checkpoints") == 2


@pytest.mark.processes
def test_second_signal_ends_at_once(project: Path) -> None:
    """With the first one's code."""
    process = start(project, "second", "--model.place", "update", "--model.stop_grace", "500")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    while "A second one ends it at once" not in process.stdout.readline():
        pass
    time.sleep(0.6)  # as one that a launcher sends besides the terminal's does not come
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert output == "ended by a second signal\n"


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "awake_rank"), [("fsdp2", -1), pytest.param("ddp", 0, marks=pytest.mark.slow)])
def test_ranks_leave_a_hung_step_together(project: Path, strategy: str, awake_rank: int) -> None:
    # Rank 0, if awake, waits for rank 1 in the middle of a collective.
    options = ("--trainer.devices", "2", "--trainer.strategy", strategy, "--model.awake_rank", str(awake_rank))
    process = start(project, strategy, "--model.stop_grace", "400", *options)
    process.terminate()  # rank 0 alone
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert output.splitlines()[-1] == "ended by SIGTERM" and "Traceback" not in output
    assert output.count("The state after step 2 is saved.") == 1
    assert saved_step(project / strategy / "checkpoints") == 2


@pytest.mark.slow
@pytest.mark.processes
def test_updating_rank_keeps_all_in_step(project: Path) -> None:
    options = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--model.place", "update")
    process = start(project, "updating", "--model.stop_grace", "4", *options)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert "ended, since the step under way was not over 4 s after the signal" in output
    assert "is saved" not in output


@pytest.mark.slow
@pytest.mark.processes
def test_signal_to_one_hung_rank_ends_all(project: Path) -> None:
    options = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--model.awake_rank", "0")
    process = start(project, "alone", "--model.stop_grace", "2", *options)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (rank_1,) = (pid for pid in children if b"rlightning.__main__" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(rank_1), signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert output.count("ended, since the step under way was not over 2 s after the signal\n") == 1
    assert "ends because" not in output and "Traceback" not in output
