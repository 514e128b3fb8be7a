"""A third trained role, and parameters of a subclass's own: trained, clipped, equal on all ranks, saved and resumed."""

import logging
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import RandomSampler
from lightning.pytorch import Callback
from rank_processes import each_run, finish, start_calls
from small_steps import StepMetrics
from tiny import VOCABULARY, UseSampler, make_algorithm, make_data, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError
from rlightning.module.roles import ModelRole
from rlightning.objectives import ForwardPass, LossComponent
from rlightning.optim.optimizer import AdamWSettings, global_norm
from rlightning.parallel import DDP, FSDP
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.types import RolloutBatch, axis

LR, CRITIC_LR = 0.01, 0.02
CRITIC_NORM = 1e-3
STEPS = 3
NORM = "optim/grad_norm"


@dataclass(slots=True)
class IndexedBatch(RolloutBatch):
    index: Tensor | None = field(default=None, metadata=axis("M"))


class ValueHead(GRPO):
    """Its loss is a token's value: the gradient of each of five numbers is 1, and the actor has none."""

    batch_type = IndexedBatch

    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.value = nn.Linear(4, 1)

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        assert isinstance(batch, IndexedBatch)
        batch.index = torch.tensor([prompt.index for prompt in batch.prompts])
        return super().compute_rewards(batch)

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.is_sampled.any():
            assert isinstance(batch, IndexedBatch) and batch.index is not None
            assert batch.index.tolist() == [prompt.index for prompt in batch.prompts]
        return logprobs * 0 + self.value(logprobs.new_ones(4)), {}


class LateHead(ValueHead):
    """Makes a further head when it is first needed, after the optimizers."""

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 1)
        return super().policy_loss(logprobs, batch)[0] + self.late(logprobs.new_ones(4)), {}


class SquaredHead(GRPO):
    """A scaled head beside GRPO's own loss: its gradients change from step to step."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.value = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = super().policy_loss(logprobs, batch)
        return losses + (self.scale * self.value(logprobs.new_ones(4))).square(), metrics


class Critic(nn.Module):
    """A value for each token, of the token alone; each rank draws weights of its own at first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(int(os.environ.get("RANK", "0")))
            self.embedding = nn.Embedding(len(VOCABULARY), 4)
            self.value = nn.Linear(4, 1)

    def forward(self, token_ids: Tensor) -> Tensor:
        values: Tensor = self.value(self.embedding(token_ids))[:, 0]
        return values


class CriticGRPO(SquaredHead):
    """Trains a critic beside the actor, a frozen reference and the head."""

    critic: Critic

    def configure_roles(self) -> dict[str, ModelRole]:
        settings = AdamWSettings(lr=CRITIC_LR, max_grad_norm=CRITIC_NORM, warmup_steps=2)
        return super().configure_roles() | {"critic": ModelRole(load=Critic, optimizer=settings)}

    def loss_components(self) -> list[LossComponent]:
        value = LossComponent("value", self.value_loss, weight=0.5, denominator="sequence_mean")
        return [*super().loss_components(), value]

    def value_loss(self, forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.rewards is not None
        values = self.critic(batch.token_ids)
        return (values - batch.to_tokens(batch.rewards.float())).square(), {"value_mean": values.detach()}


def own(module: GRPO) -> dict[str, list[Any]]:
    """The full values of the parameters beside the actor; all ranks call it."""
    found = {name: p.detach() for name, p in module.named_parameters() if not name.startswith("actor.")}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).tolist() for name, p in found.items()}


