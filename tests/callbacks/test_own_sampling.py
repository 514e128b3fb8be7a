"""Prompts with a temperature and a limit of their own: the trainer computes with the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_run import Witness, make_module, make_rollout, make_trainer
from tiny import make_algorithm
from tiny import make_trainer as make_tiny_trainer

from rlightning.algorithms import GRPO, SFT
from rlightning.callbacks import TransformersRollout
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError

HEATS = (0.5, 2.0, None, 1.25)
LIMITS = (1, 3, None, 8)


def write_prompts(folder: Path) -> str:
    """Eight sums; each fourth has the same temperature and limit."""
    rows = [{"prompt": f"{i}+1=", "heat": HEATS[i % 4], "limit": LIMITS[i % 4]} for i in range(8)]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make_data(path: str, **kwargs: Any) -> PromptDataModule:
    columns = {"temperature_column": "heat", "max_new_tokens_column": "limit"}
    return PromptDataModule(path, max_prompt_tokens=16, shuffle=False, **columns | kwargs)


@pytest.fixture(scope="module")
def seen(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> Witness:
    """A run of two steps, of two updates each, with a validation set."""
    folder = tmp_path_factory.mktemp("run")
    path = write_prompts(folder)
    witness = Witness()
    sizes: dict[str, Any] = {"samples_per_prompt": 4, "updates_per_rollout": 2}
    module = make_algorithm(GRPO, engine_model, **sizes)
    trainer = make_trainer(folder, 2, TransformersRollout(temperature=0.8, max_new_tokens=8, seed=0), witness)
    trainer.fit(module, make_data(path, validation=path))
    return witness


def test_completions_stop_at_the_prompts_own_limit(seen: Witness) -> None:
    longest: dict[int, int] = {}
    for batch in seen.batches:
        for prompt, length in zip(batch.prompts, batch.completion_lengths.tolist(), strict=True):
            longest[prompt.index] = max(length, longest.get(prompt.index, 0))
            assert length <= (LIMITS[prompt.index % 4] or 8)
    assert longest[0] == longest[4] == 1 and longest[1] == 3 and max(longest[2], longest[6]) > 3


def test_trainer_computes_at_the_prompts_own_temperature(seen: Witness) -> None:
    """Of logits that are spread as this model's, another temperature would be off by tenths of a nat."""
    assert len(seen.steps) == 2
    for metrics in seen.steps:
        assert metrics["policy/rollout_gap_max"] < 1e-5


@pytest.mark.long
def test_single_update_computes_at_the_same_temperatures(engine_model: str, tmp_path: Path) -> None:
    witness = Witness()
    module = make_module(engine_model, kl_coef=0.1, lr=1e-3)
    make_tiny_trainer(tmp_path, 1, witness).fit(module, make_data(write_prompts(tmp_path)))
    (metrics,) = witness.steps
    assert metrics["policy/rollout_gap_max"] < 1e-4
    assert metrics["policy/kl"] == pytest.approx(0, abs=1e-6)  # of a reference at the same temperatures


def test_validation_is_sampled_at_its_sets_temperature(seen: Witness) -> None:
    assert len(seen.validations) >= 1
    first = seen.validations[0][1]
    assert 1 <= first["val/prompts/length"] <= (1 + 3 + 8 + 8) / 4  # limits hold there too


def test_limit_beyond_the_runs_is_refused_early(engine_model: str, tmp_path: Path) -> None:
    rollout = make_rollout(max_new_tokens=6)
    trainer = make_trainer(tmp_path, 1, rollout)
    with pytest.raises(ConfigError, match=r"own max_new_tokens=8 is above rollout\.max_new_tokens=6, which bounds all"):
        trainer.fit(make_module(engine_model), make_data(write_prompts(tmp_path)))
    assert rollout.engine is None


def test_sft_refuses_columns_of_sampling(engine_model: str, tmp_path: Path) -> None:
    module = SFT(engine_model, completion_column="prompt", prompts_per_step=4)
    with pytest.raises(ConfigError, match=r"data\.temperature_column has no effect: SFT samples nothing\. Remove it"):
        make_tiny_trainer(tmp_path, 1).fit(module, make_data(write_prompts(tmp_path)))
