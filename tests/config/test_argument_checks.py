"""What objects are built with from Python is checked as YAML is: one line, before a model is read."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlightning import Trainer
from rlightning.algorithms import DAPO, GRPO, SFT
from rlightning.callbacks import CompletionsTable, RLProgressBar, VLLMRollout
from rlightning.config.argument_checks import check_value, parameters_of
from rlightning.config.peer_names import CLASSES, PEER_NAMES
from rlightning.data import PromptDataModule
from rlightning.data.validation_sets import ValidationSet
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.models import Adapter
from rlightning.rewards import RewardFunction, exact_match

MODEL = "no/model"
"""Checks come before it is looked for."""


def build_own(**arguments: Any) -> None:
    """A user's class, whose ``**kwargs`` go on to the algorithm."""

    class Own(GRPO):
        def __init__(self, *args: Any, pace: float = 1.0, **kwargs: Any) -> None:
            kwargs.pop("extra", None)
            kwargs.setdefault("lr", 1e-3)
            super().__init__(*args, **kwargs)

    Own(MODEL, **arguments)


@dataclass
class Settings:
    """A dataclass of a user's."""

    size: int = 1


class WithSettings(GRPO):
    def __init__(self, model: str, settings: Settings, other: Settings = Settings(), **kwargs: Any) -> None:  # noqa: B008
        super().__init__(model, **kwargs)
        self.sizes = settings.size, other.size


class SettingsCallback(RLCallback):
    def __init__(self, settings: Settings) -> None:
        self.size = settings.size


