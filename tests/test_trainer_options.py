"""Each Trainer option and each callback that Lightning ships: works, or is refused in one line."""

import inspect
import logging
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from tiny import bare_trainer, make_data, save_model

from rlightning.algorithms import SFT
from rlightning.errors import ConfigError
from rlightning.trainer_options import REFUSED_CALLBACKS, check_callbacks, check_trainer

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "strategy": "auto",
    "devices": 1,
    "num_nodes": 1,
    "precision": "bf16-mixed",
    "logger": True,
    "callbacks": [],
    "fast_dev_run": True,
    "max_epochs": 1,
    "min_epochs": 1,
    "max_steps": 2,
    "min_steps": 1,
    "max_time": "00:01:00:00",
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "overfit_batches": 1,
    "val_check_interval": timedelta(0),
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 1,
    "log_every_n_steps": 2,
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "deterministic": "warn",
    "benchmark": True,
    "inference_mode": False,
    "use_distributed_sampler": True,
    "profiler": "simple",
    "detect_anomaly": True,
    "barebones": True,
    "plugins": [],
    "reload_dataloaders_every_n_epochs": 1,
    "default_root_dir": "elsewhere",
    "enable_autolog_hparams": False,
}
"""A value of each option that works."""

TRAINER: dict[str, Any] = {
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "callbacks": [],
    "_accelerator_connector": SimpleNamespace(_layer_sync=None),
    "_model_registry": None,
}
"""What is read of a Trainer: on a CPU a real one turns float16 into bfloat16."""

REFUSED_OPTIONS = {
    "accumulate_grad_batches": 4,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "norm",
    "sync_batchnorm": True,
    "model_registry": "me/model",
}

CALLBACKS: dict[str, Callable[[Path], Callback]] = {
    "Callback": lambda folder: Callback(),
    "Checkpoint": lambda folder: callbacks.Checkpoint(),
    "DeviceStatsMonitor": lambda folder: callbacks.DeviceStatsMonitor(cpu_stats=False),
    "EarlyStopping": lambda folder: callbacks.EarlyStopping("policy/loss"),
    "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    "LearningRateMonitor": lambda folder: callbacks.LearningRateMonitor(),
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(folder),
    "ModelSummary": lambda folder: callbacks.ModelSummary(),
    "OnExceptionCheckpoint": lambda folder: callbacks.OnExceptionCheckpoint(folder),
    "ProgressBar": lambda folder: callbacks.ProgressBar(),
    "RichModelSummary": lambda folder: callbacks.RichModelSummary(),
    "RichProgressBar": lambda folder: callbacks.RichProgressBar(),
    "TQDMProgressBar": lambda folder: callbacks.TQDMProgressBar(),
    "Timer": lambda folder: callbacks.Timer("00:01:00:00"),
}
"""Each callback that works; `BasePredictionWriter`, which is abstract, has a test of its own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def fit(folder: Path, model: str, *listed: Callback, **options: Any) -> Trainer:
    module = SFT(model, completion_column="answer", prompts_per_step=4, lr=0.01, lr_schedule="linear", warmup_steps=1)
    defaults: dict[str, Any] = {"max_steps": 2} | options
    if options.get("barebones"):
        defaults["log_every_n_steps"] = 0
    trainer = bare_trainer(folder, defaults.pop("max_steps"), *listed, **defaults)
    trainer.fit(module, datamodule=make_data(folder, validation=str(folder / "sums.jsonl")))
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_trainer_option_works(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = fit(tmp_path, model, **{name: OPTIONS[name]})
    assert trainer.global_step == (1 if name in ("fast_dev_run",) else 2)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_trainer_option_is_refused(name: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}=.*[^\n]*$"):
        fit(tmp_path, model, **{name: REFUSED_OPTIONS[name]})


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_works(name: str, model: str, tmp_path: Path) -> None:
    has_bar = name.endswith("ProgressBar")
    kept = {"enable_progress_bar": has_bar, "enable_checkpointing": "Checkpoint" in name}
    listed = CALLBACKS[name](tmp_path)
    trainer = fit(tmp_path, model, listed, logger=CSVLogger(tmp_path), **kept)
    assert trainer.global_step == 2 and listed in trainer.callbacks  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", REFUSED_CALLBACKS)
def test_callback_is_refused(kind: type[Callback]) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {kind.__name__} .*\. [^\n]*\.$"):
        check_callbacks([kind])


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


def test_docs_table_has_every_option_and_callback() -> None:
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (works|refused)", text, re.MULTILINE))
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert options == OPTIONS.keys() | REFUSED_OPTIONS.keys()
    refused = {name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), tuple(REFUSED_CALLBACKS))}
    assert set(callbacks.__all__) == CALLBACKS.keys() | refused | {"BasePredictionWriter"}
    works = dict.fromkeys((*OPTIONS, *CALLBACKS, "BasePredictionWriter"), "works")
    assert rows == works | dict.fromkeys((*REFUSED_OPTIONS, *refused), "refused")


def test_weights_too_coarse_to_learn_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    weight, update = torch.tensor(0.02, dtype=torch.bfloat16), 1e-6
    assert weight - update == weight
    with caplog.at_level(logging.WARNING):
        check_trainer(SimpleNamespace(**TRAINER | {"precision": "bf16-true"}))  # type: ignore[arg-type]
    assert "Use bf16-mixed" in caplog.text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"precision": "16-mixed"}, r"trainer\.precision=16-mixed .* Use bf16-mixed\."),
        ({"precision": "16-true"}, r"trainer\.precision=16-true .* Use bf16-mixed\."),
        ({"accumulate_grad_batches": 4}, r"batches=4 has no effect .* Lower model\.max_tokens_per_microbatch"),
        ({"gradient_clip_val": 0.5}, r"gradient_clip_val=0\.5 has no effect here.*\. Set model\.max_grad_norm=0\.5\."),
    ],
)
def test_settings_of_the_trainer_that_do_not_reach_here(setting: dict[str, Any], message: str) -> None:
    check_trainer(SimpleNamespace(**TRAINER))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check_trainer(SimpleNamespace(**TRAINER | setting))  # type: ignore[arg-type]
