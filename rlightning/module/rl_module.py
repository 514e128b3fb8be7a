"""RLModule: a training step of the actor, from prompts to updated weights."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from rlightning.console import ignore_warnings
from rlightning.errors import ConfigError
from rlightning.hooks import call_hook
from rlightning.models.adapter import check_adapter_precision, check_parallel
from rlightning.module.batching import balance, minibatch_seed
from rlightning.module.evaluation import EvaluationSteps
from rlightning.module.metrics import rollout_metrics
from rlightning.module.monitoring import adapt_monitoring, check_monitors
from rlightning.module.no_signal import StepsWithoutSignal
from rlightning.module.returned_values import returned_tensor
from rlightning.module.run_folder import UnlockRun, lock_run_of
from rlightning.module.start_block import describe_start
from rlightning.module.trainer_options import check_data_source, check_trainer
from rlightning.objectives import estimate_kl, subtract_kl
from rlightning.parallel.collectives import all_reduce, gather_objects, world_size
from rlightning.parallel.cpu_group import barrier_timeout
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.prompt_batches import EpochStep
from rlightning.parallel.stacks import run_folder, start_recorder
from rlightning.parallel.stop_signal import GRACE_PERIOD, EndOnSigterm
from rlightning.parallel.trainer_stages import LeaveEvaluation, validate_in_fit
from rlightning.protocols import HasEnvironment, StateDict, callbacks_of, has
from rlightning.report.loggers import adapt_loggers, delay_loggers
from rlightning.rewards import FailureCount, Reward, RewardRunner
from rlightning.rewards.tally import fail_too_large
from rlightning.types import Prompt, RolloutBatch

log = logging.getLogger(__name__)


class RLModule(EvaluationSteps):
    """Trains the actor on completions that it samples itself.

    One :meth:`training_step` is one rollout step: the engine completes prompts, the completions are rewarded and turned
    into advantages, and the actor is updated on them. A new algorithm overrides :meth:`compute_rewards`,
    :meth:`compute_advantages` or :meth:`policy_loss`. Letters in shapes: ``T`` tokens, ``N`` sequences, ``M``
    trajectories (see :class:`~rlightning.types.RolloutBatch`).

    Args:
        model: a Hugging Face model with its tokenizer, a folder or a name on the hub.
        rewards: reward functions, each a dotted path, a callable or a :class:`~rlightning.rewards.RewardFunction`; a
            single one needs no list.
        turn_discount: credit each turn of the policy separately, with its own reward and those of later turns,
            discounted by this factor for each turn. None to credit all tokens with the trajectory's reward.
        mask_truncated: exclude trajectories that a limit has cut from the loss (DAPO's overlong filtering,
            arXiv:2503.14476, section 3.4); their rewards still count in baselines.
        count_timeouts: train on trajectories that have run out of time, with the environment's reward, or 0. Otherwise
            they count as not sampled, like aborted and failed ones.
        max_failed_share: maximum share of samples whose rewards may fail, in a step (with refills, over all ranks) or
            in a validation set, before the run ends.
        max_steps_without_signal: number of consecutive steps without a learning signal after which the run ends. Such
            steps skip their update, with a warning.
        max_unrewarded_references: maximum share of a prompt set's reference answers that get no reward when scored as
            completions, by reward functions marked by :func:`~rlightning.rewards.answer_checker`; otherwise the set is
            refused.
        check_rewards: before the first update, score a few completions a second time, and warn if results differ, are
            all equal, or take too long.
        validate_first: validate before the first step too.
        stop_grace: seconds from SIGTERM or Ctrl-C to the end of the process, in which the state is saved; a little less
            than a scheduler's own. A step that still samples after half of this time is interrupted.
        kwargs: arguments of :class:`~rlightning.module.update.UpdateModule`.
    """

    max_refills = 0
    """Maximum number of times that a step draws new prompts to replace groups that :meth:`keep_sequences` drops."""

    def __init__(
        self,
        model: str | Path,
        *,
        rewards: Sequence[Reward] | Reward = (),
        turn_discount: float | None = None,
        mask_truncated: bool = False,
        count_timeouts: bool = False,
        max_failed_share: float = 0.1,
        max_steps_without_signal: int = 5,
        max_unrewarded_references: float = 0.02,
        check_rewards: bool = True,
        validate_first: bool = True,
        stop_grace: float = GRACE_PERIOD,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.rewarder = RewardRunner(
            rewards, max_failed_share=max_failed_share, max_unrewarded_references=max_unrewarded_references
        )
        if turn_discount is not None and not 0 <= turn_discount <= 1:
            raise ConfigError(
                f"turn_discount={turn_discount} must be in [0, 1]. Leave it out for one credit a trajectory."
            )
        self.turn_discount = turn_discount
        self.mask_truncated, self.count_timeouts, self._checks_rewards = mask_truncated, count_timeouts, check_rewards
        if not 0 < stop_grace < math.inf:
            raise ConfigError(f"stop_grace={stop_grace} must be positive and finite. Use a minute or two, such as 120.")
        self.validate_first, self.stop_grace = validate_first, stop_grace
        self.without_signal = StepsWithoutSignal(max_steps_without_signal)
        self.validation_failures = {}
        self._num_not_sampled = 0
        self._no_update: dict[str, float] = {}

    # What the data module and the loggers call

    def check_columns(self, columns: Sequence[str], source: str) -> None:
        """Raise a ConfigError if a prompt set lacks columns that reward functions read; called by the data module."""
        self.rewarder.check(columns, source)

    def read_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of a prompt set that rewards depend on, besides the prompts.

        Called by the data module: in a resumed run these columns must be unchanged. They are those that the reward
        functions read, or all if :meth:`compute_rewards` is overridden.
        """
        return self.rewarder.read_columns(columns) if self.has_own_rewards else list(columns)

    def check_answers(self, prompts: Sequence[Prompt], where: Callable[[int], str]) -> None:
        """Score the reference answers of a prompt set as completions, and raise a ConfigError if too many get no
        reward; called by the data module on rank 0.

        ``where`` returns the file and line of a row, for the error.
        """
        if self.generates and self.has_own_rewards:
            self.rewarder.check_answers(prompts, where)

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the policy module, and a digest of the reward functions' source."""
        digest = self.rewarder.sources.digest
        return super().settings | ({"model.rewards.source": digest[:12]} if digest else {})

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copies of the module, without trainer and engine, which belong to the run."""
        return super().__getstate__() | {"sampler": None}

    # Set-up

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that every run needs in addition to the user's; raise a ConfigError for invalid
        settings. Lightning calls this before an engine or a model is loaded.
        """
        ignore_warnings()
        stage = self.trainer.state.fn
        # A user's override may need no reward function, and an environment may give rewards.
        is_rewarded = any(has(one, HasEnvironment) and bool(one.environment) for one in callbacks_of(self.trainer))
        needs_function = self.generates and stage != "predict" and self.has_own_rewards and not is_rewarded
        if needs_function and not self.rewarder.functions:
            raise ConfigError(
                f"{type(self).__name__} has no reward function. Name at least one in model.rewards, such as "
                "rlightning.rewards.exact_match, override compute_rewards, or use an environment that rewards."
            )
        if self.adapter is not None:
            check_adapter_precision(self.trainer.precision)
            is_sharded = isinstance(self.trainer.strategy, FSDP)
            check_parallel(self.adapter, is_sharded=is_sharded, tensor_parallel_size=self.tensor_parallel_size)
        check_data_source(self.trainer, self)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if stage == "fit":
            check_trainer(self.trainer)
            self.plan.check_world_size(self.trainer.world_size)
        adapt_monitoring(callbacks)
        adapt_loggers(self.trainer.loggers)
        if stage == "fit":
            check_monitors(self.trainer, self)
            lock_run_of(self.trainer)
        delay_loggers(self.trainer)
        own = (EndOnSigterm(self.stop_grace), EpochStep(), LeaveEvaluation(), UnlockRun())
        return [added for added in own if not any(isinstance(callback, type(added)) for callback in callbacks)]

    def setup(self, stage: str) -> None:
        """Log a summary of the run; raise a ConfigError if there is no engine for training."""
        start_recorder(run_folder(self.trainer.default_root_dir), f"rank {self.trainer.global_rank}")
        if self.generates and stage != "predict":
            self.choose_correction(self._rollout_callback.max_staleness)
        if self.trainer.is_global_zero:
            log.info(describe_start(self.trainer, self))

    def on_train_start(self) -> None:
        """Run a validation before the first training step, if ``validate_first`` is set."""
        if self.validate_first and self.trainer.global_step == 0 and self.trainer.enable_validation:
            validate_in_fit(self.trainer)

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Save the numbers of updates and of consecutive steps without a signal in the checkpoint."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["weight_version"] = self.weight_version
        checkpoint["num_steps_without_signal"] = self.without_signal.number

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Restore the numbers of updates and of consecutive steps without a signal from the checkpoint; raise a
        ConfigError if it is not of an rlightning run.
        """
        if "weight_version" not in checkpoint:
            raise ConfigError(
                "This checkpoint is not of an rlightning run. To start from its weights, name them in model."
            )
        self.weight_version = checkpoint["weight_version"]
        self.without_signal.number = checkpoint.get("num_steps_without_signal", 0)
        super().on_load_checkpoint(checkpoint)

    def teardown(self, stage: str) -> None:
        """End the worker processes of the reward functions."""
        self.close()

    def close(self) -> None:
        """End the worker processes of the reward functions. May be called twice."""
        self.rewarder.close()
        self.rewarder.num_ranks = 1

    # One step

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        """Run one training step: sample, reward, estimate advantages and update the weights.

        A step without a learning signal counts as a step, but skips its update and the update's hooks.

        Args:
            prompts: this rank's share of ``prompts_per_step``.
            batch_idx: unused.
        """
        batch = self.collect(prompts)
        if batch is None:
            metrics = self.skip_update()
        else:
            batch = self.rebalance(self.estimate_advantages(self.balance(batch)))
            call_hook(self.trainer, self, "on_update_start", batch)
            self.decide_skipped(batch)  # again: callbacks may have changed advantages, or terms of the loss
            metrics = self.update(batch)
        self.weight_version += 1
        if batch is not None:
            call_hook(self.trainer, self, "on_update_end", batch)
        # Otherwise Lightning repeats the previous step's values of metrics that have no new ones.
        self._no_update |= dict.fromkeys(metrics, math.nan)
        self.log_dict(self._no_update | metrics | {"step": float(self.trainer.global_step)})  # the loggers' x-axis

    def collect(self, prompts: list[Prompt]) -> RolloutBatch | None:
        """Sample and reward trajectories; with ``max_refills``, sample again until enough groups have a signal. Every
        rank must call it.

        Returns:
            The kept trajectories, with rewards, on the CPU; None if no rank has any.

        Raises:
            ConfigError: ``max_steps_without_signal`` consecutive steps have no signal.
            EnvironmentFailedError: no trajectory is left, since all have timed out, or some, and the others failed.
        """
        self._num_not_sampled = 0
        num_samples = self.prompts_per_step * self.samples_per_prompt
        failures = FailureCount(num_samples, self.rewarder.max_failed_share, " of the step")
        self.rewarder.group_failures = ahead = FailureCount(
            num_samples, self.rewarder.max_failed_share, " rewarded during the step"
        )
        with self.rewarder.counting(failures):
            sampled = [self.reward(self.rollout(prompts))]
            kept = [self._keep(sampled[0])]
            for _ in range(self.max_refills):
                missing = len(prompts) - sum(len(set(batch.group_ids.tolist())) for batch in kept)
                # All ranks take the same number of prompts, although only one of them may lack some.
                share = math.ceil(all_reduce(torch.tensor(missing), name="rewards are there").item() / world_size())
                if share <= 0:
                    break
                ahead.num_samples = failures.num_samples = (
                    failures.num_samples + share * world_size() * self.samples_per_prompt
                )
                sampled.append(self.reward(self.rollout(self.take_prompts(share))))
                kept.append(self._keep(sampled[-1]))
        counts = [sum(batch.num_trajectories for batch in batches) for batches in (sampled, kept)]
        counts += [failures.num_failed, self._num_not_sampled]
        num_sampled, num_kept, num_failed, num_lost = all_reduce(
            torch.tensor(counts), name="rewards are there"
        ).tolist()
        failures.check(num_failed, num_sampled)
        if num_lost and not num_sampled:
            self._rollout_callback.check_timeouts()
        if self.generates:
            batch = self.batch_type.concatenate(sampled)
            compared = self.compared_rewards(batch)
            metrics = rollout_metrics(batch, self.world_sum, self.all_max, compared=compared)
            self.log_dict(metrics | {"trajectory/not_sampled": float(num_lost)})
        step, is_logging = self.trainer.global_step + 1, self.trainer.is_global_zero
        self.without_signal.count(step, num_sampled, num_kept, num_lost, is_logging=is_logging)
        return self.batch_type.concatenate(kept) if num_kept else None

    def balance(self, batch: RolloutBatch) -> RolloutBatch:
        """Exchange trajectories between ranks, so that each rank has about equal work in the update; every rank must
        call it.

        Returns:
            Whole groups, on the CPU; ``group_ids`` are numbered over all ranks.
        """
        batch.shares_prefixes = self.decide_sharing(batch, self.plan.max_tokens_per_microbatch)
        return balance(
            batch,
            self.costs,
            num_minibatches=self.plan.updates_per_rollout,
            seed=minibatch_seed(self.weight_version),
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def rollout(self, prompts: list[Prompt]) -> RolloutBatch:
        """Sample ``samples_per_prompt`` trajectories of each prompt and return them. If prompts are kept in flight, the
        groups returned may be those of earlier prompts.

        Returns:
            A batch without rewards, on the CPU, of the trajectories that count as sampled.
        """
        call_hook(self.trainer, self, "on_rollout_start", prompts)
        groups = self._rollout_callback.collect_trajectories(
            prompts, self.samples_per_prompt, self.sampling, self.begin_rewards, self.take_prompts
        )
        batch = self.batch_type.pack(groups)
        call_hook(self.trainer, self, "on_rollout_end", batch)
        counted = self.select_sampled(batch)
        self._num_not_sampled += batch.num_trajectories - counted.num_trajectories
        return counted

    def reward(self, batch: RolloutBatch) -> RolloutBatch:
        """Compute rewards, set ``batch.rewards`` and return the batch; a reward that failed is NaN."""
        call_hook(self.trainer, self, "on_reward_start", batch)
        rewards = self.compute_rewards(batch)
        rewards = returned_tensor(rewards, batch.num_trajectories, "compute_rewards", "trajectories")
        batch.rewards = fail_too_large(rewards)
        batch.check()
        if self._checks_rewards and self.weight_version == 0:
            self._checks_rewards = False  # a refill's are not asked about, too
            own = {name: scores.tolist() for name, scores in batch.scores.items()}
            ranks = gather_objects(own, name="rewards are there")
            if self.trainer.is_global_zero:
                self.rewarder.check_repeats(batch.trajectories, batch.scores, barrier_timeout(), ranks)
        call_hook(self.trainer, self, "on_reward_end", batch)
        return batch

    def estimate_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """Set ``batch.advantages``, and ``old_logprobs`` and ``ref_logprobs`` if the loss needs them, and return the
        batch. Every rank must call it.
        """
        limit = self.plan.max_tokens_per_microbatch
        evaluate = partial(self.evaluate_logprobs, batch, temperature=self.sampling.temperature, max_tokens=limit)
        if self.plan.optimizer_steps > 1 and self.proximal_policy == "recomputed":
            batch.old_logprobs = evaluate(self.loaded_actor)
        if self.kl_coef:
            batch.ref_logprobs = self.evaluate_reference(evaluate)
        rewards = batch.rewards
        if self.kl_coef and self.kl_placement == "reward":
            batch.rewards = self.penalize_rewards(batch)
        advantages = self.compute_advantages(batch)
        batch.rewards = rewards  # callbacks get the batch that was rewarded
        batch.advantages = returned_tensor(advantages, batch.num_tokens, "compute_advantages", "tokens")
        batch.check()
        if self.mask_truncated:
            cut = torch.tensor([one.is_truncated for one in batch.trajectories], dtype=torch.bool)
            batch.is_sampled = batch.is_sampled & ~batch.to_tokens(cut)
        return batch

    # What an algorithm overrides

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return each trajectory's reward; by default the weighted sum of reward functions and environment reward.

        Args:
            batch: a batch on the CPU, with ``trajectories`` [M]; for single-turn ones also ``prompts`` and
                ``completions``.

        Returns:
            [M] floats; NaN for a trajectory that counts as not sampled. Without reward functions this includes
            trajectories without an environment reward, except timeouts.
        """
        decides = self.has_own_rewards and not self.rewarder.functions
        missing = [math.nan if decides and one.status != "timeout" else 0.0 for one in batch.trajectories]
        rewards = [
            default if one.reward is None else one.reward
            for one, default in zip(batch.trajectories, missing, strict=True)
        ]
        given = torch.tensor(rewards, dtype=torch.float64)
        if not self.rewarder.functions:
            return given
        scores = self.rewarder.score(batch.trajectories)
        batch.scores = scores.components
        for one, own in zip(batch.trajectories, scores.by_sample(), strict=True):
            one.scores = own
        return scores.rewards + given

    def keep_sequences(self, batch: RolloutBatch) -> Tensor:
        """Return which trajectories to train on: [M] bool; by default all. Refills may replace dropped groups."""
        return torch.ones(batch.num_trajectories, dtype=torch.bool)

    def compared_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards that decide whether a group has a learning signal: [M], NaN for a failed reward."""
        assert batch.rewards is not None
        return batch.rewards

    def penalize_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards minus ``kl_coef`` times each trajectory's KL: [M], for ``kl_placement="reward"``."""
        assert batch.rewards is not None
        trajectory_ids = batch.to_tokens(torch.arange(batch.num_trajectories))
        return subtract_kl(batch.rewards, self.estimate_kl(batch), batch.is_sampled, trajectory_ids, self.kl_coef)

    def estimate_kl(self, batch: RolloutBatch) -> Tensor:
        """Return each token's estimated KL from the reference model, before the rollout's first update: [T]."""
        assert batch.ref_logprobs is not None
        logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return estimate_kl(logprobs, batch.ref_logprobs, self.kl_estimator)

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return the advantage of each token.

        Args:
            batch: a batch with ``rewards`` [M], none of them NaN, and ``group_ids`` [M]; ``batch.to_tokens`` expands
                [M] to [T].

        Returns:
            [T] float32.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define compute_advantages(batch).")

    def take_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return this rank's next ``num_prompts`` prompts of the training set, which the checkpoint records as
        consumed; every rank must take the same number.
        """
        taken: list[Prompt] = self.trainer.datamodule.take(num_prompts)  # type: ignore[attr-defined]
        return taken

    def _keep(self, batch: RolloutBatch) -> RolloutBatch:
        """Drop trajectories whose reward failed, and those that :meth:`keep_sequences` does not select."""
        assert batch.rewards is not None
        batch = batch.select((~batch.rewards.isnan()).nonzero()[:, 0])
        kept = returned_tensor(self.keep_sequences(batch), batch.num_trajectories, "keep_sequences", "trajectories")
        return batch.select(kept.nonzero()[:, 0])