def check_shards(module: GRPO, trainer: Any) -> None:
    """Of what FSDP shards, weights and moments, a rank holds its part alone; a number of the module's own is whole."""
    held = {name: p for name, p in module.named_parameters() if not name.startswith("actor.")}
    sharded = {name for name, p in held.items() if isinstance(p, DTensor)}
    assert sharded == ({*held} - {"scale"} if isinstance(trainer.strategy, FSDP) else set())
    states = {p: state for optimizer in trainer.optimizers for p, state in optimizer.state.items()}
    for name in sharded:
        for part in (held[name], *(states[held[name]][moment] for moment in ("exp_avg", "exp_avg_sq"))):
            rows = part.shape[0]
            assert part.to_local().shape[0] == (rows // 2 if trainer.global_rank else -(-rows // 2))


def make(algorithm: str, model: str, **kwargs: Any) -> Any:
    usual = {"max_tokens_per_microbatch": 23, "max_grad_norm": math.inf, "samples_per_prompt": 4}
    arguments = usual | kwargs
    return make_algorithm(globals()[algorithm], model, lr=LR, validate_first=False, **arguments)


def run(folder: Path, module: GRPO, *callbacks: Callback, steps: int = STEPS, fit: Any = None, **trainer: Any) -> Any:
    made = make_trainer(folder, steps, UseSampler(RandomSampler), *callbacks, **trainer)
    made.fit(module, make_data(folder), **fit or {})
    return made


def check_trained(start: dict[str, Any], end: dict[str, Any], norms: list[float]) -> None:
    """AdamW moves a number by lr a step, against a gradient that does not change."""
    for name, value in start.items():
        expected = torch.tensor(value) - STEPS * LR
        torch.testing.assert_close(torch.tensor(end[name]), expected, atol=1e-6, rtol=0)
    assert norms == pytest.approx([math.sqrt(5)] * STEPS)


@pytest.mark.long
def test_own_parameters_are_trained_and_counted_in_norm(model_folder: str, tmp_path: Path) -> None:
    module, norms = make("ValueHead", model_folder), StepMetrics()
    start = own(module)
    trainer = run(tmp_path, module, norms)
    check_trained(start, own(module), norms.column(NORM))
    sizes = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    # Two layers of seven matrices and four norms, one embedding and the last norm; then the head's weight and its bias.
    assert sizes == [15, 9, 1, 1]


@pytest.mark.long
def test_late_parameter_is_named_once_and_not_counted(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, norms = make("LateHead", model_folder), StepMetrics()
    start = own(module)
    with caplog.at_level(logging.WARNING, "rlightning"):
        run(tmp_path, module, norms)
    lines = [record.getMessage() for record in caplog.records if "no optimizer" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(
        "2 parameters have a gradient and no optimizer, and stay as they are, such as late.weigh"
    )
    check_trained(start, {name: value for name, value in own(module).items() if name in start}, norms.column(NORM))


def ranks(kind: str | None) -> dict[str, Any]:
    """Arguments of a Trainer: of one process, or of two ranks."""
    strategies: dict[str, Any] = {"fsdp": FSDP, "ddp": DDP}
    return {"plugins": [AtomicCheckpointIO()]} if kind is None else {"devices": 2, "strategy": strategies[kind]()}


def train_runs(
    folder: Path, model: str, seed: int = 0, kind: str | None = None, *, begins: bool = True, **kept: Path
) -> dict[str, Any]:
    """A whole run, and some that go on after the second of three steps; of each what it and its optimizer hold.

    Args:
        folder: gets ``first.ckpt``, from which the run ``second`` goes on.
        model: a folder.
        seed: what is beside the actor begins with.
        kind: of two ranks, or None.
        begins: whether there are the whole run, ``first`` and ``second``, too.
        kept: checkpoints to go on from, by the name of the run.
    """
    results = {}
    runs: dict[str, dict[str, Any]] = {"whole": {}, "first": {"steps": STEPS - 1}} if begins else {}
    kept = ({"second": folder / "first.ckpt"} if begins else {}) | kept
    for name, options in each_run(runs | {name: {} for name in kept}):
        (folder / name).mkdir(exist_ok=True)
        torch.manual_seed(seed)
        module = make("CriticGRPO", model)
        fit = {"ckpt_path": str(kept[name]), "weights_only": False} if name in kept else {}
        made = run(folder / name, module, fit=fit, **options, **ranks(kind))
        if kind is not None:
            check_shards(module, made)
        if name == "first":
            made.save_checkpoint(folder / "first.ckpt")
        states = [state for optimizer in made.optimizers for state in optimizer.state.values()]
        state = [state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")]
        whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in state]
        results[name] = [own(module), [part.tolist() for part in whole]]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``one`` has the checkpoint of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "one").mkdir()
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, model_folder: str) -> dict[str, Any]:
    """One process."""
    return train_runs(folder / "one", model_folder)


@pytest.mark.long
def test_own_parameters_resume_to_the_same_bits(model_folder: str, alone: dict[str, Any]) -> None:
    whole = alone["whole"]
    assert alone["second"] == whole
    torch.manual_seed(0)
    start = make("CriticGRPO", model_folder)
    start.configure_model()
    critic = {"critic.embedding.weight", "critic.value.weight", "critic.value.bias"}
    assert set(own(start)) == {"scale", "value.weight", "value.bias"} | critic
    assert all(whole[0][name] != value for name, value in own(start).items())


def without_actor(module: GRPO) -> dict[str, Any]:
    return {"critic": ModelRole(load=Critic, optimizer=AdamWSettings())}


def network_as_role(module: GRPO) -> dict[str, Any]:
    return GRPO.configure_roles(module) | {"critic": Critic()}


def role_named_as_method(module: GRPO) -> dict[str, Any]:
    return GRPO.configure_roles(module) | {"reward": ModelRole(load=Critic, optimizer=AdamWSettings())}


def role_named_as_attribute(module: GRPO) -> dict[str, Any]:
    return GRPO.configure_roles(module) | {"plan": ModelRole(load=Critic, optimizer=AdamWSettings())}


def none_at_all(module: GRPO) -> None:
    GRPO.configure_roles(module)


@pytest.mark.parametrize(
    ("make_roles", "reason"),
    [
        (none_at_all, r"Odd\.configure_roles\(\) returns no role 'actor'"),
        (role_named_as_attribute, "Odd has an attribute 'plan', .* such as plan_model"),
        (without_actor, r"Odd\.configure_roles\(\) returns no role 'actor'.*super\(\)"),
        (network_as_role, "returns a Critic for 'critic', not a ModelRole"),
        (role_named_as_method, "Odd has an attribute 'reward', .* Give the role another name, such as reward_model"),
    ],
)
def test_roles_that_cannot_be_are_refused_before_loading(
    make_roles: Any, reason: str, model_folder: str, tmp_path: Path
) -> None:
    kind = type("Odd", (GRPO,), {"configure_roles": make_roles, "load_actor": lambda self: pytest.fail("it loads")})
    with pytest.raises(ConfigError, match=reason):
        run(tmp_path, make_algorithm(kind, model_folder, lr=LR))


def test_components_of_one_name_are_refused_before_rollout(model_folder: str, tmp_path: Path) -> None:
    class Twice(GRPO):
        def loss_components(self) -> list[LossComponent]:
            return [*super().loss_components(), LossComponent("entropy", lambda forward, batch: (forward.entropy, {}))]

        def rollout(self, *_: Any) -> Any:
            pytest.fail("it samples")

    with pytest.raises(ConfigError, match=r"^loss_components\(\) returns 2 components named 'entropy'\."):
        run(tmp_path, make_algorithm(Twice, model_folder, lr=LR))


def test_overrides_of_former_methods_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "rlightning"):
        type("Old", (GRPO,), {"aggregate": lambda self, losses, batch: losses.mean()})
    assert "Old defines aggregate(), which rlightning called in a former version and no longer does" in caplog.text