class SettingsData(PromptDataModule):
    def __init__(self, settings: Settings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = settings.size


class Scorer(Protocol):
    def score(self, text: str) -> float: ...


class Level(Enum):
    LOW = "low"


class Word(StrEnum):
    TOKEN = "token_mean"


OWN_NAMES = ("depth", "wide")


class ByComputedNames(GRPO):
    def __init__(self, model: str, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("my_")}
        own |= {name: kwargs.pop(name) for name in OWN_NAMES if name in kwargs}
        super().__init__(model, **kwargs)
        self.own = own


@pytest.mark.parametrize(
    ("build", "given", "line"),
    [
        (WithSettings, {"settings": {"size": 2}}, "an instance of Settings. Write Settings(...)."),
        (WithSettings, {"settings": Settings(), "other": 3}, "WithSettings(other=3): it should be an instance of"),
        (SettingsCallback, {"settings": 3}, "SettingsCallback(settings=3): it should be an instance of Settings"),
        (SettingsData, {"settings": 3}, "SettingsData(settings=3): it should be an instance of Settings"),
        (ByComputedNames, {"beta": 0.04}, "ByComputedNames has no argument 'beta'. Did you mean 'kl_coef'?"),
        (ByComputedNames, {"weigt_decay": 0.1}, "ByComputedNames has no argument 'weigt_decay'. Did you mean"),
        (
            GRPO,
            {"epochs": 3},
            "GRPO has no argument 'epochs'. That is trainer.max_epochs here, an argument of Trainer.",
        ),
        (Trainer, {"epochs": 3}, "Trainer has no argument 'epochs'. Did you mean 'max_epochs'?"),
        (Trainer, {"gpus": 3}, "Trainer has no argument 'gpus'. Did you mean 'devices'?"),
        (RewardFunction, {"fn": exact_match}, "RewardFunction has no argument 'fn'. Did you mean 'function'?"),
        (
            RewardFunction,
            {"xyz": 1},
            "Choose from: function, weight, name, arguments",
        ),
        (GRPO, {"lora_alpha": 8}, "GRPO has no argument 'lora_alpha'. That is model.adapter.alpha here."),
        (GRPO, {"lora_dropout": 0.1}, "Adapters are trained without dropout, as policies are. Leave it out."),
        (GRPO, {"learning_rate": 1e-6}, "GRPO has no argument 'learning_rate'. Did you mean 'lr'?"),
        (GRPO, {"num_generations": 8}, "GRPO has no argument 'num_generations'. Did you mean 'samples_per_prompt'?"),
        (GRPO, {"beta": 0.04}, "GRPO has no argument 'beta'. Did you mean 'kl_coef'?"),
        (DAPO, {"clip_ratio_high": 0.28}, "DAPO has no argument 'clip_ratio_high'. Did you mean 'clip_high'?"),
        (
            GRPO,
            {"samples_per_prmpt": 8},
            "GRPO has no argument 'samples_per_prmpt'. Did you mean 'samples_per_prompt'?",
        ),
        (
            GRPO,
            {"max_completion_length": 512},
            "GRPO has no argument 'max_completion_length'. That is rollout.max_new_tokens here, an argument of "
            "VLLMRollout.",
        ),
        (SFT, {"samples_per_prompt": 2}, "SFT has no argument 'samples_per_prompt'."),
        (build_own, {"beta": 0.04}, "Own has no argument 'beta'. Did you mean 'kl_coef'?"),
        (build_own, {"pace": "fast"}, "Own(pace='fast'): it should be a valid number."),
        (GRPO, {"lr": "2e-4"}, "GRPO(lr='2e-4'): it should be a valid number. Write 0.0002, without quotes."),
        (GRPO, {"prompts_per_step": 4.0}, "GRPO(prompts_per_step=4.0): it should be a valid integer. Write 4."),
        (GRPO, {"prompts_per_step": True}, "GRPO(prompts_per_step=True): it should be a valid integer."),
        (GRPO, {"kl_coef": None}, "GRPO(kl_coef=None): it should be a valid number."),
        (
            GRPO,
            {"loss_aggregation": "mean"},
            "GRPO(loss_aggregation='mean'): it should be 'token_mean', 'turn_mean', 'sequence_mean', "
            "'trajectory_mean', 'group_mean' or 'constant'. Did you mean 'turn_mean'?",
        ),
        (GRPO, {"rewards": {"match": exact_match}}, "Write RewardFunction(...)."),
        (GRPO, {"rewards": [{"function": "my.f"}]}, "Write RewardFunction(...)."),
        (
            GRPO,
            {"rewards": 5},
            "GRPO(rewards=5): it should be a list or an instance of RewardFunction or a text or a function",
        ),
        (GRPO, {"rewards": None}, " or a text or a function. Leave it out for its default."),
        (GRPO, {"rewards": json}, " or a text or a function. Give a function of it, such as json."),
        (VLLMRollout, {"engines": "tcp://a:1"}, "Write ['tcp://a:1']."),
        (VLLMRollout, {"max_tokens": 5}, "VLLMRollout has no argument 'max_tokens'. Did you mean 'max_new_tokens'?"),
        (
            CompletionsTable,
            {"every_n_steps": 5.0},
            "CompletionsTable(every_n_steps=5.0): it should be a valid integer.",
        ),
        (RLProgressBar, {"refresh": 5}, "RLProgressBar has no argument 'refresh'. Did you mean 'refresh_rate'?"),
        (PromptDataModule, {"max_prompt_length": 5}, "Did you mean 'max_prompt_tokens'?"),
        (ValidationSet, {"path": "rows.jsonl", "limit": "8"}, "Write 8, without quotes."),
        (RewardFunction, {"function": exact_match, "weigth": 2}, "Did you mean 'weight'?"),
        (Trainer, {"max_step": 3}, "Trainer has no argument 'max_step'. Did you mean 'max_steps'?"),
        (Trainer, {"max_steps": 3.0}, "Trainer(max_steps=3.0): it should be a valid integer. Write 3."),
        (Trainer, {"lr": 3.0}, "Trainer has no argument 'lr'."),
        (Trainer, {"callbacks": [3]}, "Trainer(callbacks=[3]): it should be an instance of Callback."),
        (Trainer, {"rollout": "vllm"}, "Trainer(rollout='vllm'): it should be an instance of Callback or 'auto'."),
    ],
)
def test_wrong_argument_is_one_line(build: Callable[..., Any], given: dict[str, Any], line: str) -> None:
    arguments = (MODEL,) if build in (GRPO, DAPO, SFT, WithSettings, ByComputedNames) else ()
    with pytest.raises(ConfigError) as caught:
        build(*arguments, **given)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_model_object_is_refused_with_the_way_out() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, num_key_value_heads=1, head_dim=8, **sizes))
    with pytest.raises(ConfigError, match=r"^GRPO\(model=Qwen3For.*Give its name or its folder; save_pretrained"):
        GRPO(model)  # type: ignore[arg-type]


def test_what_python_code_writes_is_accepted(model_folder: str) -> None:
    module = GRPO(Path(model_folder), rewards=exact_match, lr=np.float32(0.5), prompts_per_step=np.int64(4), clip_low=1)
    assert (module.model_path, module.reference_path) == (model_folder, model_folder)
    assert [function.name for function in module.rewarder.functions] == ["exact_match"]
    module = GRPO(model_folder, rewards="rlightning.rewards.exact_match", betas=[0.9, 0.95])
    assert [function.name for function in module.rewarder.functions] == ["exact_match"]
    (own,) = GRPO(model_folder, rewards=RewardFunction(exact_match, weight=2, name="right")).rewarder.functions
    assert (own.name, own.weight) == ("right", 2)


def test_objects_of_users_classes_are_accepted(model_folder: str) -> None:
    assert WithSettings(model_folder, Settings(2)).sizes == (2, 1)
    assert SettingsCallback(Settings(3)).size == SettingsCallback(settings=Settings(3)).size == 3
    assert SettingsData(Settings(4), train=[{"prompt": "p"}]).size == 4


