"""A checkpoint of another model or class is refused in a line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_data, make_grpo, make_trainer, save_model, share_of_ones

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError
from rlightning.parallel.saved_weights import check_saved_weights


class WithHead(GRPO):
    """Has a parameter more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.value = torch.nn.Linear(4, 1, bias=False)


def headed(model: str) -> GRPO:
    return WithHead(model, rewards=[share_of_ones], prompts_per_step=4, samples_per_prompt=2)


@pytest.fixture(scope="module")
def checkpoints(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoints of a run of one step, without and with the parameter."""
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_tied", "message"),
    [
        (False, r"another model: 'actor\.\S+' and 'actor\.\S+' are one weight there, and two in this module\. Name"),
        (True, r"another model: 'actor\.\S+' and 'actor\.\S+' are two weights there, and one in this module\. Name"),
    ],
)
def test_checkpoint_that_ties_other_weights_is_refused(is_tied: bool, message: str, tmp_path: Path) -> None:
    saved = save_model(tmp_path / "saved", tie_word_embeddings=not is_tied)
    model = save_model(tmp_path / "model", tie_word_embeddings=is_tied)
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_grpo(saved), make_data(tmp_path))
    trainer.save_checkpoint(path := tmp_path / "one.ckpt")
    GRPO.load_from_checkpoint(path)
    with pytest.raises(ConfigError, match=message):
        GRPO.load_from_checkpoint(path, model=model)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, 2).fit(make_grpo(model), make_data(tmp_path), ckpt_path=path, weights_only=False)


@pytest.mark.long
def test_formerly_tied_weights_are_refused_by_optimizer_state(tmp_path: Path) -> None:
    """A tied model that was saved again with a copy of each weight is recognised by its optimizer state alone."""
    saved, untied = (save_model(tmp_path / name, tie_word_embeddings=name == "tied") for name in ("tied", "untied"))
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_grpo(saved), make_data(tmp_path))
    trainer.save_checkpoint(path := tmp_path / "one.ckpt")
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["state_dict"] = {name: weight.clone() for name, weight in checkpoint["state_dict"].items()}
    torch.save(checkpoint, apart := tmp_path / "apart.ckpt")
    GRPO.load_from_checkpoint(apart, model=untied)  # which has no optimizer
    with pytest.raises(ConfigError, match=r"optimizer has groups of \[\d+, \d+\] parameters, and .*: its model tied"):
        make_trainer(tmp_path, 2).fit(make_grpo(untied), make_data(tmp_path), ckpt_path=apart, weights_only=False)


def make_pair(*, is_tied: bool) -> torch.nn.Module:
    """Two parameters that are one, or equal, and two buffers of the same memory, as state dicts keep them."""
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(2, 3))
    module.b = module.a if is_tied else torch.nn.Parameter(torch.ones(2, 3))
    module.register_buffer("c", buffer := torch.zeros(2))
    module.register_buffer("d", buffer)
    return module


def test_ties_are_compared_by_memory_or_values() -> None:
    tied, untied = make_pair(is_tied=True), make_pair(is_tied=False)
    one, two = tied.state_dict(), untied.state_dict()
    check_saved_weights(one, one, tied)
    check_saved_weights(two, one, tied)  # equal, but written apart
    check_saved_weights(two, two | {"d": torch.zeros(2)}, untied)  # as of a module that was moved
    with pytest.raises(ConfigError, match="'a' and 'b' are two weights there, and one in this module"):
        check_saved_weights(two | {"a": torch.zeros(2, 3)}, one, tied)
    with pytest.raises(ConfigError, match="'a' and 'b' are one weight there, and two in this module"):
        check_saved_weights(one, two, untied)


def test_loading_that_is_not_strict_leaves_parameters_out(checkpoints: dict[str, Path]) -> None:
    assert GRPO.load_from_checkpoint(checkpoints["headed"], strict=False) is not None


@pytest.mark.parametrize("saved", [{"actor.weight": torch.ones(1)}, [torch.ones(1)]])
def test_file_that_is_no_checkpoint_is_one_line(saved: object, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.ckpt")
    with pytest.raises(ConfigError, match=r"weights\.ckpt is no checkpoint of a run: it has no 'state_dict'\. Name"):
        GRPO.load_from_checkpoint(tmp_path / "weights.ckpt")
