"""What a step computes: the same update however it is cut, and whatever fails beside it."""

import copy
import logging
import math
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import (
    ActorGenerator,
    UseGenerator,
    copy_weights,
    make_batch,
    make_data,
    make_trainer,
    save_model,
    share_of_ones,
)
from torch import Tensor

from rlightning.algorithms import DAPO, GRPO
from rlightning.callbacks import Throughput
from rlightning.data import ValidationSet
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.models import load_policy, packed_logprobs
from rlightning.module import RLModule, policy_module, update
from rlightning.objectives import ForwardPass, LossComponent, cross_entropy
from rlightning.objectives.kl import estimate_kl
from rlightning.rewards import RewardFunction
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory

Weights = dict[str, Tensor]
SMALL: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 4, "lr": 1e-3}


REWARDS = (RewardFunction(share_of_ones),)


def train(module: RLModule, folder: Path, max_steps: int, *callbacks: Any, **kwargs: Any) -> Weights:
    """The weights after some steps."""
    make_trainer(folder, max_steps, *callbacks, **kwargs).fit(module, make_data(folder))
    return copy_weights(module)


def assert_close(got: Weights, expected: Weights, tolerance: float = 0.0) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, atol=tolerance, rtol=0.0)


# However it is cut


class Imitating(GRPO):
    """Adds the cross-entropy of what is sampled to the loss, with a denominator of its own."""

    def loss_components(self) -> list[LossComponent]:
        other: Any = "sequence_mean" if self.loss_aggregation == "token_mean" else "token_mean"
        return [*super().loss_components(), LossComponent("imitation", self.imitate, weight=0.1, denominator=other)]

    def imitate(self, forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return cross_entropy(forward.logprobs, batch)


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "trajectory_mean", "constant"])
def test_the_cut_into_microbatches_changes_nothing(aggregation: Any, model_folder: str, tmp_path: Path) -> None:
    arguments = SMALL | {"loss_aggregation": aggregation, "updates_per_rollout": 2, "entropy_coef": 0.01}
    start: Weights = {}
    results: list[Weights] = []
    passes: list[int] = []
    for limit in (40, 10_000):
        module = Imitating(model_folder, rewards=REWARDS, max_tokens_per_microbatch=limit, **arguments)
        module.configure_model()
        start = copy_weights(module)
        counter = Counter(module)
        results.append(train(module, tmp_path, 3, counter))
        passes.append(counter.num_losses)
    assert passes[1] == 3 * 2 < passes[0]
    assert max((results[0][name] - start[name]).abs().max().item() for name in start) > 1e-3
    assert_close(results[0], results[1], 1e-5)


class ComputesAll(GRPO):
    """Computes sequences without advantage, too."""

    def skippable_sequences(self, batch: RolloutBatch) -> Tensor:
        return torch.zeros(batch.num_sequences, dtype=torch.bool)


class Counter(UseGenerator):
    """Counts forward passes with and without gradient."""

    def __init__(self, module: RLModule) -> None:
        super().__init__()
        self.num_losses = self.num_evaluations = 0
        loss, evaluate = module.loss, module.evaluate_logprobs

        def counted_loss(*args: Any) -> Tensor:
            self.num_losses += 1
            return loss(*args)

        def counted_evaluate(*args: Any, **kwargs: Any) -> Tensor:
            self.num_evaluations += 1
            return evaluate(*args, **kwargs)

        module.loss = counted_loss  # type: ignore[assignment,method-assign]
        module.evaluate_logprobs = counted_evaluate  # type: ignore[method-assign]


