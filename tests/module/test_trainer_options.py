"""Each Trainer option and each callback that Lightning ships: works, or is refused in one line."""

import inspect
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner.tuning import Tuner
from programs import logged_steps, read_csv
from tiny import bare_trainer, make_data, save_model
from torch.utils.data import DataLoader
from trainer_witness import Witness, fit, make_module, make_rows

from rlightning.algorithms import SFT
from rlightning.data.stream import PromptBatches
from rlightning.errors import ConfigError
from rlightning.module.trainer_options import REFUSED_CALLBACKS, check_callbacks, check_trainer, check_unused_options
from rlightning.parallel import DDP
from rlightning.parallel.stop_signal import EndOnSigterm
from rlightning.types import Prompt


def lines_of(folder: Path) -> list[dict[str, str]]:
    """The rows of the run's metrics."""
    (file,) = folder.glob("**/metrics.csv")
    return read_csv(file)


def fail_at_3(trainer: Trainer, *args: Any) -> None:
    if trainer.global_step == 3:
        raise RuntimeError("third step")


def recorded(trainer: Any, action: str) -> int:
    """How often the profiler saw it."""
    return sum(len(times) for name, times in trainer.profiler.recorded_durations.items() if action in name)


WORKS: dict[str, tuple[dict[str, Any], Callable[[Any, Witness, Path], bool]]] = {
    "accelerator": ({"accelerator": "cpu"}, lambda t, w, f: isinstance(t.accelerator, CPUAccelerator)),
    "strategy": ({"strategy": "auto"}, lambda t, w, f: isinstance(t.strategy, SingleDeviceStrategy)),
    "devices": ({"devices": 1}, lambda t, w, f: t.num_devices == t.world_size == 1),
    "num_nodes": ({"num_nodes": 1}, lambda t, w, f: t.num_nodes == 1),
    "precision": ({"precision": "bf16-mixed"}, lambda t, w, f: {m[0] for m in w.modes} == {torch.bfloat16}),
    "logger": ({"logger": True}, lambda t, w, f: len(t.loggers) == 1 and any((f / "lightning_logs").iterdir())),
    "callbacks": ({}, lambda t, w, f: len(w.prompts) == 2),
    "fast_dev_run": (
        {"fast_dev_run": True, "max_steps": 9, "enable_checkpointing": True},
        lambda t, w, f: (
            t.global_step == 1 and w.num_batches["validation"] == len(w.validated) and not [*f.glob("**/*.ckpt")]
        ),
    ),
    "max_epochs": ({"max_steps": -1, "max_epochs": 2}, lambda t, w, f: t.global_step == 8),
    "min_epochs": ({"max_steps": 20, "min_epochs": 2}, lambda t, w, f: t.global_step == 8),
    "max_steps": ({"max_steps": 3}, lambda t, w, f: t.global_step == 3),
    "min_steps": ({"max_steps": 20, "min_steps": 5}, lambda t, w, f: t.global_step == 5),
    "max_time": ({"max_steps": 20, "max_time": timedelta(microseconds=1)}, lambda t, w, f: t.global_step == 1),
    "limit_train_batches": (
        {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2},
        lambda t, w, f: t.global_step == 6,
    ),
    "limit_val_batches": (
        {"max_steps": 4, "limit_val_batches": 3},
        lambda t, w, f: w.num_batches["validation"] == 3 * len(w.validated) > 0,
    ),
    "limit_test_batches": ({"limit_test_batches": 3}, lambda t, w, f: w.num_batches["test"] == 3),
    "limit_predict_batches": ({"limit_predict_batches": 3}, lambda t, w, f: w.num_batches["predict"] == 3),
    "overfit_batches": (
        {"max_steps": 4, "overfit_batches": 2},
        lambda t, w, f: w.prompts == 2 * [["0+0=", "0+1=", "0+2=", "0+3="], ["1+0=", "1+1=", "1+2=", "1+3="]],
    ),
    "val_check_interval": (
        {"max_steps": 4, "val_check_interval": timedelta(0)},
        lambda t, w, f: w.validated[-4:] == [1, 2, 3, 4],
    ),
    "check_val_every_n_epoch": (
        {"max_steps": 16, "check_val_every_n_epoch": 2},
        lambda t, w, f: [step for step in w.validated if step] == [8, 16],
    ),
    "num_sanity_val_steps": ({"num_sanity_val_steps": 3}, lambda t, w, f: w.num_batches["sanity"] == 3),
    "log_every_n_steps": (
        {"max_steps": 6, "log_every_n_steps": 3, "limit_val_batches": 0},
        lambda t, w, f: logged_steps(f) == [3, 6] and t.logger.experiment.hparams == {"word": "x"},
    ),
    "enable_checkpointing": (
        {"enable_checkpointing": True},
        lambda t, w, f: [path.name for path in f.glob("**/*.ckpt")] == ["epoch=0-step=2.ckpt"],
    ),
    "enable_progress_bar": (
        {"enable_progress_bar": True},
        lambda t, w, f: isinstance(t.progress_bar_callback, callbacks.ProgressBar),
    ),
    "enable_model_summary": (
        {"enable_model_summary": True},
        lambda t, w, f: any(isinstance(callback, callbacks.ModelSummary) for callback in t.callbacks),
    ),
    "deterministic": (
        {"deterministic": "warn"},
        lambda t, w, f: torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    "benchmark": ({"benchmark": True}, lambda t, w, f: torch.backends.cudnn.benchmark),
    "inference_mode": ({"inference_mode": False, "max_steps": 4}, lambda t, w, f: w.inference == {False}),
    "use_distributed_sampler": (
        {"use_distributed_sampler": True},
        lambda t, w, f: w.prompts == [["0+0=", "0+1=", "0+2=", "0+3="], ["1+0=", "1+1=", "1+2=", "1+3="]],
    ),
    "profiler": ({"profiler": "simple"}, lambda t, w, f: recorded(t, "training_step") == 2),
    "detect_anomaly": ({"detect_anomaly": True}, lambda t, w, f: {m[1] for m in w.modes} == {True}),
    "barebones": (
        {"barebones": True, "log_every_n_steps": 0},
        lambda t, w, f: t.global_step == 2 and not t.loggers and not t.checkpoint_callbacks,
    ),
    "plugins": (
        {"plugins": [PLUGIN := TorchCheckpointIO()]},
        lambda t, w, f: t.strategy.checkpoint_io is PLUGIN,
    ),
    "reload_dataloaders_every_n_epochs": (
        {"max_steps": 5, "reload_dataloaders_every_n_epochs": 1},
        lambda t, w, f: [prompts[0] for prompts in w.prompts] == ["0+0=", "1+0=", "2+0=", "3+0=", "0+0="],
    ),
    "default_root_dir": (
        {"default_root_dir": "elsewhere", "enable_checkpointing": True},
        lambda t, w, f: len([*(f / "elsewhere").glob("**/*.ckpt")]) == 1,
    ),
    "enable_autolog_hparams": ({"enable_autolog_hparams": False}, lambda t, w, f: t.logger.experiment.hparams == {}),
}
"""Options that work, and what shows that each does."""

REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "accumulate_grad_batches": (4, r"=4 has no effect .* Lower model\.max_tokens_per_microbatch"),
    "gradient_clip_val": (0.5, r"=0\.5 has no effect here.*\. Set model\.max_grad_norm=0\.5\."),
    "gradient_clip_algorithm": ("norm", r"=norm has no effect .* set model\.max_grad_norm"),
    "sync_batchnorm": (True, r"=true has no effect: language models have no such layer\."),
    "model_registry": ("me/model", r"=me/model needs Lightning's cloud service\."),
}

