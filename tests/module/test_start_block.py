"""The summary that a run logs when it starts, and Lightning's messages that it replaces."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from tiny import make_data, make_grpo, make_trainer, save_model

from rlightning.callbacks import SaveHF
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.module.start_block import describe_model, describe_start
from rlightning.parallel.device import use_tensor_cores

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
# An embedding that is the output layer too, and the last norm; in each layer two heads of 32 as queries and outputs,
# one as keys and values, three matrices of the feed-forward, two norms of the stream and one each of queries and keys.
NUM_PARAMETERS = 14 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 32)


class Catch(Callback):
    """Keeps the block, without the lines' breaks."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RLModule)
        self.rows = dict(re.split(r"\s+", row, maxsplit=1) for row in self.join(describe_start(trainer, pl_module)))

    def join(self, block: str) -> list[str]:
        return re.sub(r"\n {2,}", " ", block).splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model") / "policy", **SIZES)


def fit(
    folder: Path, model: str, *callbacks: Callback, steps: int = 1, ckpt_path: Path | None = None, **kwargs: Any
) -> None:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = make_trainer(folder, steps, *callbacks, enable_checkpointing=saves, **kwargs)
    trainer.fit(make_grpo(model), make_data(folder), ckpt_path=ckpt_path)


def test_block_names_model_layout_batch_and_output(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    run, catch = tmp_path / "run", Catch()
    run.mkdir()
    saver = ModelCheckpoint(run / "checkpoints", enable_version_counter=False)
    fit(run, model, catch, saver, SaveHF(), logger=CSVLogger(run, name="metrics"))
    assert sum(message.startswith("model ") for message in caplog.messages) == 1
    assert list(catch.rows) == ["model", "layout", "batch", "writes"]  # nothing is planned on a CPU
    assert catch.rows["model"].startswith(f"{model} (qwen3, {NUM_PARAMETERS:,} parameters); attention is padded to")
    assert catch.rows["layout"] == "1 rank on CPU, precision 32-true"
    assert catch.rows["batch"].startswith("A step is 4 prompts x 2 samples = 8 completions, then 1 optimizer step of 8")
    size = 12 * NUM_PARAMETERS / 2**20  # a weight and its two moments in float32
    pattern = (
        rf"{re.escape(str(run))}: checkpoints \({size:.1f} MiB each, 1 kept; [\d.]+ GiB free\), metrics/version_0, hf"
    )
    assert re.fullmatch(pattern, catch.rows["writes"])
    (saved,) = (run / "checkpoints").glob("*.ckpt")
    assert saved.stat().st_size == pytest.approx(12 * NUM_PARAMETERS, rel=0.1)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("auto", "; shared prefixes are computed once where that saves 40% of the tokens; "),
        (True, " once; "),
        (False, ""),
    ],
)
def test_block_names_what_shared_prefixes_cost(setting: Any, told: str, model: str, tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path, 1), make_grpo(model, share_prefixes=setting)
    row = describe_model(trainer, module)
    assert told in row and ("shared prefixes" in row) == bool(told)


def test_checkpoints_of_weights_alone_are_a_third(model: str, tmp_path: Path) -> None:
    catch = Catch()
    saver = ModelCheckpoint(tmp_path / "kept", save_weights_only=True, save_top_k=-1)
    fit(tmp_path, model, catch, saver)
    assert f"kept ({4 * NUM_PARAMETERS / 2**20:.1f} MiB each, all are kept; " in catch.rows["writes"]


def test_resumed_run_names_its_checkpoint(model: str, tmp_path: Path) -> None:
    catch, first = Catch(), tmp_path / "kept" / "first.ckpt"
    fit(tmp_path, model, ModelCheckpoint(first.parent, first.stem))
    fit(tmp_path, model, catch, steps=2, ckpt_path=first)
    assert catch.rows["resumes"] == str(first)
    assert catch.rows["writes"] == f"{tmp_path}: no checkpoints"


def test_warnings_that_do_not_apply_are_omitted(model: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, model, ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1), steps=2)
    told = [str(warning.message) for warning in caught]
    wrong = ("manual optimization", "LeafSpec", "across ranks is zero", "eval mode", "many workers")
    assert [message for message in told if any(words in message for words in wrong)] == []


class Service(Logger):
    """A logger that makes a run elsewhere when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_runs = 0

    @property
    def name(self) -> str:
        return "service"

    @property
    def version(self) -> str | None:
        return f"run-{self.num_runs}" if self.num_runs else None

    @property
    @rank_zero_experiment
    def experiment(self) -> object:
        self.num_runs = max(self.num_runs, 1)
        return object()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert self.experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        assert self.experiment


def test_service_gets_a_run_after_the_setup(model: str, tmp_path: Path) -> None:
    service, module = Service(), make_grpo(model)
    trainer = make_trainer(tmp_path, 1, DeviceStatsMonitor(), logger=service)
    with pytest.raises(ConfigError, match="has no column 'promt'"):
        trainer.fit(module, make_data(tmp_path, prompt_column="promt"))
    assert service.num_runs == 0
    assert trainer.loggers == [service]
    trainer.fit(module, make_data(tmp_path))
    assert service.num_runs == 1


def test_checkpoint_folder_is_named_by_the_services_run(model: str, tmp_path: Path) -> None:
    fit(tmp_path, model, ModelCheckpoint(), logger=Service())
    assert (tmp_path / "service" / "run-1" / "checkpoints").is_dir()


def test_tensor_cores_round_float32_in_bfloat16_runs_only() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        use_tensor_cores(torch.device("cuda"), "32-true")
        use_tensor_cores(torch.device("cpu"), "bf16-mixed")
        assert torch.get_float32_matmul_precision() == before == "highest"
        use_tensor_cores(torch.device("cuda"), "bf16-mixed")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
