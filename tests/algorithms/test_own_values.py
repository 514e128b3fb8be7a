"""The classes of docs/own_values.md, run as they stand."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import StepMetrics
from tiny import make_algorithm, make_trainer

from rlightning.data import PromptDataModule
from rlightning.rewards import RewardFunction

PAGE = Path(__file__).parents[2] / "docs" / "own_values.md"


class Steps(StepMetrics):
    """Notes the value of a reward function for each completion that is trained on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[list[float]] = []
        self.expected: list[list[float]] = []

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.lengths.append(batch.scores["num_characters"].tolist())
        self.expected.append([float(len(completion.text)) for completion in batch.completions])


async def num_characters(completion: str) -> float:
    return float(len(completion))


async def is_odd(completion: str) -> float:
    return float(len(completion) % 2)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("own")
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (folder / "my_values.py").write_text("\n\n".join(code))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module("my_values")


def fit(algorithm: Any, model: str, folder: Path, steps: int = 2) -> tuple[Any, Steps]:
    rows = [{"prompt": f"{i}+1=", "weight": float(i)} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = [RewardFunction(is_odd), RewardFunction(num_characters, weight=0.0)]
    module = make_algorithm(algorithm, model, rewards=rewards, updates_per_rollout=2, max_tokens_per_microbatch=24)
    seen = Steps()
    data = PromptDataModule(str(folder / "rows.jsonl"), max_prompt_tokens=16, shuffle=False)
    make_trainer(folder, steps, seen).fit(module, data)
    return module, seen


@pytest.mark.long
def test_value_of_each_sequence_reaches_the_loss(classes: Any, model_folder: str, tmp_path: Path) -> None:
    _, seen = fit(classes.WeightedGRPO, model_folder, tmp_path)
    # Four prompts a step, each with two completions: 2 x (0 + 1 + 2 + 3), then 2 x (4 + 5 + 6 + 7).
    assert seen.column("data/weight") == [12, 44]
    for low, metrics in zip((0, 4), seen.metrics, strict=True):
        assert low <= metrics["policy/weight"] <= low + 3
    assert seen.lengths == seen.expected
    for metrics, lengths in zip(seen.metrics, seen.expected, strict=True):
        assert metrics["reward/num_characters"] == pytest.approx(sum(lengths) / 8)


@pytest.mark.long
def test_model_beside_the_actor_is_trained(classes: Any, model_folder: str, tmp_path: Path) -> None:
    module, seen = fit(classes.CriticGRPO, model_folder, tmp_path)
    for metrics in seen.metrics:
        assert metrics["policy/value"] > 0 and metrics["optim/grad_norm/critic"] > 0
        assert metrics["optim/lr/critic"] == pytest.approx(0.01)
    assert "critic.value.weight" in module.state_dict()


@pytest.mark.long
def test_language_model_beside_the_actor_is_trained(classes: Any, model_folder: str, tmp_path: Path) -> None:
    module, seen = fit(classes.ModelCriticGRPO, model_folder, tmp_path)
    for metrics in seen.metrics:
        assert metrics["policy/value"] > 0 and metrics["optim/grad_norm/critic"] > 0
    assert "critic.model.norm.weight" in module.state_dict()


@pytest.mark.long
def test_head_beside_actor_has_own_settings(classes: Any, model_folder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, seen = fit(classes.TunedGRPO, model_folder, tmp_path, steps=1)
    torch.manual_seed(0)
    start = make_algorithm(classes.TunedGRPO, model_folder).value
    # AdamW's first two steps of lr 0.01, against gradients of one sign
    moved = (module.value.weight - start.weight).abs()
    assert ((moved > 0.01) & (moved < 0.021)).all()
    assert (seen.metrics[0]["optim/lr"], seen.metrics[0]["optim/lr/value"]) == pytest.approx((1e-3, 0.01))
