"""rlightning.Trainer: what a script gets by itself, and what the command line builds with it."""

import logging
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from cli_project import resolve_config
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from programs import logged_steps, read_csv, run_python
from tiny import UseSampler, make_data, make_grpo
from torch import nn

from rlightning import Trainer
from rlightning.algorithms import GRPO
from rlightning.callbacks import CompletionsTable, RLProgressBar, TransformersRollout, VLLMRollout
from rlightning.cli.lightning_cli import RLCLI
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.strategy import DDP
from rlightning.trainer import DEFAULTS


@dataclass
class Run:
    """A run of two steps without a terminal, and what it said."""

    folder: Path
    trainer: Trainer
    module: GRPO
    data: PromptDataModule
    lines: list[str]


def make_trainer(folder: Path | None, *callbacks: Callback, **options: Any) -> Trainer:
    """On the CPU, with completions of the actor's."""
    usual: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_model_summary": False}
    listed = [UseSampler(), *callbacks]
    return Trainer(rollout=None, default_root_dir=folder, callbacks=listed, **usual | options)


def callbacks_of(trainer: Any) -> list[Any]:
    """Return a Trainer's callbacks of this package, and its ModelCheckpoint."""
    own = [c for c in trainer.callbacks if type(c).__module__.startswith("rlightning.")]
    return [*own, *trainer.checkpoint_callbacks]


def fit_run(folder: Path, model_folder: str) -> Run:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlightning").addHandler(handler)
    data = make_data(folder, validation=str(folder / "sums.jsonl"))
    trainer, module = make_trainer(folder / "first"), make_grpo(model_folder)
    trainer.fit(module, data)
    logging.getLogger("rlightning").removeHandler(handler)
    return Run(folder / "first", trainer, module, data, lines)


