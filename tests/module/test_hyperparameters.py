"""A checkpoint makes its module again, from plain values alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import copy_weights, make_data, make_trainer, save_model, share_of_ones
from torch import nn

from rlightning.algorithms import GRPO, SFT
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.module.hyperparameters import bind_arguments, make_module, to_plain
from rlightning.objectives.corrections import RolloutCorrection
from rlightning.rewards import RewardFunction

PLAIN = (dict, list, tuple, str, int, float, bool, type(None))


async def judge(completion: str, *, api_key: str) -> float:
    return float(len(completion) % 2 + len(api_key))


class Own(GRPO):
    """Passes on what it gets, and saves it in Lightning's way too."""

    def __init__(self, *args: Any, width: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters()
        self.value = nn.Linear(width, 1)


class Taking(GRPO):
    """Takes arguments that are in no signature, and saves more than it takes."""

    def __init__(self, model: str, depth: int, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("my_")}
        extra = kwargs.pop("extra", 1)
        super().__init__(model, **kwargs)
        self.depth, self.extra, self.own = depth, extra, own
        self.hparams["note"] = "mine"


class Forwarding(Taking):
    """Has all of its base's arguments, by position too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def save(module: RLModule, folder: Path) -> Path:
    """The checkpoint of a run of one step."""
    trainer = make_trainer(folder, 1)
    trainer.fit(module, make_data(folder))
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


def assert_plain(value: Any) -> None:
    assert type(value) in PLAIN, value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        assert_plain(inner)


@pytest.mark.processes
def test_load_from_checkpoint_needs_no_arguments(model: str, tmp_path: Path) -> None:
    rewards = [RewardFunction(share_again, weight=2.0, name="ones"), "test_hyperparameters.share_again"]
    module = Own(
        model,
        width=3,
        rewards=rewards,
        prompts_per_step=4,
        samples_per_prompt=2,
        lr=1e-3,
        betas=(0.8, 0.9),
        rollout_correction=RolloutCorrection(kind="mask"),
    )
    path = save(module, tmp_path)
    assert_plain(torch.load(path)["hyper_parameters"])
    loaded = Own.load_from_checkpoint(path)
    for name, weight in copy_weights(module).items():
        assert torch.equal(copy_weights(loaded)[name], weight)
    assert torch.equal(loaded.value.weight, module.value.weight)
    assert loaded.weight_version == 1 and loaded.betas == (0.8, 0.9) and loaded.samples_per_prompt == 2
    assert loaded.rollout_correction == RolloutCorrection(kind="mask")
    assert [(f.name, f.weight) for f in loaded.rewarder.functions] == [("ones", 2.0), ("share_again", 1.0)]
    other = Own.load_from_checkpoint(path, lr=0.5, rewards=[share_of_ones])
    assert other.lr == 0.5 and [f.name for f in other.rewarder.functions] == ["share_of_ones"]
    again = make_trainer(tmp_path, 2)
    again.fit(loaded, make_data(tmp_path), ckpt_path=str(path))
    assert loaded.weight_version == 2


@pytest.mark.long
def test_arguments_without_plain_value_are_warned_of(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = GRPO(model, rewards=lambda completion: 1.0, prompts_per_step=4, samples_per_prompt=2)
    module.configure_model()
    module.trainer = make_trainer(tmp_path, 1)
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2"}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "one.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "one.ckpt")
    assert not loaded.rewarder.functions
    (line,) = [record.getMessage() for record in caplog.records if "does not hold" in record.getMessage()]
    assert line == (
        f"The checkpoint {tmp_path / 'one.ckpt'} does not hold rewards, which has no plain value: GRPO has its "
        "default. Give it as GRPO.load_from_checkpoint(..., rewards=...)."
    )
    caplog.clear()
    GRPO.load_from_checkpoint(tmp_path / "one.ckpt", rewards=[share_of_ones])
    assert "does not hold" not in caplog.text


@pytest.mark.long
def test_arguments_of_no_signature_are_restored(model: str, tmp_path: Path) -> None:
    given = {"extra": 5, "my_width": 7, "lr": np.float32(0.5), "betas": np.array([0.5, 0.75])}
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2}
    path = save(Forwarding(model, np.int64(3), rewards=[share_of_ones], **sizes, **given), tmp_path)
    saved = torch.load(path)["hyper_parameters"]
    assert_plain(saved)
    assert (saved["depth"], saved["betas"], saved["note"]) == (3, [0.5, 0.75], "mine")
    loaded = Forwarding.load_from_checkpoint(path)
    assert (loaded.depth, loaded.extra, loaded.own, loaded.lr) == (3, 5, {"my_width": 7}, 0.5)


async def share_again(completion: str) -> float:
    return await share_of_ones(completion)


@pytest.mark.long
def test_secrets_of_arguments_are_in_no_checkpoint(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [RewardFunction(judge, arguments={"api_key": "sk-abcdef"})]
    path = save(GRPO(model, rewards=rewards, prompts_per_step=4, samples_per_prompt=2), tmp_path)
    assert b"sk-abcdef" not in path.read_bytes()
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable API_KEY is not set"):
        GRPO.load_from_checkpoint(path)
    monkeypatch.setenv("API_KEY", "sk-other")
    assert GRPO.load_from_checkpoint(path).rewarder.functions[0].arguments == {"api_key": "sk-other"}


@pytest.mark.long
def test_sft_is_made_again(model: str, tmp_path: Path) -> None:
    module = SFT(model, completion_column="answer", prompts_per_step=4)
    loaded = SFT.load_from_checkpoint(save(module, tmp_path))
    assert loaded.completion_column == "answer" and loaded.samples_per_prompt == 1


@dataclass
class Place:
    """An argument of a user's."""

    folder: Path
    sizes: tuple[int, ...] = (1, 2)


def count_words(completion: str) -> float:
    """A reward that other processes can import."""
    return float(len(completion.split()))


def test_objects_are_left_out() -> None:
    @dataclass
    class Local:
        number: int = 0

    given = {"a": Place(Path("x")), "b": nn.Linear(1, 1), "c": Local(), "d": {"e": [None, True]}, "f": torch.ones(1)}
    place = {"class_path": "test_hyperparameters.Place", "init_args": {"folder": "x", "sizes": (1, 2)}}
    assert to_plain(given) == {"a": place, "d": {"e": [None, True]}}
    path = "test_hyperparameters.count_words"
    for reward, expected in (
        (count_words, path),
        ([count_words, "a.b"], [path, "a.b"]),
        ([lambda completion: 1.0], None),
        ([RewardFunction(lambda completion: 1.0, name="x")], None),
    ):
        assert to_plain({"rewards": reward, "lr": 1.0}) == ({} if expected is None else {"rewards": expected}) | {
            "lr": 1.0
        }


def test_missing_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.ckpt does not hold width of Own\. Give .*\(\.\.\., width=\.\.\.\)"):
        make_module(Own, {"model": "m"}, {}, "x.ckpt")
    with pytest.raises(ConfigError, match=r"The checkpoint names no\.such\.Thing, which is no dataclass"):
        make_module(GRPO, {"model": {"class_path": "no.such.Thing", "init_args": {}}}, {}, "x.ckpt")
    with pytest.raises(ConfigError, match=r"^x\.ckpt does not hold depth of Forwarding\. Give"):
        make_module(Forwarding, {"model": "m"}, {}, "x.ckpt")
    assert bind_arguments(Forwarding, ("m", 3), {"extra": 2}) == {"model": "m", "depth": 3, "extra": 2}
    assert bind_arguments(Own, ("m",), {"width": 2, "lr": 3.0}) == {"model": "m", "width": 2, "lr": 3.0}
