"""Validation through the engine: rewards and pass@k of prompt sets, at an interval and before the first step."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from rlightning.module.metrics import pass_at_k
from rlightning.parallel.collectives import all_reduce
from rlightning.rewards import FailureCount
from rlightning.rollout import Sampling
from rlightning.types import Prompt, RolloutBatch

if TYPE_CHECKING:
    from rlightning.data import ValidationSet

PASS_REWARD = 1.0
"""A completion passes if the first reward function, unweighted, gives it at least this."""


def batch_metrics(batch: RolloutBatch, num_samples: int) -> dict[str, float]:
    """Means over one validation batch.

    Args:
        batch: with rewards; a reward of NaN counts as 0, and as not passed. It may be empty, on a rank without a share
            of the last prompts: then all values are 0, and weigh nothing.
        num_samples: trajectories a prompt; a group of fewer, of which some were not sampled, has no pass@k above them.

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


def validation_sampling(sampling: Sampling, chosen: "ValidationSet") -> Sampling:
    """How a validation set is sampled: as in training, but for its temperature."""
    assert chosen.temperature is not None
    return replace(sampling, temperature=chosen.temperature)


def score_validation_prompts(module: Any, prompts: list[Prompt], chosen: "ValidationSet") -> dict[str, float]:
    """Complete and reward prompts of a validation set.

    Args:
        module: an RLModule.
        prompts: of the set.
        chosen: the set.
    """
    sampling = validation_sampling(module.sampling, chosen)
    groups = module.generator.generate(prompts, chosen.samples_per_prompt, sampling, module.begin_rewards)
    batch = module.select_sampled(module.batch_type.pack(groups))
    batch.rewards = module.compute_rewards(batch)
    return batch_metrics(batch, chosen.samples_per_prompt)


def log_validation(module: Any, prompts: list[Prompt], dataloader_idx: int, prefix: str) -> None:
    """Complete and reward one batch of a validation set, and log it as ``<prefix>/<set>/...``.

    Args:
        module: an RLModule under a trainer.
        prompts: of the set; this rank's share.
        dataloader_idx: which set.
        prefix: "val" or "test".
    """
    chosen: ValidationSet = module.trainer.datamodule.validation_sets[dataloader_idx]
    failures = module.validation_failures.setdefault(dataloader_idx, _count_failures(module, dataloader_idx))
    with module.rewarder.counting(failures):
        metrics = score_validation_prompts(module, prompts, chosen)
    module.log_dict(
        {f"{prefix}/{chosen.name}/{name}": value for name, value in metrics.items()},
        batch_size=len(prompts),
        add_dataloader_idx=False,
        sync_dist=True,
    )


def _count_failures(module: Any, dataloader_idx: int) -> FailureCount:
    """The failures of a validation set, of which there are none yet."""
    data = module.trainer.datamodule
    chosen: ValidationSet = data.validation_sets[dataloader_idx]
    sets = getattr(data, "validation_prompts", None)  # a controller's workers do not have them
    num_prompts = len(sets[dataloader_idx]) if sets else sys.maxsize
    share = module.rewarder.max_failed_share
    return FailureCount(num_prompts * chosen.samples_per_prompt, share, f" of the validation set '{chosen.name}'")


def check_failed_share(counts: Mapping[int, FailureCount]) -> None:
    """Raise a RewardError if the rewards of too large a share of a validation set failed; all ranks take part.

    Args:
        counts: of this rank, by the set's number.
    """
    if not counts:
        return
    own = [[count.num_failed, count.num_scored] for count in counts.values()]
    totals = all_reduce(torch.tensor(own), name="validation is done").tolist()
    for count, (num_failed, num_scored) in zip(counts.values(), totals, strict=True):
        count.check(num_failed, num_scored)


class LeaveEvaluation(Callback):
    """Puts modules back into training mode when an exception or Ctrl-C ends an evaluation."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore each module's mode from before the evaluation that is under way, if one is."""
        loop = trainer._active_loop
        is_evaluating = trainer.sanity_checking or trainer.evaluating or trainer.predicting
        if is_evaluating and isinstance(loop, _EvaluationLoop | _PredictionLoop):
            loop._module_mode.restore(pl_module)
