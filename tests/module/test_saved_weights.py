"""A checkpoint of another model or class is refused in a line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_data, make_grpo, make_trainer, save_model

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError


class WithHead(GRPO):
    """Has a parameter more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.value = torch.nn.Linear(4, 1, bias=False)


def headed(model: str) -> GRPO:
    return WithHead(model, rewards="rlightning.rewards.exact_match", prompts_per_step=4, samples_per_prompt=2)


@pytest.fixture(scope="module")
def checkpoints(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a run of a step, without and with the parameter."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths: dict[str, Path] = {}
    for name, module in {"plain": make_grpo(model_folder), "headed": headed(model_folder)}.items():
        trainer = make_trainer(folder, 1)
        trainer.fit(module, make_data(folder))
        trainer.save_checkpoint(paths.setdefault(name, folder / f"{name}.ckpt"))
    return paths


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "is_headed", "sizes", "message"),
    [
        ("headed", False, {}, r"holds 'value\.weight', which this module has no place for"),
        ("plain", True, {}, r"has no 'value\.weight', which this module has: .* SaveHF"),
        (
            "plain",
            False,
            {"hidden_size": 64},
            r"another model: it should hold 'actor\.\S+' of \(.*\), and holds one of ",
        ),
    ],
)
def test_checkpoint_of_others_is_refused(
    saved: str, is_headed: bool, sizes: dict[str, Any], message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    module = (headed if is_headed else make_grpo)(save_model(tmp_path / "model", **sizes))
    resume: dict[str, Any] = {"ckpt_path": str(checkpoints[saved]), "weights_only": False}
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, 2).fit(module, make_data(tmp_path), **resume)


def test_loading_that_is_not_strict_leaves_parameters_out(checkpoints: dict[str, Path]) -> None:
    assert GRPO.load_from_checkpoint(checkpoints["headed"], strict=False) is not None


@pytest.mark.parametrize("saved", [{"actor.weight": torch.ones(1)}, [torch.ones(1)]])
def test_file_that_is_no_checkpoint_is_refused_in_a_line(saved: object, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.ckpt")
    with pytest.raises(ConfigError, match=r"weights\.ckpt is no checkpoint of a run: it has no 'state_dict'\. Name"):
        GRPO.load_from_checkpoint(tmp_path / "weights.ckpt")
