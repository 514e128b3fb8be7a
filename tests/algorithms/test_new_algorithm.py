"""The text of docs/new_algorithm.md, run as it stands."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from programs import run_python
from tiny import make_data, make_trainer, share_of_ones

from rlightning.rewards import RewardFunction
from rlightning.types import RolloutBatch

PAGE = Path(__file__).parents[2] / "docs" / "new_algorithm.md"


def read_block(language: str) -> str:
    """The page's one fenced block of that language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.long
def test_it_is_twenty_lines_and_trains(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = read_block("python")
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_algorithm.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = importlib.import_module("my_algorithm").SquashedRLOO
    rewards = [RewardFunction(share_of_ones)]
    module = algorithm(model_folder, scale=1.5, rewards=rewards, prompts_per_step=8, updates_per_rollout=2, lr=1e-3)
    trained: list[RolloutBatch] = []
    update = module.update

    def watch(batch: RolloutBatch) -> dict[str, float]:
        trained.append(batch)
        metrics: dict[str, float] = update(batch)
        return metrics

    monkeypatch.setattr(module, "update", watch)
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(module, make_data(tmp_path))
    assert trainer.global_step == 2
    assert {"policy/clip_high", "policy/loss"} <= set(trainer.callback_metrics)
    batch = trained[0]
    assert batch.rewards is not None and batch.advantages is not None
    group = batch.rewards[:8].tolist()
    expected = math.tanh(1.5 * (group[0] - sum(group[1:]) / 7))
    torch.testing.assert_close(batch.advantages[0], torch.tensor(expected))


@pytest.mark.processes
def test_its_yaml_is_what_the_command_takes(tmp_path: Path) -> None:
    (tmp_path / "my_algorithm.py").write_text(read_block("python"))
    (tmp_path / "my_run.yaml").write_text(read_block("yaml"))
    options = ("fit", "--config", "my_run.yaml", "--print_config")
    shown = run_python("-m", "rlightning", *options, folder=tmp_path).stdout
    assert "class_path: my_algorithm.SquashedRLOO" in shown
    assert "scale: 1.5" in shown
