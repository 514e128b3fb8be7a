"""Arguments of VLLMRollout: how they are resolved, and which are refused before an engine starts."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_run import make_data, make_module, make_rollout, make_trainer
from tiny import make_algorithm
from tiny_models import save_tiny

from rlightning.algorithms import GRPO
from rlightning.callbacks import VLLMRollout
from rlightning.data import ValidationSet
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.rollout.engine import Engine


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: Engine) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(Engine, "start", fail)


def check_refused(message: str, module: RLModule, folder: Path, validation: Any = None, **rollout: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_trainer(folder, 1, make_rollout(**rollout)).fit(module, make_data(folder, validation=validation))
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": {"max_num_seq": 4}}, r"rollout\.engine\.max_num_seq is not .* Did you mean 'max_num_seqs'\?"),
        ({"engine": {"dtype": "float16"}}, r"rollout\.engine\.dtype cannot be set: use rollout\.dtype"),
        ({"temperature": 0}, r"rollout\.temperature=0 makes all samples of a prompt alike"),
        ({"max_new_tokens": 250}, r"250.*256"),
        ({"engine": {"max_model_len": 23}}, r"max_model_len=23 must be from 33 \(what verifies the weights\)"),
        ({"engine": {"quantization": "fp8"}}, r"rollout\.engine\.quantization cannot be set: all weights come from"),
        ({"stop_token_ids": [14]}, r"rollout\.stop_token_ids=\[14\] must be below 14"),
        ({"hang_timeout": 1}, r"rollout\.hang_timeout=1 must be at least 5 s"),
    ],
)
def test_engine_argument_is_refused(rollout: dict[str, Any], message: str, engine_model: str, tmp_path: Path) -> None:
    check_refused(message, make_module(engine_model), tmp_path, **rollout)


def test_longrope_beyond_its_original_length_is_refused(engine_model: str, tmp_path: Path) -> None:
    shutil.copytree(engine_model, tmp_path / "model")
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = save_tiny("phi3", tmp_path / "model", rope_scaling=scaling, original_max_position_embeddings=20)
    message = r"= 21 tokens, but the model's positions end at 20: beyond, its longrope frequencies are"
    check_refused(message, make_module(folder), tmp_path, max_new_tokens=5)


def test_validation_temperature_vllm_alters_is_refused(engine_model: str, tmp_path: Path) -> None:
    sums = ValidationSet(str(tmp_path / "sums.jsonl"), temperature=0.005)
    message = r"^Validation set 'sums': temperature=0\.005 must be 0"
    check_refused(message, make_module(engine_model), tmp_path, {"sums": sums})


def test_a_sequence_must_fit_a_microbatch(engine_model: str, tmp_path: Path) -> None:
    module = make_module(engine_model, max_tokens_per_microbatch=20)
    check_refused(r"max_tokens_per_microbatch=20", module, tmp_path)


def test_vllm_must_be_installed(engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    check_refused(r"vLLM is not installed.*pip install 'rlightning\[vllm\]'", make_module(engine_model), tmp_path)


class NoOptimizer(GRPO):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def test_optimizers_are_refused_before_the_engine_starts(engine_model: str, tmp_path: Path) -> None:
    message = "configure_optimizers returns a dictionary without the key 'optimizer'"
    check_refused(message, make_algorithm(NoOptimizer, engine_model), tmp_path)


def started_with(rollout: VLLMRollout, engine_model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that an engine would have been started with."""
    monkeypatch.setattr(Engine, "start", lambda engine: None)
    trainer = make_trainer(folder, 1, rollout)
    for method in ("generate", "collect_trajectories"):
        monkeypatch.setattr(rollout, method, lambda *_: (_ for _ in ()).throw(KeyError("far enough")))
    engines: list[Engine] = []
    monkeypatch.setattr(Engine, "close", lambda engine: engines.append(engine))
    with pytest.raises(KeyError, match="far enough"):
        trainer.fit(make_module(engine_model), make_data(folder))
    return engines[0].config


def test_engine_arguments_pass_through(engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = make_rollout(engine={"max_num_seqs": 3, "enable_prefix_caching": False})
    config = started_with(rollout, engine_model, tmp_path, monkeypatch)
    assert config.engine_args["max_num_seqs"] == 3
    assert config.engine_args["enable_prefix_caching"] is False
    assert config.engine_args["max_model_len"] == 33  # 16 + 8 would do, but for the canary
    assert config.dtype == torch.float32 and not config.can_sleep


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 500}])
def test_truncated_engine_returns_supports(
    truncation: dict[str, Any], engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = started_with(make_rollout(**truncation), engine_model, tmp_path, monkeypatch)
    assert config.engine_args["max_logprobs"] == 129


@pytest.mark.parametrize("oversample", [0.0, 0.25])
def test_oversampling_is_said_to_be_biased(
    oversample: float,
    engine_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "rlightning"):
        started_with(make_rollout(oversample=oversample), engine_model, tmp_path, monkeypatch)
    line = (
        "rollout.oversample=0.25: steps train on the trajectories that are complete first, which is biased toward short"
    )
    assert caplog.text.count(line) == bool(oversample)


def test_a_single_stop_string_is_not_taken_apart() -> None:
    assert VLLMRollout(stop="###").sampling.stop == ("###",)
    assert VLLMRollout(stop=["a", "b"]).sampling.stop == ("a", "b")


def test_run_seed_reaches_requests_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert VLLMRollout().seeded_sampling(cpu).seed is None
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert [VLLMRollout().seeded_sampling(device).seed for device in (cpu, gpu)] == [7, None]
    assert VLLMRollout(seed=3).seeded_sampling(cpu).seed == 3