def test_own_arguments_by_computed_names_are_accepted(model_folder: str) -> None:
    module = ByComputedNames(model_folder, my_lr=1, my_rewards=2, depth=3, lr=0.5)
    assert module.own == {"my_lr": 1, "my_rewards": 2, "depth": 3} and module.lr == 0.5
    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        ByComputedNames(model_folder, height=4)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.int64(3), int),
        (np.float32(0.5), float),
        (np.bool_(True), bool),
        (torch.tensor(4), int),
        (torch.tensor([4]), torch.Tensor),
        ([np.float32(0.5), 1], list[float]),
        ({"a": (np.int64(1),)}, dict[str, tuple[int, ...]]),
        (np.array([0.5, 1.0]), list[float]),
        (np.array([0.5, 1.0]), tuple[float, float]),
        (np.array([0.5, 1.0]), Sequence[float]),
        (torch.tensor([1, 2]), tuple[int, ...]),
        ([1, 2], tuple[int, int]),
        ((1, 2), list[int]),
        ([[1, 2]], tuple[tuple[int, int], ...]),
        (range(3), list[int]),
        (range(3), tuple[int, ...]),
        (range(3), Sequence[int]),
        ("folder", Path),
        (["folder"], list[Path] | None),
        (Path("folder"), str),
        ([Path("folder")], list[str]),
        ("low", Level),
        (Level.LOW, Level | None),
        (Word.TOKEN, Literal["token_mean", "constant"]),
        (3, Scorer),
        (3, list[Scorer] | None),
        (3, [int]),
    ],
)
def test_other_spellings_of_a_type_pass(value: Any, hint: Any) -> None:
    check_value("It", "value", value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.float32(4.0), int),
        (np.int64(1), bool),
        (torch.tensor([4]), int),
        (["1"], tuple[int, ...]),
        ([1.0], list[int]),
        ("ab", tuple[str, ...]),
        ("high", Level),
        (3, Path),
        (Level.LOW, str),
        (iter([1]), list[int]),
    ],
)
def test_other_types_are_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ConfigError, match=r"^It\(value=.*\): "):
        check_value("It", "value", value, hint)


def test_too_many_by_position_are_told_by_name() -> None:
    line = r"^GRPO takes 1 argument by position, not 2\. Give the others by name, as rewards=\[\.\.\.\]\.$"
    with pytest.raises(ConfigError, match=line):
        GRPO(MODEL, [exact_match])  # type: ignore[call-arg, arg-type]


def test_trainer_has_pythons_numbers() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "rollout": None, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(devices=np.int64(1), max_steps=np.int32(3), **options)
    assert (trainer.num_devices, trainer.max_steps) == (1, 3) and type(trainer.max_steps) is int


@pytest.mark.processes  # jsonargparse asks an interpreter for its path
def test_class_without_source_has_its_names(model_folder: str) -> None:
    scope: dict[str, Any] = {"GRPO": GRPO}  # as in a notebook whose cell is gone
    exec("class Own(GRPO):\n    def __init__(self, model, **kwargs):\n        super().__init__(model, **kwargs)", scope)
    assert scope["Own"](model_folder, lr=0.5).lr == 0.5
    with pytest.raises(ConfigError, match=r"^Own has no argument 'learning_rate'\. Did you mean 'lr'\?$"):
        scope["Own"](model_folder, learning_rate=0.5)


def test_copies_are_not_checked() -> None:
    assert copy.deepcopy(CompletionsTable(7)).every_n_steps == 7
    assert pickle.loads(pickle.dumps(RewardFunction(exact_match, weight=2.0))).weight == 2.0


def test_missing_argument_is_left_to_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        GRPO(rewards=exact_match)  # type: ignore[call-arg]


@pytest.mark.parametrize("hint", [None, "Unknown", torch.Tensor | None, Callable[..., Any], dict[str, Any]])
def test_unchecked_and_fitting_values_pass(hint: Any) -> None:
    values = {str(Callable[..., Any]): print, str(dict[str, Any]): {}}
    check_value("It", "value", values.get(str(hint)), hint)


def test_each_peer_name_leads_to_an_argument() -> None:
    kinds = {"model": GRPO, "data": PromptDataModule, "rollout": VLLMRollout, "trainer": lightning.pytorch.Trainer}
    assert {name: kind.__name__ for name, kind in kinds.items()} == CLASSES
    known = {f"{section}.{name}" for section, kind in kinds.items() for name in parameters_of(kind)}
    known |= {f"model.adapter.{name}" for name in parameters_of(Adapter)}
    assert set(PEER_NAMES.values()) <= known
    own = {name: f"{here.partition('.')[0]}.{name}" for name, here in PEER_NAMES.items()}
    assert all(PEER_NAMES[name] == key for name, key in own.items() if key in known)