class ClippedNorms(StepMetrics):
    """Notes the norm of the gradients that each optimizer steps on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.clipped: dict[int, list[float]] = {}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        for number, optimizer in enumerate(trainer.optimizers):
            self.clipped[number] = []
            optimizer.register_step_pre_hook(partial(self.note, number))

    def note(self, number: int, optimizer: Any, *_: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.clipped[number].append(global_norm(gradients).item())


@pytest.mark.long
def test_third_role_has_own_optimizer_norm_and_loss(model_folder: str, tmp_path: Path) -> None:
    module, norms = make("CriticGRPO", model_folder, kl_coef=0.1), ClippedNorms()
    trainer = run(tmp_path, module, norms)
    assert trainer.global_step == module.weight_version == STEPS
    assert [len(group["params"]) for group in trainer.optimizers[1].param_groups] == [2, 1]
    assert norms.clipped[1] == pytest.approx([CRITIC_NORM] * STEPS, rel=1e-2)  # 1e-6 in the divisor
    assert norms.clipped[0] == pytest.approx(norms.column(NORM))
    assert all(norm > CRITIC_NORM for norm in norms.column(f"{NORM}/critic"))
    assert norms.column("optim/lr/critic") == pytest.approx([0.01, 0.02, 0.02])
    assert norms.column("optim/lr") == pytest.approx([LR] * STEPS)
    assert {"policy/value", "policy/value_mean", "policy/kl"} <= set(norms.metrics[0])
    names = set(module.state_dict())
    assert {"critic.value.weight", "value.weight", "actor.model.norm.weight"} <= names
    assert not [name for name in names if "reference" in name]


def train_rank(folder: Path, model: str, kind: str, checkpoint: Path) -> dict[str, Any]:
    """Train on this rank, whose head starts with its own weights; return the results of a whole and of resumed runs."""
    rank = int(os.environ["RANK"])
    for _ in each_run({"trained": {}}):
        torch.manual_seed(rank)
        module, norms = make("ValueHead", model), StepMetrics()
        start = own(module)
        run(folder, module, norms, **ranks(kind))
        end = own(module)
    runs = train_runs(folder, model, rank, kind, of_one=checkpoint)
    return {"start": start, "end": end, "norms": norms.column(NORM), "runs": runs}


def check_close(found: list[Any], expected: list[Any]) -> None:
    for name, value in expected[0].items():
        torch.testing.assert_close(torch.tensor(found[0][name]), torch.tensor(value), atol=1e-5, rtol=0)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_own_parameters_on_two_ranks(
    kind: str, model_folder: str, folder: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = folder / "one" / "first.ckpt"
    first, second = finish(start_calls(train_rank, 2, tmp_path, model_folder, kind, checkpoint))
    assert first["start"] != second["start"]
    for rank in (first, second):
        check_trained(first["start"], rank["end"], rank["norms"])
        assert rank["runs"]["second"] == rank["runs"]["whole"] == first["runs"]["whole"]
    # a folder of both ranks' shards, or a file, in one process
    one = train_runs(folder / "one", model_folder, begins=False, of_two=tmp_path / "first.ckpt")
    for found in (first["runs"]["whole"], first["runs"]["of_one"], one["of_two"]):
        check_close(found, alone["whole"])
    paths = (tmp_path / "first.ckpt", checkpoint)
    loaded, saved = map(CriticGRPO.load_from_checkpoint, paths)
    check_close([own(loaded)], [own(saved)])