CALLBACKS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Any, Path], bool]]] = {
    "Callback": (lambda f: Callback(), lambda t, c, f: c in t.callbacks and t.global_step == 6),
    "Checkpoint": (
        lambda f: callbacks.Checkpoint(),
        # After all others, but for the one that acts upon what has been saved.
        lambda t, c, f: t.callbacks[-2] is c and type(t.callbacks[-1]) is EndOnSigterm and t.global_step == 6,
    ),
    "DeviceStatsMonitor": (
        lambda f: callbacks.DeviceStatsMonitor(cpu_stats=True),
        lambda t, c, f: any("DeviceStatsMonitor.on_train_batch_end/cpu_percent" in row for row in lines_of(f)),
    ),
    "EarlyStopping": (
        lambda f: callbacks.EarlyStopping("policy/loss", stopping_threshold=1e9),
        lambda t, c, f: t.global_step == 4,
    ),
    "LambdaCallback": (
        lambda f: callbacks.LambdaCallback(on_train_start=lambda *args: (f / "called").touch()),
        lambda t, c, f: (f / "called").exists(),
    ),
    "LearningRateMonitor": (
        lambda f: callbacks.LearningRateMonitor(),
        # At each epoch's start. After the warm-up's one step, 0.01 falls by a fifth of itself a step.
        lambda t, c, f: (
            [float(row["lr-AdamW/pg1"] or 0) for row in lines_of(f) if row["lr-AdamW/pg1"]] == [0.01, 0.004]
        ),
    ),
    "ModelCheckpoint": (
        lambda f: callbacks.ModelCheckpoint(f, filename="{step}", every_n_train_steps=4, save_top_k=-1),
        lambda t, c, f: {path.name for path in f.glob("*.ckpt")} == {f"step={n}.ckpt" for n in (4, 6)},
    ),
    "ModelSummary": (lambda f: callbacks.ModelSummary(), lambda t, c, f: t.global_step == 6),
    "OnExceptionCheckpoint": (
        lambda f: callbacks.OnExceptionCheckpoint(f),
        lambda t, c, f: (f / "on_exception.ckpt").exists(),
    ),
    "ProgressBar": (lambda f: callbacks.ProgressBar(), lambda t, c, f: t.progress_bar_callback is c),
    "RichModelSummary": (lambda f: callbacks.RichModelSummary(), lambda t, c, f: t.global_step == 6),
    "RichProgressBar": (lambda f: callbacks.RichProgressBar(), lambda t, c, f: c.train_progress_bar_id is not None),
    "TQDMProgressBar": (lambda f: callbacks.TQDMProgressBar(), lambda t, c, f: c.train_progress_bar.n == 2),
    "Timer": (lambda f: callbacks.Timer(timedelta(microseconds=1)), lambda t, c, f: t.global_step == 1),
}
"""Callbacks that work, and what shows that each does; `BasePredictionWriter`, which is abstract, has its own test."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
def test_trainer_option_has_its_effect(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, has_effect = WORKS[name]
    has_logger = name in ("log_every_n_steps", "enable_autolog_hparams")
    logger = {"logger": CSVLogger(tmp_path, flush_logs_every_n_steps=1)} if has_logger else {}
    witness = Witness(stops_at=1 if name.startswith("min_") else None)
    if name in ("limit_test_batches", "limit_predict_batches"):
        trainer = bare_trainer(tmp_path, 2, witness, **options)
        run = trainer.test if name == "limit_test_batches" else trainer.predict
        run(make_module(model), datamodule=make_rows(tmp_path))
    else:
        trainer = fit(tmp_path, model, witness, **logger | options)
    try:
        assert has_effect(trainer, witness, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_trainer_option_is_refused(name: str, model: str, tmp_path: Path) -> None:
    value, message = REFUSED_OPTIONS[name]
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}{message}[^\n]*$"):
        fit(tmp_path, model, **{name: value})


@pytest.mark.long
@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_has_its_effect(
    name: str, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    make, has_effect = CALLBACKS[name]
    listed = make(tmp_path)
    kept = {"enable_progress_bar": name.endswith("ProgressBar"), "enable_checkpointing": "Checkpoint" in name}
    fails = callbacks.LambdaCallback(on_train_batch_end=fail_at_3) if name == "OnExceptionCheckpoint" else Callback()
    trainer = bare_trainer(tmp_path, 6, listed, fails, logger=CSVLogger(tmp_path), **kept)
    caplog.set_level(logging.INFO)
    with nullcontext() if type(fails) is Callback else pytest.raises(RuntimeError, match="third step"):
        trainer.fit(make_module(model), datamodule=make_rows(tmp_path))
    assert has_effect(trainer, listed, tmp_path)
    if name.endswith("Summary"):
        assert "Trainable params" in caplog.text + capsys.readouterr().out


@pytest.mark.parametrize("kind", REFUSED_CALLBACKS)
def test_callback_is_refused(kind: type[Callback]) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {kind.__name__} .*\. [^\n]*\.$"):
        check_callbacks([kind])


@pytest.mark.parametrize(
    ("command", "argument"),
    [("fit", "rows"), ("validate", "validation=rows"), ("test", "validation=rows"), ("predict", "predict=rows")],
)
def test_loader_without_data_module_is_refused(command: str, argument: str, model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}] * 4
    loaders: list[Any] = [DataLoader(rows, batch_size=2), rows]  # type: ignore[arg-type]
    said = ("is no data module, from which SFT takes them. Give the loader's rows as ", "[{'prompt': '1+1=', ")
    for loader, expected in zip(
        [*loaders, "rows.jsonl", None], [*said, "'rows.jsonl' is", "is given no data"], strict=True
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"{command}(module, datamodule=PromptDataModule({argument}))")
        ) as error:
            getattr(bare_trainer(tmp_path, 1), command)(SFT(model, prompts_per_step=2), loader)
        assert expected in str(error.value) and ("loader's" in str(error.value)) == isinstance(loader, DataLoader)


def test_own_train_dataloader_of_a_module_is_used(model: str, tmp_path: Path) -> None:
    class Own(SFT):
        def train_dataloader(self) -> Any:
            return PromptBatches([Prompt(0, "1+1=", [2, 11, 2, 12], {"completion": "2"}, [3, 0])] * 2, batch_size=1)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    trainer = bare_trainer(tmp_path, 2)
    trainer.fit(Own(model, prompts_per_step=1))
    assert trainer.global_step == 2


def test_prediction_writer_gets_each_batch(model: str, tmp_path: Path) -> None:
    written: list[Any] = []

    class Writer(callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *args: Any) -> None:
            written.append(prediction)

    class Echo(SFT):
        def predict_step(self, prompts: Any, batch_idx: int) -> Any:
            return [prompt.text for prompt in prompts]

    data = make_data(tmp_path, predict=str(tmp_path / "sums.jsonl"))
    trainer = bare_trainer(tmp_path, 1, Writer(write_interval="batch"))
    trainer.predict(Echo(model, completion_column="answer"), datamodule=data, return_predictions=False)
    assert [text for batch in written for text in batch] == [f"{a}+{b}=" for a in range(4) for b in range(4)]


def test_asynchronous_checkpoint_plugin_works(model: str, tmp_path: Path) -> None:
    fit(tmp_path, model, callbacks.ModelCheckpoint(tmp_path), enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    assert (tmp_path / "epoch=0-step=2.ckpt").is_file()


def test_learning_rate_tuner_is_refused_in_a_line(model: str, tmp_path: Path) -> None:
    trainer = bare_trainer(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"^Tuner\.lr_find needs Lightning to step the optimizer"):
        Tuner(trainer).lr_find(make_module(model), datamodule=make_rows(tmp_path))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_spawn", DDP(start_method="spawn")])
def test_spawned_ranks_are_refused_in_a_line(strategy: Any, model: str, tmp_path: Path) -> None:
    trainer = bare_trainer(tmp_path, 1, devices=2, strategy=strategy)
    with pytest.raises(ConfigError, match=r"^trainer\.strategy would train copies of the module.* Use strategy='ddp'"):
        trainer.fit(make_module(model), datamodule=make_rows(tmp_path))


def test_docs_table_has_every_option_and_callback() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (works|refused)", text, re.MULTILINE))
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert options == WORKS.keys() | REFUSED_OPTIONS.keys()
    refused = {name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), tuple(REFUSED_CALLBACKS))}
    assert set(callbacks.__all__) == CALLBACKS.keys() | refused | {"BasePredictionWriter"}
    works = dict.fromkeys((*WORKS, *CALLBACKS, "BasePredictionWriter"), "works")
    assert rows == works | dict.fromkeys((*REFUSED_OPTIONS, *refused), "refused")


def test_weights_too_coarse_to_learn_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight, update = torch.tensor(0.02, dtype=torch.bfloat16), 1e-6
    assert weight - update == weight
    with caplog.at_level(logging.WARNING):
        check_trainer(bare_trainer(tmp_path, 1, precision="bf16-true"))
    assert "Use bf16-mixed" in caplog.text


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_is_refused(precision: str) -> None:  # as it was given: on a CPU Lightning turns it into bfloat16
    with pytest.raises(ConfigError, match=rf"trainer\.precision={precision} .* Use bf16-mixed\."):
        check_unused_options({"precision": precision})
