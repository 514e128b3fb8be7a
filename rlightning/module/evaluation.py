"""Validation, test and prediction with completions from the engine: rewards and pass@k of prompt sets."""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rlightning.environments.runner import ScoreGroup
from rlightning.errors import ConfigError, EnvironmentFailedError
from rlightning.hooks import call_hook
from rlightning.module.metrics import pass_at_k
from rlightning.module.overrides import is_own
from rlightning.module.update import UpdateModule
from rlightning.parallel.collectives import all_reduce
from rlightning.protocols import has
from rlightning.rewards import FailureCount, RewardRunner
from rlightning.rollout import TrajectorySampler
from rlightning.rollout.requests import validation_sampling
from rlightning.types import Prompt, RolloutBatch, Trajectory

if TYPE_CHECKING:
    from rlightning.data import ValidationSet

PASS_REWARD = 1.0
"""Least unweighted reward of the first reward function for a completion to pass."""


class _HasValidationPrompts(Protocol):
    """A data module with the validation sets; in a controller's worker they are not read."""

    @property
    def validation_prompts(self) -> Sequence[Sequence[Prompt]] | None: ...


def batch_metrics(batch: RolloutBatch, num_samples: int) -> dict[str, float]:
    """Return metrics of one validation batch, as means over its trajectories and prompts.

    Args:
        batch: a batch with rewards; NaN counts as reward 0, and as not passed. An empty batch, on a rank without a
            share of the last prompts, gives zeros, which have weight 0.
        num_samples: trajectories of each prompt. A group with fewer sampled trajectories has no pass@k for larger k.

    Returns:
        reward, length (tokens), truncated (share), and pass@k for k = 1, 2, 4, ... up to ``num_samples``.
    """
    assert batch.rewards is not None
    decisive = next(iter(batch.scores.values()), batch.rewards)
    passed = Counter(batch.group_ids[decisive >= PASS_REWARD].tolist())
    groups = Counter(batch.group_ids.tolist())
    num_trajectories = max(batch.num_trajectories, 1)
    result = {
        "reward": batch.rewards.nan_to_num().sum().item() / num_trajectories,
        "length": batch.completion_lengths.sum().item() / num_trajectories,
        "truncated": sum(one.is_truncated for one in batch.trajectories) / num_trajectories,
    }
    k = 1
    while k <= num_samples:
        tried = {group: number for group, number in groups.items() if number >= k}
        result[f"pass@{k}"] = sum(pass_at_k(n, passed[g], k) for g, n in sorted(tried.items())) / max(len(tried), 1)
        k *= 2
    return result


def no_trajectory_sampler(kind: type) -> ConfigError:
    """Return a ConfigError which says that a module has completions to sample, but the run has no rollout callback."""
    return ConfigError(
        f"{kind.__name__} has nothing to generate with. Fill the section rollout, or add VLLMRollout to "
        "trainer.callbacks."
    )