@pytest.mark.parametrize(("updates", "epochs", "evaluations"), [(1, 1, 0), (2, 1, 1), (1, 2, 1)])
def test_old_logprobs_cost_a_pass_only_with_several_updates(
    updates: int, epochs: int, evaluations: int, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []

    def counted(model: Any, batch: RolloutBatch, **kwargs: Any) -> Any:
        tokens.append(batch.num_sequences)
        return packed_logprobs(model, batch, **kwargs)

    for file in (update, policy_module):
        monkeypatch.setattr(file, "packed_logprobs", counted)
    module = ComputesAll(
        model_folder, rewards=REWARDS, kl_coef=0.0, updates_per_rollout=updates, epochs_per_rollout=epochs, **SMALL
    )
    train(module, tmp_path, 1)
    assert sum(tokens) == 16 * (epochs + evaluations)


@pytest.mark.long
def test_importance_ratio_is_one_until_second_update(model_folder: str, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(ComputesAll):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert batch.old_logprobs is not None and not batch.old_logprobs.requires_grad
            seen.append((logprobs.detach(), batch.old_logprobs))
            return super().policy_loss(logprobs, batch)

    train(Watched(model_folder, rewards=REWARDS, **SMALL), tmp_path, 1)
    assert all(torch.equal(new, old) for new, old in seen)
    seen.clear()
    train(Watched(model_folder, rewards=REWARDS, updates_per_rollout=2, **SMALL), tmp_path, 1)
    torch.testing.assert_close(seen[0][0], seen[0][1], atol=1e-5, rtol=0)
    assert not torch.allclose(seen[1][0], seen[1][1], atol=1e-4)  # the second update is off its rollout's policy


@pytest.mark.long
def test_approximated_proximal_policy_without_staleness_matches_recomputed(model_folder: str, tmp_path: Path) -> None:
    def trained(proximal_policy: Any) -> dict[str, Tensor]:
        module = GRPO(model_folder, rewards=REWARDS, proximal_policy=proximal_policy, updates_per_rollout=2, **SMALL)
        return train(module, tmp_path, 2)

    recomputed, approximated = trained("recomputed"), trained("approximated")
    for name, weight in recomputed.items():
        torch.testing.assert_close(approximated[name], weight, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: Any, model_folder: str, tmp_path: Path) -> None:
    class Watched(ComputesAll):
        def update(self, batch: RolloutBatch) -> dict[str, float]:
            values = (batch.rewards, batch.advantages, batch.old_logprobs, batch.ref_logprobs)
            dtypes = [None if value is None else value.dtype for value in values]
            assert dtypes == [torch.float64] + [torch.float32] * 3
            return super().update(batch)

    module = Watched(model_folder, rewards=REWARDS, updates_per_rollout=2, kl_coef=0.1, **SMALL)
    weights = train(module, tmp_path, 2, precision=precision)
    dtype = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert all(weight.dtype == dtype and weight.isfinite().all() for weight in weights.values())


# What an older policy has sampled


class HalfAsSure(ActorGenerator):
    """Samples like the actor, and says that each token was twice as likely: its importance weight is a half."""

    def complete(self, *args: Any) -> list[Sample]:
        samples = super().complete(*args)
        for sample in samples:
            sample.logprobs = array("f", [logprob + math.log(2) for logprob in sample.logprobs])
        return samples


class OneBehind(HalfAsSure):
    """May be an update behind the actor."""

    max_staleness = 1


@pytest.mark.long
def test_default_correction_weighs_loss_of_stale_tokens(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def metrics(make: Any, **arguments: Any) -> dict[str, Tensor]:
        caplog.clear()
        module = GRPO(model_folder, rewards=REWARDS, kl_coef=0.0, **SMALL | arguments)
        train(module, tmp_path, 1, UseGenerator(make))
        return dict(module.trainer.callback_metrics)

    corrected = metrics(OneBehind)
    assert caplog.text.count("Completions may be 1 update old: each token's loss is weighed") == 1
    assert corrected["policy/correction_weight"] == pytest.approx(0.5, abs=1e-4)
    assert corrected["policy/correction_out_of_bounds"] == 0

    for make, arguments in ((OneBehind, {"rollout_correction": None}), (HalfAsSure, {})):
        plain = metrics(make, **arguments)
        assert "Completions may be" not in caplog.text
        assert not [name for name in plain if "correction" in name]
        assert plain["optim/grad_norm"] > 0
        assert corrected["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"].item() / 2, rel=1e-3)


class LockedGenerator(ActorGenerator):
    """Has what no copy can have, as an engine does."""

    def __init__(self, module: RLModule) -> None:
        super().__init__(module)
        self.lock = threading.RLock()


class CopiedAverage(RLCallback):
    """An exponential moving average by hand, in a copy of the module."""

    average: Any = None

    def on_update_end(self, trainer: Any, pl_module: Any, batch: RolloutBatch) -> None:
        if self.average is None:
            self.average = copy.deepcopy(pl_module)
        else:
            for mean, weight in zip(self.average.parameters(), pl_module.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.5)


@pytest.mark.long
def test_a_copy_of_the_module_in_a_callback_leaves_the_run_out(model_folder: str, tmp_path: Path) -> None:
    """The reward functions' loop and threads and the engine are at work when it is made."""
    rewards = [RewardFunction(share_of_ones), RewardFunction(lambda completion: float("1" in completion), name="one")]
    copied, module = CopiedAverage(), GRPO(model_folder, rewards=rewards, **SMALL)
    trained = train(module, tmp_path, 2, UseGenerator(LockedGenerator), copied)
    average = copied.average
    assert average._trainer is None and average.generator is None
    assert average.lr == 1e-3 and average.rewarder.functions[0].name == module.rewarder.functions[0].name
    assert average.actor is not module.actor
    for name, weight in copy_weights(average).items():
        assert weight.shape == trained[name].shape
        assert not torch.equal(weight, trained[name]) or "norm" in name
    average.save_hf(tmp_path / "average")
    assert_close(dict(load_policy(str(tmp_path / "average")).named_parameters()), copy_weights(average))


class StepBehind(ActorGenerator):
    """Samples from the weights of the step before; in the first step from the actor's."""

    max_staleness = 1

    def __init__(self, module: RLModule) -> None:
        super().__init__(module)
        self.trained: Any = module
        self.before: Any = None

    def generate(self, *args: Any) -> list[list[Trajectory]]:
        actor = copy.deepcopy(self.trained.loaded_actor)
        now: Any = SimpleNamespace(loaded_actor=actor, weight_version=self.trained.weight_version)
        self.module, self.before = self.before or now, now
        return super().generate(*args)


@pytest.mark.long
def test_stale_proximal_policy_is_approximated_without_forward_pass(model_folder: str, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    class Watched(ComputesAll):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert batch.old_logprobs is not None
            now, old, sampler = logprobs.detach(), batch.old_logprobs, batch.rollout_logprobs
            ages, sampled = self.weight_version - batch.weight_versions, batch.is_sampled
            seen.append((now[sampled], old[sampled], sampler[sampled], ages[sampled]))
            return super().policy_loss(logprobs, batch)

        def evaluate_logprobs(self, *args: Any, **kwargs: Any) -> Tensor:
            raise AssertionError("A pass of its own.")

    arguments = SMALL | {"kl_coef": 0.0, "updates_per_rollout": 2, "proximal_policy": "approximated"}
    module = Watched(model_folder, rewards=REWARDS, **arguments)
    train(module, tmp_path, 2, UseGenerator(StepBehind))
    assert [sorted(set(ages.tolist())) for *_, ages in seen] == [[0], [0], [1], [1]]
    # Before a rollout's first update it is the policy now; after half of them, by the versions of the sampler and of
    # now, all of the way back to a sampler that is not behind, and a third of it to one that is an update behind.
    for (now, old, sampler, _), share in zip(seen, (1, 0, 1, 2 / 3), strict=True):
        torch.testing.assert_close(old, sampler + share * (now - sampler), atol=1e-6, rtol=0)
    now, _, sampler, _ = seen[3]
    assert (now - sampler).abs().max() > 1e-3
    # What the sampler is behind is the correction's: truncated importance sampling.
    ratios = torch.cat([(old - sampler).exp() for _, old, sampler, _ in seen[2:]])
    weight = module.trainer.callback_metrics["policy/correction_weight"]
    assert weight == pytest.approx(ratios.clamp(max=2).mean().item(), abs=1e-6)


# Whatever fails beside it


class DropSamples(ActorGenerator):
    """Samples like the actor, but some completions of a group never come."""

    dropped: Sequence[int] = ()

    def generate(self, *args: Any) -> list[list[Trajectory]]:
        groups = super().generate(*args)
        return [[c for i, c in enumerate(group) if i not in self.dropped] for group in groups]


class FailSamples(GRPO):
    """Rewards two completions of four with NaN, of the first prompt's all."""

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        rewards = super().compute_rewards(batch)
        if batch.num_trajectories == 16:
            rewards[1::4] = rewards[3::4] = math.nan
        return rewards


@pytest.mark.long
def test_a_failed_reward_costs_its_sample_only(model_folder: str, tmp_path: Path) -> None:
    class Dropping(DropSamples):
        dropped = (1, 3)

    arguments = SMALL | {"updates_per_rollout": 2}
    failed = train(FailSamples(model_folder, rewards=REWARDS, **arguments), tmp_path, 2)
    dropped = train(GRPO(model_folder, rewards=REWARDS, **arguments), tmp_path, 2, UseGenerator(Dropping))
    whole = train(GRPO(model_folder, rewards=REWARDS, **arguments), tmp_path, 2)
    assert_close(failed, dropped)
    assert any(not torch.equal(failed[name], whole[name]) for name in whole)


@pytest.mark.long
def test_a_group_without_any_reward_is_left_out(model_folder: str, tmp_path: Path) -> None:
    class FailGroup(GRPO):
        def compute_rewards(self, batch: RolloutBatch) -> Tensor:
            rewards = super().compute_rewards(batch)
            rewards[:4] = math.nan
            self.kept = [prompt.index for prompt in batch.prompts[4:]]
            return rewards

        def update(self, batch: RolloutBatch) -> dict[str, float]:
            assert [prompt.index for prompt in batch.prompts] == self.kept
            assert sorted(set(batch.group_ids.tolist())) == [0, 1, 2]
            return super().update(batch)

    # Three groups cannot fill four minibatches: the step has three optimizer steps and counts as one.
    module = FailGroup(model_folder, rewards=REWARDS, updates_per_rollout=4, **SMALL)
    train(module, tmp_path, 2)
    assert module.trainer.global_step == module.weight_version == 2
    assert module.trainer.callback_metrics["reward/failed"] == 0.25


class SometimesSilent(DAPO):
    """Rewards in some steps, given by their numbers from 0, are all equal."""

    silent: tuple[int, ...] = ()

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        rewards = super().compute_rewards(batch)
        return torch.ones_like(rewards) if self.weight_version in self.silent else rewards


class Steps(RLCallback):
    """Notes each step's metrics, weights and hooks."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.weights: list[Weights] = []
        self.updates: list[int] = []

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.updates.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.weights.append(copy_weights(module))


def make_silent(model_folder: str, *silent: int, **kwargs: Any) -> SometimesSilent:
    arguments: dict[str, Any] = {"max_refills": 1, "overlong_cache": 0, "weight_decay": 0.1, "lr_schedule": "linear"}
    module = SometimesSilent(model_folder, rewards=REWARDS, **SMALL | arguments | kwargs)
    module.silent = silent
    return module


@pytest.mark.long
def test_a_step_without_signal_skips_its_update_and_counts(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    module = make_silent(model_folder, 1, 2, updates_per_rollout=2, max_steps_without_signal=3)
    train(module, tmp_path, 4, Throughput(), steps)
    assert module.trainer.global_step == module.weight_version == 4 and module.without_signal.number == 0
    assert steps.updates == [0, 3]
    assert_close(steps.weights[2], steps.weights[0])
    assert any(not torch.equal(steps.weights[3][name], steps.weights[2][name]) for name in steps.weights[3])
    assert [step["optim/skipped"] for step in steps.metrics] == [0.0, 1.0, 1.0, 0.0]
    assert [step["optim/lr"] for step in steps.metrics] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [step["step"] for step in steps.metrics] == [1.0, 2.0, 3.0, 4.0]
    for name in ("policy/loss", "optim/grad_norm", "time/update"):
        assert [math.isnan(step[name]) for step in steps.metrics] == [False, True, True, False], name
    # Two rollouts of four prompts with four completions each.
    warnings = [record.getMessage() for record in caplog.records if "can be learned from" in record.getMessage()]
    assert [line.partition(":")[0] for line in warnings] == ["Step 2", "Step 3"]
    assert "none of its 32 completions" in warnings[0] and "; 1 such steps in a row" in warnings[0]
    assert "; 2 such steps in a row, and model.max_steps_without_signal=3 end the run" in warnings[1]


@pytest.mark.long
def test_skipped_update_steps_several_optimizers_without_schedules(model_folder: str, tmp_path: Path) -> None:
    class TwoOptimizers(SometimesSilent):
        silent = (1,)

        def configure_optimizers(self) -> Any:
            parameters = list(self.loaded_actor.parameters())
            matrices, norms = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
            return torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(norms, lr=1e-3)

    steps = Steps()
    module = TwoOptimizers(model_folder, rewards=REWARDS, max_refills=1, overlong_cache=0, **SMALL)
    train(module, tmp_path, 3, steps)
    assert module.trainer.global_step == module.weight_version == 3
    assert_close(steps.weights[1], steps.weights[0])
    assert [step["optim/skipped"] for step in steps.metrics] == [0.0, 1.0, 0.0]
    for name, rate in (("optim/lr", 0.1), ("optim/lr/0", 0.1), ("optim/lr/1", 1e-3)):
        assert [step[name] for step in steps.metrics] == pytest.approx([rate] * 3)


@pytest.mark.long
def test_steps_without_signal_in_a_row_end_the_run(model_folder: str, tmp_path: Path) -> None:
    steps, limited = Steps(), {"max_steps_without_signal": 3}
    with pytest.raises(ConfigError, match=r"Step 6: none of .*; model\.max_steps_without_signal=3 such steps in a row"):
        train(make_silent(model_folder, 0, 1, 3, 4, 5, **limited), tmp_path, 8, steps)
    assert [step["optim/skipped"] for step in steps.metrics] == [1.0, 1.0, 0.0, 1.0, 1.0]
    resumed = make_silent(model_folder, 3, 4, 5, **limited)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    train(make_silent(model_folder, 1, 2, **limited), tmp_path, 3, checkpoint, enable_checkpointing=True)
    trainer = make_trainer(tmp_path, 8)
    with pytest.raises(ConfigError, match="Step 4: none of"):
        trainer.fit(resumed, make_data(tmp_path), ckpt_path=tmp_path / "last.ckpt")


def test_a_limit_of_no_steps_without_signal_is_refused(model_folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"max_steps_without_signal=0 must be at least 1, which ends the run at the f"
    ):
        make_silent(model_folder, max_steps_without_signal=0)


def test_failed_rewards_alone_are_no_signal(model_folder: str, tmp_path: Path) -> None:
    class FailAll(GRPO):
        def compute_rewards(self, batch: RolloutBatch) -> Tensor:
            return torch.full((batch.num_sequences,), math.nan)

    with pytest.raises(ConfigError, match="Step 1: none of its 16 completions"):
        train(FailAll(model_folder, max_steps_without_signal=1, **SMALL), tmp_path, 1)


@pytest.mark.long
def test_gradients_that_are_not_finite_skip_their_step(model_folder: str, tmp_path: Path) -> None:
    metrics: list[dict[str, float]] = []
    weights: list[Weights] = []

    class Explodes(GRPO):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            loss, values = super().policy_loss(logprobs, batch)
            return (loss * math.inf if self.weight_version == 1 else loss), values

        def update(self, batch: RolloutBatch) -> dict[str, float]:
            metrics.append(super().update(batch))
            weights.append(copy_weights(self))
            return metrics[-1]

    module = Explodes(model_folder, rewards=REWARDS, weight_decay=0.1, updates_per_rollout=2, **SMALL)
    train(module, tmp_path, 3)
    assert module.trainer.global_step == module.weight_version == 3
    assert [one["optim/skipped"] for one in metrics] == [0.0, 1.0, 0.0]
    assert_close(weights[1], weights[0])
    assert any(not torch.equal(weights[2][name], weights[1][name]) for name in weights[1])
    assert all(weight.isfinite().all() for weight in weights[2].values())


# The reference


@pytest.mark.long
def test_kl_in_the_loss_starts_at_zero_and_grows(model_folder: str, tmp_path: Path) -> None:
    seen: list[float] = []

    class Watched(ComputesAll):
        def update(self, batch: RolloutBatch) -> dict[str, float]:
            assert batch.ref_logprobs is not None
            metrics = super().update(batch)
            seen.append(metrics["policy/kl"])
            return metrics

    free = train(GRPO(model_folder, rewards=REWARDS, kl_coef=0.0, **SMALL), tmp_path, 3)
    held = train(Watched(model_folder, rewards=REWARDS, kl_coef=1.0, **SMALL), tmp_path, 3)
    assert seen[0] == pytest.approx(0.0, abs=1e-6) and seen[1] > 1e-6
    assert any(not torch.allclose(free[name], held[name], atol=1e-5) for name in free)


def test_a_module_without_kl_loads_no_reference(model_folder: str, tmp_path: Path) -> None:
    module = GRPO(model_folder, rewards=REWARDS, kl_coef=0.0, **SMALL)
    train(module, tmp_path, 1)
    assert list(module.roles) == ["actor"]


def test_kl_in_the_reward_is_taken_off_it(model_folder: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    batches: list[RolloutBatch] = []
    judged: list[Tensor] = []

    class Watched(ComputesAll):
        def compute_advantages(self, batch: RolloutBatch) -> Tensor:
            assert batch.rewards is not None
            judged.append(batch.rewards)
            return super().compute_advantages(batch)

        def update(self, batch: RolloutBatch) -> dict[str, float]:
            batches.append(batch)
            return super().update(batch)

    arguments = SMALL | {"kl_coef": 0.5, "kl_estimator": "k1", "kl_placement": "reward"}
    module = Watched(model_folder, rewards=REWARDS, reference_model=other, **arguments)
    train(module, tmp_path, 1, UseGenerator(temperature=0.7))
    batch = batches[0]
    with torch.no_grad():
        actor, reference = (
            packed_logprobs(load_policy(folder), batch, temperature=0.7)[0] for folder in (model_folder, other)
        )
    divergence = batch.sum_tokens(torch.where(batch.is_sampled, actor - reference, 0))
    assert batch.rewards is not None
    # advantages go by the penalised rewards; what was rewarded stays for everybody else to see
    torch.testing.assert_close(judged[0], batch.rewards - 0.5 * divergence, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.rewards, module.rewarder.score(batch.trajectories).rewards)
    assert estimate_kl(actor, reference, "k1").shape == (batch.num_tokens,)
    assert module.trainer.callback_metrics["policy/kl"] == pytest.approx(
        (divergence.sum() / batch.is_sampled.sum()).item(), abs=1e-4
    )


# What cannot work is said before any model is loaded


@pytest.mark.parametrize(
    ("arguments", "trainer", "message"),
    [
        ({"rewards": ()}, {}, "GRPO has no reward function"),
        ({"samples_per_prompt": 1}, {}, "samples_per_prompt=1: GRPO compares completions of one prompt"),
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 has no effect"),
        ({}, {"gradient_clip_val": 1.0}, r"Set model\.max_grad_norm=1\.0"),
    ],
)
def test_refused_before_the_model_loads(
    arguments: dict[str, Any], trainer: dict[str, Any], message: str, model_folder: str, tmp_path: Path
) -> None:
    module = GRPO(model_folder, **{"rewards": REWARDS} | SMALL | arguments)
    generator = UseGenerator()
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, 1, generator, **trainer).fit(module, make_data(tmp_path))
    assert module.actor is None
    assert module.generator is None  # no callback has been set up: no engine would have been started


def test_no_rewards_for_what_derives_from_ours(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DAPO has no reward function. Name at least one in model\.rewards"):
        make_trainer(tmp_path, 1).fit(DAPO(model_folder, **SMALL), make_data(tmp_path))

    class Own(DAPO):
        def compute_rewards(self, batch: RolloutBatch) -> Tensor:
            return batch.completion_lengths.float()

    train(Own(model_folder, **SMALL), tmp_path, 1)


def test_no_engine(model_folder: str, tmp_path: Path) -> None:
    module = GRPO(model_folder, rewards=REWARDS, **SMALL)
    trainer = make_trainer(tmp_path, 1, UseGenerator(lambda module: None))
    message = r"GRPO has nothing to generate with\. Add VLLMRollout or TransformersRollout to trainer\.callbacks\."
    with pytest.raises(ConfigError, match=message):
        trainer.fit(module, make_data(tmp_path))
    assert module.actor is None


def test_batches_that_cannot_be_divided(model_folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"prompts_per_step=10 cannot be split into updates_per_rollout=4 minibatches"
    ):
        GRPO(model_folder, prompts_per_step=10, updates_per_rollout=4)


def test_what_a_subclass_must_define(model_folder: str) -> None:
    module = RLModule(model_folder)
    batch = make_batch([[[0]]])
    with pytest.raises(NotImplementedError, match=r"RLModule does not define compute_advantages\(batch\)"):
        module.compute_advantages(batch)
    with pytest.raises(NotImplementedError, match=r"RLModule does not define policy_loss\(logprobs, batch\)"):
        module.policy_loss(torch.zeros(3), batch)


# Validation and prediction by themselves


@pytest.mark.long
def test_validate_and_predict(model_folder: str, tmp_path: Path) -> None:
    module = GRPO(model_folder, rewards=REWARDS, **SMALL)
    path = str(tmp_path / "sums.jsonl")
    data = make_data(tmp_path, validation={"sums": ValidationSet(path, samples_per_prompt=2)}, predict=path)
    (metrics,) = make_trainer(tmp_path, 1).validate(module, data, verbose=False)
    assert {"val/sums/reward", "val/sums/pass@1", "val/sums/pass@2", "val/sums/length"} <= set(metrics)
    (metrics,) = make_trainer(tmp_path, 1).test(module, data, verbose=False)
    assert "test/sums/reward" in metrics
    assert list(module.roles) == ["actor"]
    predicted: Any = make_trainer(tmp_path, 1).predict(module, data)
    pairs: list[tuple[Prompt, list[Trajectory]]] = [pair for batch in predicted for pair in batch]
    assert len(pairs) == 16 and all(len(completions) == 4 for _, completions in pairs)
    assert pairs[5][0].text == "1+1="
