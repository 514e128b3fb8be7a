"""Failed rewards, groups and gradients cost what is theirs; a step that nothing can be learned from counts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_steps import REWARDS, SMALL, StepMetrics, Weights, assert_close, train, two_optimizers
from tiny import ActorSampler, UseSampler, copy_weights, make_data, make_trainer
from torch import Tensor

from rlightning.algorithms import DAPO, GRPO
from rlightning.callbacks import Throughput
from rlightning.errors import ConfigError
from rlightning.module.no_signal import StepsWithoutSignal
from rlightning.types import RolloutBatch, Trajectory


class DropSamples(ActorSampler):
    """Samples like the actor, but every other completion of a group never comes."""

    def generate(self, *args: Any) -> list[list[Trajectory]]:
        return [group[::2] for group in super().generate(*args)]


class FailSamples(GRPO):
    """Rewards two completions of four with NaN, of the first prompt's all."""

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        rewards = super().compute_rewards(batch)
        if batch.num_trajectories == 16:
            rewards[1::4] = rewards[3::4] = math.nan
        return rewards


@pytest.mark.long
def test_a_failed_reward_costs_its_sample_only(model_folder: str, tmp_path: Path) -> None:
    arguments = SMALL | {"updates_per_rollout": 2}
    failed = train(FailSamples(model_folder, rewards=REWARDS, **arguments), tmp_path, 2)
    dropped = train(GRPO(model_folder, rewards=REWARDS, **arguments), tmp_path, 2, UseSampler(DropSamples))
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


class Steps(StepMetrics):
    """Notes each step's weights and update, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Weights] = []
        self.updates: list[int] = []

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.updates.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module)
        self.weights.append(copy_weights(module))


def make_silent(model_folder: str, *silent: int, **kwargs: Any) -> SometimesSilent:
    arguments: dict[str, Any] = {"max_refills": 1, "overlong_cache": 0, "weight_decay": 0.1, "lr_schedule": "linear"}
    module = SometimesSilent(model_folder, rewards=REWARDS, **SMALL | arguments | kwargs)
    module.silent = silent
    return module


@pytest.mark.long
def test_step_without_signal_skips_update_and_counts(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    module = make_silent(model_folder, 1, 2, updates_per_rollout=2, max_steps_without_signal=3)
    train(module, tmp_path, 4, Throughput(), steps)
    assert module.trainer.global_step == module.weight_version == 4 and module.without_signal.number == 0
    assert steps.updates == [0, 3]
    assert_close(steps.weights[2], steps.weights[0])
    assert any(not torch.equal(steps.weights[3][name], steps.weights[2][name]) for name in steps.weights[3])
    assert steps.column("optim/skipped") == [0.0, 1.0, 1.0, 0.0]
    assert steps.column("optim/lr") == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert steps.column("step") == [1.0, 2.0, 3.0, 4.0]
    for name in ("policy/loss", "optim/grad_norm", "time/update"):
        assert [math.isnan(value) for value in steps.column(name)] == [False, True, True, False], name
    # Two rollouts of four prompts with four completions each.
    warnings = [record.getMessage() for record in caplog.records if "can be learned from" in record.getMessage()]
    assert [line.partition(":")[0] for line in warnings] == ["Step 2", "Step 3"]
    assert "none of its 32 completions" in warnings[0] and "; 1 such steps in a row" in warnings[0]
    assert "; 2 such steps in a row, and model.max_steps_without_signal=3 end the run" in warnings[1]


@pytest.mark.long
def test_skipped_update_steps_several_optimizers_without_schedules(model_folder: str, tmp_path: Path) -> None:
    class TwoOptimizers(SometimesSilent):
        silent = (1,)
        configure_optimizers = two_optimizers

    steps = Steps()
    module = TwoOptimizers(model_folder, rewards=REWARDS, max_refills=1, overlong_cache=0, **SMALL)
    train(module, tmp_path, 3, steps)
    assert module.trainer.global_step == module.weight_version == 3
    assert_close(steps.weights[1], steps.weights[0])
    assert steps.column("optim/skipped") == [0.0, 1.0, 0.0]
    for name, rate in (("optim/lr", 0.1), ("optim/lr/0", 0.1), ("optim/lr/1", 1e-3)):
        assert steps.column(name) == pytest.approx([rate] * 3)


@pytest.mark.long
def test_successive_steps_without_signal_end_the_run(model_folder: str, tmp_path: Path) -> None:
    steps, limited = Steps(), {"max_steps_without_signal": 3}
    with pytest.raises(ConfigError, match=r"Step 6: none of .*; model\.max_steps_without_signal=3 such steps in a row"):
        train(make_silent(model_folder, 0, 1, 3, 4, 5, **limited), tmp_path, 8, steps)
    assert steps.column("optim/skipped") == [1.0, 1.0, 0.0, 1.0, 1.0]
    resumed = make_silent(model_folder, 3, 4, 5, **limited)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    train(make_silent(model_folder, 1, 2, **limited), tmp_path, 3, checkpoint, enable_checkpointing=True)
    trainer = make_trainer(tmp_path, 8)
    with pytest.raises(ConfigError, match="Step 4: none of"):
        trainer.fit(resumed, make_data(tmp_path), ckpt_path=tmp_path / "last.ckpt")


def test_limit_of_zero_steps_is_refused(model_folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"max_steps_without_signal=0 must be at least 1, which ends the run at the f"
    ):
        make_silent(model_folder, max_steps_without_signal=0)


def test_steps_without_signal_name_lost_trajectories(caplog: pytest.LogCaptureFixture) -> None:
    steps = StepsWithoutSignal(2)
    steps.count(1, 12, 0, 4, is_logging=True)
    assert "; 4 more trajectories failed or timed out in their environment (trajectory/not_sampled)" in caplog.text
    with pytest.raises(
        ConfigError, match=r"^Step 2: none of its 0 .*; 16 more .* or timed .*rollout\.trajectory_timeo"
    ):
        steps.count(2, 0, 0, 16, is_logging=True)


def test_failed_rewards_alone_are_no_signal(model_folder: str, tmp_path: Path) -> None:
    class FailAll(GRPO):
        def compute_rewards(self, batch: RolloutBatch) -> Tensor:
            return torch.full((batch.num_sequences,), math.nan)

    with pytest.raises(ConfigError, match="Step 1: none of its 16 completions"):
        train(FailAll(model_folder, max_steps_without_signal=1, **SMALL), tmp_path, 1)


@pytest.mark.long
def test_gradients_that_are_not_finite_skip_their_step(model_folder: str, tmp_path: Path) -> None:
    class Explodes(GRPO):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            loss, values = super().policy_loss(logprobs, batch)
            return (loss * math.inf if self.weight_version == 1 else loss), values

    steps = Steps()
    module = Explodes(model_folder, rewards=REWARDS, weight_decay=0.1, updates_per_rollout=2, **SMALL)
    train(module, tmp_path, 3, steps)
    assert module.trainer.global_step == module.weight_version == 3
    assert steps.column("optim/skipped") == [0.0, 1.0, 0.0]
    assert_close(steps.weights[1], steps.weights[0])
    assert any(not torch.equal(steps.weights[2][name], steps.weights[1][name]) for name in steps.weights[1])
    assert all(weight.isfinite().all() for weight in steps.weights[2].values())
