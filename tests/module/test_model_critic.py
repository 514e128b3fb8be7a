"""A Hugging Face critic as a third trained role: sharded, checkpointed, offloaded, saved and planned by its role."""

import logging
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import RandomSampler
from rank_processes import each_run, finish, start_calls
from small_steps import StepMetrics
from tiny import UseSampler, bare_trainer, make_algorithm, make_data, make_trainer, refused
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import ModernBertConfig, PreTrainedModel

from rlightning.algorithms import GRPO
from rlightning.callbacks import OffloadDuringRollout
from rlightning.hooks import RLCallback
from rlightning.memory_plan import decisions
from rlightning.memory_plan.decisions import read_run
from rlightning.memory_plan.trainer import TrainerMemory
from rlightning.models import load_policy, packed_logprobs
from rlightning.models.layers import Checkpointing, decoder_layers
from rlightning.module.roles import ModelRole
from rlightning.module.start_block import checkpoint_bytes
from rlightning.objectives import ForwardPass, LossComponent
from rlightning.optim.optimizer import AdamWSettings
from rlightning.parallel import FSDP
from rlightning.parallel.sharding import local_tensor
from rlightning.types import RolloutBatch

STEPS = 3


class CriticGRPO(GRPO):
    """By its critic, a token's value is the token's log-probability."""

    critic: PreTrainedModel

    def configure_roles(self) -> dict[str, ModelRole]:
        critic = ModelRole(
            load=partial(self.load_model, self.model_path),
            optimizer=AdamWSettings(lr=0.02, optimizer_states="bfloat16"),
            config=self.model_config,
            gradient_checkpointing=True,
        )
        return super().configure_roles() | {"critic": critic}

    def loss_components(self) -> list[LossComponent]:
        return [*super().loss_components(), LossComponent("value", self.value_loss, weight=0.5)]

    def value_loss(self, forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.rewards is not None
        values, _ = packed_logprobs(self.critic, batch)
        return (values - batch.to_tokens(batch.rewards.float())).square(), {}


class OnCPU(OffloadDuringRollout):
    """Moves tensors that are on the CPU already."""

    device_type = "cpu"


class CriticBytes(RLCallback):
    """Notes the bytes of the critic's weights and moments on this rank, while an engine is awake and in the update."""

    def __init__(self) -> None:
        self.awake: list[list[int]] = []
        self.updating: list[list[int]] = []

    def on_engine_wake(self, trainer: Any, module: Any) -> None:
        self.awake.append(self.held(trainer, module))

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.updating.append(self.held(trainer, module))

    def held(self, trainer: Any, module: Any) -> list[int]:
        weights = list(module.critic.parameters())
        assert trainer.world_size == 1 or all(isinstance(weight, DTensor) for weight in weights)
        states = [trainer.optimizers[1].state.get(weight, {}) for weight in weights]
        moments = [value for state in states for value in state.values() if value.ndim]
        return [sum(local_tensor(part).untyped_storage().nbytes() for part in parts) for parts in (weights, moments)]


def num_checkpointed(policy: PreTrainedModel) -> int:
    return sum(getattr(layer.forward, "func", None) is checkpoint for layer in decoder_layers(policy))


def make(model: str, **kwargs: Any) -> CriticGRPO:
    return make_algorithm(CriticGRPO, model, max_tokens_per_microbatch=23, validate_first=False, **kwargs)


def train(folder: Path, module: CriticGRPO, *callbacks: Any, fit: Any = None, **trainer: Any) -> Any:
    """A run of which the result has the trainer and the metrics of the critic."""
    metrics = StepMetrics()
    made = make_trainer(folder, trainer.pop("steps", STEPS), UseSampler(RandomSampler), metrics, *callbacks, **trainer)
    made.fit(module, make_data(folder), **fit or {})
    names = ("policy/value", "optim/grad_norm", "optim/grad_norm/critic", "optim/lr/critic")
    return made, {name: metrics.column(name) for name in names}


def train_rank(folder: Path, model: str) -> dict[str, Any]:
    """Of one of two ranks: what the critic takes, what is planned of it, and metrics of a whole and a resumed run."""
    found: dict[str, Any] = {}
    resumed = {"ckpt_path": str(folder / "first.ckpt"), "weights_only": False}
    for name, options in each_run({"whole": {}, "first": {"steps": STEPS - 1}, "second": {"fit": resumed}}):
        module, held = make(model), CriticBytes()
        callbacks = [] if name == "first" else [OnCPU(parameters=True), held]
        made, found[name] = train(folder, module, *callbacks, devices=2, strategy=FSDP(), **options)
        if name == "first":
            made.save_checkpoint(folder / "first.ckpt")
        elif name == "whole":
            work = read_run(made, module)
            beside, alone = TrainerMemory(work), TrainerMemory(replace(work, others=()))
            rows = (TrainerMemory.parameters, TrainerMemory.optimizer_state, TrainerMemory.gradients)
            found["checkpointed"] = [num_checkpointed(module.loaded_actor), num_checkpointed(module.critic)]
            found |= {"awake": held.awake, "updating": held.updating}
            found["planned"] = [count(beside) - count(alone) for count in rows]
    return found


@pytest.fixture(scope="module")
def by_rank(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finish(start_calls(train_rank, 2, tmp_path_factory.mktemp("ranks"), model_folder))


@pytest.mark.processes
def test_critic_is_sharded_checkpointed_offloaded_and_planned(by_rank: Any, model_folder: str) -> None:
    for rank in by_rank:
        assert rank["checkpointed"] == [0, 2]  # of the actor's and the critic's two layers
        assert rank["awake"] == [[0, 0]] * STEPS
    weights, state, gradients = by_rank[0]["planned"]  # each row's share rounded up, as the first rank has it
    assert by_rank[0]["updating"] == [[weights, state]] * STEPS
    assert (state, gradients) == (weights, weights)  # two moments of two bytes for four of a weight
    size = 4 * sum(parameter.numel() for parameter in load_policy(model_folder).parameters())
    assert sum(rank["updating"][0][0] for rank in by_rank) == size


@pytest.mark.processes
def test_critic_trains_alike_on_ranks_and_resumes(by_rank: Any, model_folder: str, tmp_path: Path) -> None:
    _, alone = train(tmp_path, make(model_folder))
    for rank in by_rank:
        for name, expected in alone.items():
            assert rank["whole"][name] == pytest.approx(expected, rel=1e-3), name
            assert rank["first"][name] + rank["second"][name] == rank["whole"][name], name


@pytest.mark.parametrize(
    ("setting", "actor_share", "expected"),
    [(False, 1, 0), (True, 0, 2), ("auto", 0, 0), ("auto", Fraction(1, 2), 1), ("auto", Fraction(4, 7), 2)],
)
def test_role_checkpoints_its_share_of_layers(
    setting: Checkpointing, actor_share: Fraction, expected: int, model_folder: str
) -> None:
    policy = load_policy(model_folder)  # of two layers
    whole = nn.ModuleDict({"policy": policy, "value": nn.Linear(4, 1)})
    ModelRole(load=lambda: whole, gradient_checkpointing=setting, network=whole).apply_checkpointing(
        Fraction(actor_share)
    )
    assert num_checkpointed(policy) == expected


def test_checkpointing_a_network_without_layers_is_refused() -> None:
    role = ModelRole(load=nn.Identity, gradient_checkpointing=True, network=nn.Identity())
    with refused("Identity is no Hugging Face model, .* Leave gradient_checkpointing of its ModelRole out"):
        role.apply_checkpointing(Fraction(0))


def test_plan_chooses_checkpointed_share_on_gpu(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = make(model_folder)
    module.trainer, module.roles = bare_trainer(tmp_path, 1), module.configure_roles()
    assert module.checkpointed_share() == 0
    monkeypatch.setattr(type(module.trainer.strategy), "root_device", torch.device("cuda"))
    monkeypatch.setattr(decisions, "decide_checkpointing", lambda *_: (1, "there is room"))
    with caplog.at_level(logging.INFO, "rlightning"):
        assert module.checkpointed_share() == Fraction(1, 2)
    assert caplog.messages[-1] == "Gradient checkpointing of 1 of 2 layers: there is room"
    module.roles["actor"].gradient_checkpointing = True
    assert module.checkpointed_share() == 1


def test_checkpoint_size_includes_critic(model_folder: str) -> None:
    module = make(model_folder)
    module.configure_model()
    size = sum(parameter.numel() for parameter in module.critic.parameters())
    # the actor's moments take 8 bytes a number, the critic's 4
    assert checkpoint_bytes(module, 4, has_state=True) == (4 + 8) * size + (4 + 4) * size
    assert checkpoint_bytes(module, 4, has_state=False) == 8 * size


class ClassifyingCritic(CriticGRPO):
    """Its critic's config is that of an encoder, whose weights the plan cannot count."""

    def configure_roles(self) -> dict[str, ModelRole]:
        roles = super().configure_roles()
        roles["critic"] = replace(roles["critic"], config=ModernBertConfig())
        return roles


def test_a_critic_of_unknown_size_is_not_counted(model_folder: str, tmp_path: Path) -> None:
    module = make_algorithm(ClassifyingCritic, model_folder, max_tokens_per_microbatch=23, validate_first=False)
    made, _ = train(tmp_path, module, steps=1)
    size = sum(parameter.numel() for parameter in module.loaded_actor.parameters())
    assert checkpoint_bytes(module, 4, has_state=False) == 4 * size
    assert [(role.name, role.config) for role in read_run(made, module).others] == [("critic", None)]