@pytest.fixture(scope="module")
def run(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that no test changes."""
    return fit_run(tmp_path_factory.mktemp("runs"), model_folder)


def test_run_logs_each_step_and_first_validation(run: Run) -> None:
    steps = [re.match(r"step (\d/\d) \| reward [\d.]+ \| length", line) for line in run.lines]
    assert [match[1] for match in steps if match] == ["1/2", "2/2"]
    first = [line for line in run.lines if line.startswith("validation at step 0 | sums | reward ")]
    assert len(first) == 1
    assert any(line.startswith("16 training prompts, 4 steps an epoch.") for line in run.lines)


def test_run_leaves_metrics_report_completions_and_checkpoints(run: Run) -> None:
    assert logged_steps(run.folder / "metrics" / "version_0") == [1, 2]
    rows = read_csv(run.folder / "metrics" / "version_0" / "metrics.csv")
    assert [row["step"] for row in rows if row["val/sums/reward"]] == ["0"]  # once, though Lightning would check too
    assert all(row["throughput/tokens_per_second"] for row in rows if row["policy/loss"])
    assert (run.folder / "report.html").is_file()
    assert (run.folder / "completions" / "step_000001.parquet").is_file()
    assert (run.folder / "checkpoints" / "last.ckpt").is_symlink()
    assert isinstance(run.trainer.strategy.checkpoint_io, AtomicCheckpointIO)


@pytest.mark.long
def test_same_trainer_validates_and_fits_again(model_folder: str, tmp_path: Path) -> None:
    run = fit_run(tmp_path, model_folder)
    (metrics,) = run.trainer.validate(run.module, run.data, verbose=False)
    assert 0 <= metrics["val/sums/reward"] <= 1
    run.trainer.fit(run.module, run.data)  # its own checkpoints are no other run's
    run.trainer.test(run.module, run.data, ckpt_path="best", verbose=False)


@pytest.mark.long
def test_runs_folder_takes_no_other_but_resumes(model_folder: str, tmp_path: Path) -> None:
    run = fit_run(tmp_path, model_folder)
    other, data = make_trainer(run.folder, max_steps=3), run.data
    with pytest.raises(ConfigError, match=r"holds a run's checkpoints already.*fit\(\.\.\., ckpt_path='last'\)"):
        other.fit(make_grpo(model_folder), data)
    other.fit(make_grpo(model_folder), data, ckpt_path="last")
    assert other.global_step == 3
    assert logged_steps(run.folder / "metrics" / "version_1") == [3]
    with pytest.raises(ConfigError, match=r"ckpt_path=gone\.ckpt: there is no such file"):
        other.validate(make_grpo(model_folder), data, ckpt_path="gone.ckpt")


def test_usual_callbacks_are_added_unless_listed(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    usual = ["VLLMRollout", "RLProgressBar", "Throughput", "CompletionsTable", "RunReport", "ModelCheckpoint"]
    assert [type(callback).__name__ for callback in callbacks_of(trainer)] == usual


def test_listed_callbacks_take_the_place_of_usual_ones(tmp_path: Path) -> None:
    table, rollout = CompletionsTable(3), VLLMRollout(max_new_tokens=8)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = Trainer(callbacks=[table, ModelCheckpoint(), rollout], **options)
    listed = callbacks_of(trainer)
    assert listed[0] is rollout
    assert [one for one in listed if isinstance(one, CompletionsTable | VLLMRollout)] == [rollout, table]
    assert [one.dirpath for one in listed if isinstance(one, ModelCheckpoint)] == [str(tmp_path / "checkpoints")]
    with pytest.raises(ConfigError, match=r"lists VLLMRollout twice"):
        Trainer(rollout=VLLMRollout(), callbacks=rollout, **options)
    with pytest.raises(ConfigError, match=r"lists CompletionsTable twice"):
        Trainer(callbacks=[table, CompletionsTable()], **options)


@pytest.mark.parametrize("kinds", [(VLLMRollout, TransformersRollout), (TransformersRollout, VLLMRollout)])
def test_two_rollout_callbacks_are_refused(kinds: tuple[type[Callback], type[Callback]], tmp_path: Path) -> None:
    first, second = (kind() for kind in kinds)
    message = f"A run has one rollout callback, and here are {kinds[0].__name__} and {kinds[1].__name__}, in "
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    for given in ({"rollout": first, "callbacks": [second]}, {"callbacks": [first, second]}):
        with pytest.raises(ConfigError, match=f"^{message}"):
            Trainer(**given, **options)
    plain = lightning.pytorch.Trainer(callbacks=[first, second], **options)
    with pytest.raises(ConfigError, match=f"^{message}"):
        first.setup(plain, lightning.pytorch.LightningModule(), "fit")


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, (1, -1)),
        ({"max_steps": 5}, (None, 5)),
        ({"max_epochs": 3}, (3, -1)),
        ({"max_time": "00:01:00:00"}, (None, -1)),
    ],
)
def test_a_run_without_an_end_has_one_epoch(options: dict[str, Any], end: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **{"max_steps": -1} | options)
    assert (trainer.max_epochs, trainer.max_steps) == end


def test_options_settle_as_on_the_command_line(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logger=True, strategy="ddp")
    assert isinstance(trainer.logger, CSVLogger) and Path(trainer.logger.log_dir) == tmp_path / "metrics" / "version_0"
    assert isinstance(trainer.strategy, DDP)
    assert isinstance(make_trainer(tmp_path, strategy="fsdp2").strategy, FSDP)
    bare = make_trainer(tmp_path, barebones=True, enable_model_summary=None)
    assert not bare.loggers and callbacks_of(bare) == []
    quiet = make_trainer(tmp_path, enable_progress_bar=False)
    assert not any(isinstance(callback, RLProgressBar) for callback in callbacks_of(quiet))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"default_root_dir=.*file is a file"):
        make_trainer(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"gradient_clip_val=1.* Set model\.max_grad_norm=1"):
        make_trainer(tmp_path, gradient_clip_val=1.0)
    with pytest.raises(ConfigError, match=r"precision=16-mixed needs a scaled loss"):
        make_trainer(tmp_path, precision="16-mixed")


def test_command_line_has_the_same_defaults(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = resolve_config(capsys)["trainer"]
    expected = {**DEFAULTS, "check_val_every_n_epoch": 1}  # as no interval is set
    assert {name: shown[name] for name in DEFAULTS} in (dict(DEFAULTS), expected)


def test_command_line_builds_this_trainer(project: Path) -> None:
    built: list[Any] = []

    class Watch(RLCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            built.append(self.trainer)

    Watch(["fit", "--config", "run.yaml"])
    assert type(built[0]) is Trainer


class PressCtrlC(Callback):
    """Sends this process the signal of Ctrl-C, amid a step or a validation."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_start(self, *args: Any) -> None:
        self._press("train")

    def on_validation_batch_start(self, *args: Any) -> None:
        self._press("validation")

    def _press(self, hook: str) -> None:
        if self.hook == hook:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("hook", ["train", "validation"])
@pytest.mark.parametrize("kind", [Trainer, lightning.pytorch.Trainer])
def test_ctrl_c_leaves_training_mode(hook: str, kind: Any, model_folder: str, tmp_path: Path) -> None:
    data, module = make_data(tmp_path, validation=str(tmp_path / "sums.jsonl")), make_grpo(model_folder)
    module.dropout = nn.Dropout()
    before = signal.getsignal(signal.SIGINT)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "default_root_dir": tmp_path / "run"}
    own = {"rollout": None} if kind is Trainer else {"num_sanity_val_steps": 0}
    trainer = kind(callbacks=[UseSampler(), PressCtrlC(hook)], **options, **own)
    with pytest.raises(KeyboardInterrupt if kind is Trainer else SystemExit):
        trainer.fit(module, data)
    assert signal.getsignal(signal.SIGINT) is before
    assert all(part.training for part in module.modules())


def test_fit_goes_on_after_ctrl_c(model_folder: str, tmp_path: Path) -> None:
    data, module, press = make_data(tmp_path), make_grpo(model_folder), PressCtrlC("train")
    trainer = make_trainer(tmp_path / "run", press)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, data)
    press.hook = "none"
    trainer.fit(module, data)
    assert trainer.global_step == 2


SCRIPT = """
import sys
from rlightning import Trainer
from rlightning.algorithms import SFT
from rlightning.data import PromptDataModule

module = SFT(sys.argv[1], completion_column="answer", prompts_per_step=4, lr=0.01)
data = PromptDataModule(sys.argv[2], max_prompt_tokens=16)
for _ in range(2):
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, enable_checkpointing=False)
trainer.fit(module, data)
print("rank", trainer.global_rank, "in", trainer.default_root_dir)
try:
    Trainer(accelerator="cpu", devices=2)
except ValueError as error:
    print("rank", trainer.global_rank, "refused:", error)
"""


@pytest.mark.processes
def test_ranks_of_a_script_share_the_run_folder(model_folder: str, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", model_folder, str(data.train), folder=tmp_path, environment=os.environ)
    folders = dict(re.findall(r"rank (\d) in (\S+)", done.stdout))
    assert set(folders) == {"0", "1"} and len(set(folders.values())) == 1
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("runs/*")] == [folders["0"]]
    assert (tmp_path / folders["0"] / "report.html").is_file()
    # What rank 0 chooses later, rank 1 cannot know.
    assert re.findall(r"rank (\d) refused: default_root_dir is not set", done.stdout) == ["1"]