class EvaluationSteps(UpdateModule):
    """An UpdateModule that samples and rewards completions in validation and test, and returns them in prediction.

    Attributes:
        count_timeouts: whether trajectories that have run out of time count as sampled.
        rewarder: calls the reward functions.
        sampler: samples trajectories of prompts; set by the rollout callback.
        validation_failures: counts of failed rewards in the current validation, by the set's index.
        validation_samples: trajectories that count as sampled in the current validation, by the set's index.
    """

    batch_type: type[RolloutBatch] = RolloutBatch
    """The class of the batches; a subclass has additional fields, which are moved with the batch."""
    count_timeouts: bool
    rewarder: RewardRunner
    sampler: TrajectorySampler | None = None
    validation_failures: dict[int, FailureCount]
    validation_samples: Counter[int]

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of a validation set, and log its metrics under the prefix "val"."""
        self.log_evaluation(prompts, dataloader_idx, "val")

    def test_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of a validation set, and log its metrics under the prefix "test"."""
        self.log_evaluation(prompts, dataloader_idx, "test")

    def on_validation_epoch_start(self) -> None:
        """Reset the counts of failed rewards and of sampled trajectories."""
        self.validation_failures, self.validation_samples = {}, Counter()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the number of rollout steps, the loggers' x-axis; raise an error if a set could not be evaluated.

        Raises:
            EnvironmentFailedError: no trajectory of a set was sampled, over all ranks.
            RewardError: the rewards of too large a share of a set failed, over all ranks.
        """
        if self.validation_failures:
            failures, samples = self.validation_failures, self.validation_samples
            own = [[count.num_failed, count.num_scored, samples[one]] for one, count in failures.items()]
            totals = all_reduce(torch.tensor(own), name="validation is done").tolist()
            for (one, count), (num_failed, num_scored, num_sampled) in zip(failures.items(), totals, strict=True):
                if num_sampled == 0:
                    name = self.trainer.datamodule.validation_sets[one].name  # type: ignore[attr-defined]
                    raise EnvironmentFailedError(
                        f"No trajectory of the validation set '{name}' was sampled: all failed, as the log says "
                        "above, or timed out. There is nothing to measure."
                    )
                count.check(num_failed, num_scored)
        self.log("step", float(self.trainer.global_step))

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, prompts: list[Prompt], batch_idx: int) -> list[tuple[Prompt, list[Trajectory]]]:
        """Return each prompt with ``samples_per_prompt`` trajectories, with the settings of the section ``rollout``."""
        on_completed = partial(call_hook, self.trainer, self, "on_predict_prompt_end")
        groups = self._rollout_callback.generate(prompts, self.plan.samples_per_prompt, self.sampling, on_completed)
        return list(zip(prompts, groups, strict=True))

    def begin_rewards(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """Start the reward functions on one prompt's trajectories while those of other prompts are being sampled.

        Does nothing if :meth:`compute_rewards` is overridden.
        """
        if self.has_own_rewards and self.rewarder.functions:
            self.rewarder.begin([one for one in trajectories if self._is_sampled(one)])

    def serve_rewards(self, num_ranks: int) -> ScoreGroup | None:
        """Have this rank's reward functions score prompts of all ranks while these are in flight over several steps.

        Returns:
            A function that scores the trajectories of a prompt; None, and nothing changes, without reward functions, or
            if :meth:`compute_rewards` is overridden.
        """
        if not self.has_own_rewards or not self.rewarder.functions:
            return None
        self.rewarder.num_ranks = num_ranks

        async def score(trajectories: Sequence[Trajectory]) -> None:
            await self.rewarder.score_group([one for one in trajectories if self._is_sampled(one)])

        return score

    @property
    def has_own_rewards(self) -> bool:
        """Return whether rewards come from reward functions, without an override of :meth:`compute_rewards`."""
        return is_own(self, "compute_rewards")

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the reward of each trajectory of a batch: [M]. Subclasses implement it."""
        raise NotImplementedError

    def select_sampled(self, batch: RolloutBatch) -> RolloutBatch:
        """Return a batch of only those trajectories that finished or reached a limit. Others, such as failed ones,
        enter no loss, baseline or mean.
        """
        counted = [m for m, one in enumerate(batch.trajectories) if self._is_sampled(one)]
        return batch if len(counted) == batch.num_trajectories else batch.select(counted)

    def _is_sampled(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory finished, or a limit on tokens or turns ended it, or a timeout if these count."""
        return trajectory.status in ("finished", "truncated", *(("timeout",) if self.count_timeouts else ()))

    @property
    def _rollout_callback(self) -> TrajectorySampler:
        """Return the rollout callback, which samples the completions.

        Raises:
            ConfigError: there is no rollout callback.
        """
        if self.sampler is None:
            raise no_trajectory_sampler(type(self))
        return self.sampler

    def log_evaluation(self, prompts: list[Prompt], dataloader_idx: int, prefix: str) -> None:
        """Sample and reward completions of this rank's prompts; log rewards and pass@k as ``<prefix>/<set>/...``."""
        chosen: ValidationSet = self.trainer.datamodule.validation_sets[dataloader_idx]  # type: ignore[attr-defined]
        failures = self.validation_failures.setdefault(dataloader_idx, self._count_failures(chosen, dataloader_idx))
        num_samples = chosen.samples_per_prompt
        with self.rewarder.counting(failures):
            sampling = validation_sampling(self.sampling, chosen)
            groups = self._rollout_callback.generate(prompts, num_samples, sampling, self.begin_rewards)
            batch = self.select_sampled(self.batch_type.pack(groups))
            self.validation_samples[dataloader_idx] += batch.num_trajectories
            batch.rewards = self.compute_rewards(batch)
        self.log_dict(
            {f"{prefix}/{chosen.name}/{name}": value for name, value in batch_metrics(batch, num_samples).items()},
            batch_size=len(prompts),
            add_dataloader_idx=False,
            sync_dist=True,
        )

    def _count_failures(self, chosen: "ValidationSet", dataloader_idx: int) -> FailureCount:
        """Return the counter of a validation set's failed rewards, which is created on first use."""
        data: object = self.trainer.datamodule  # type: ignore[attr-defined]
        sets = data.validation_prompts if has(data, _HasValidationPrompts) else None
        num_samples = len(sets[dataloader_idx]) * chosen.samples_per_prompt if sets else sys.maxsize
        return FailureCount(num_samples, self.rewarder.max_failed_share, f" of the validation set '{chosen.name}'")
