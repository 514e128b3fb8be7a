"""UpdateModule: runs the optimizer steps on a rollout with advantages."""

import logging
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlightning.errors import check_rules
from rlightning.models import load_config, packed_logprobs
from rlightning.models.adapter_layers import adapter_off
from rlightning.models.files import check_export
from rlightning.module.batching import assign_minibatches, minibatch_seed, rebalance
from rlightning.module.metrics import RunningMeans
from rlightning.module.optimizers import (
    drop_untrained,
    learning_rates,
    step_optimizers,
    step_schedules,
    wrapped_optimizers,
)
from rlightning.module.overrides import UPDATE_METHODS, find_override, is_own
from rlightning.module.policy_module import PolicyModule
from rlightning.module.returned_values import returned_loss
from rlightning.module.roles import REFERENCE, ModelRole, clip_by_role
from rlightning.objectives import (
    Aggregation,
    ForwardPass,
    KLEstimator,
    LossComponent,
    PolicyObjective,
    ReferenceKL,
    RolloutCorrection,
    approximate_proximal,
    check_names,
    entropy,
    has_zero_gradient,
    sum_components,
)
from rlightning.objectives.policy import TokenLoss
from rlightning.parallel.collectives import all_reduce
from rlightning.parallel.device import exact_float32
from rlightning.rollout import Sampling
from rlightning.types import LossTotals, RolloutBatch
from rlightning.types.axes import move
from rlightning.types.batch_plan import BatchPlan

log = logging.getLogger(__name__)

SKIPPED_SHARE = "policy/skipped_share"
SHARED_SHARE = "attention/shared_share"


class UpdateModule(PolicyModule):
    """A PolicyModule that updates its actor on rollouts::

        rollout -> mini-batches (optimizer steps) -> micro-batches (forward passes) -> loss components

    Args:
        model: a Hugging Face model with its tokenizer, a folder or a name on the hub.
        prompts_per_step: prompts of a rollout, over all ranks.
        samples_per_prompt: trajectories of each prompt, which form a group.
        updates_per_rollout: number of minibatches, which are optimizer steps, into which each rollout is split.
        epochs_per_rollout: passes over each rollout.
        max_tokens_per_microbatch: maximum tokens of one forward pass.
        kl_coef: weight of the KL divergence from the reference model; 0 to use no reference model.
        kl_estimator: see :func:`~rlightning.objectives.kl.estimate_kl`.
        kl_placement: whether the KL is added to the loss, or subtracted from the reward.
        entropy_coef: weight of the entropy bonus.
        loss_aggregation: see :func:`~rlightning.objectives.aggregation.aggregate`.
        rollout_correction: importance weights of tokens for the difference between sampler and trainer; "auto" for
            truncated importance sampling if tokens may be stale (``rollout.max_staleness``), otherwise none.
        proximal_policy: whether log-probabilities before a rollout's first update are "recomputed", by their own
            forward pass, or "approximated" (:func:`~rlightning.objectives.corrections.approximate_proximal`). With a
            single optimizer step for each rollout, they are taken from the update's forward pass.
        reference_model: model for ``kl_coef``; None for ``model``, or with an adapter the actor without it.
        kwargs: arguments of :class:`~rlightning.module.policy_module.PolicyModule`.

    Attributes:
        plan: numbers of prompts, samples, minibatches and epochs of a step.
        policy_objective: the policy loss, set by an algorithm that does not override :meth:`policy_loss`.
        sampling: settings of the sampler; set by the rollout callback.
        weight_version: number of rollouts on which the actor has been updated.
    """

    generates = True
    """Whether training samples completions, and so needs an engine."""

    def __init__(
        self,
        model: str | Path,
        *,
        prompts_per_step: int = 32,
        samples_per_prompt: int = 8,
        updates_per_rollout: int = 1,
        epochs_per_rollout: int = 1,
        max_tokens_per_microbatch: int = 16384,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        kl_placement: Literal["loss", "reward"] = "loss",
        entropy_coef: float = 0.0,
        loss_aggregation: Aggregation = "token_mean",
        rollout_correction: RolloutCorrection | Literal["auto"] | None = "auto",
        reference_model: str | Path | None = None,
        proximal_policy: Literal["recomputed", "approximated"] = "recomputed",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.reference_path, self.reference_config = os.path.expanduser(reference_model or model), self.model_config
        if kl_coef and self.reference_path != self.model_path:
            # checked before anything is loaded or started
            check_export(self.reference_path)
            self.reference_config = load_config(self.reference_path, trust_remote_code=self.trust_remote_code)
        self.plan = BatchPlan(
            prompts_per_step=prompts_per_step,
            samples_per_prompt=samples_per_prompt,
            updates_per_rollout=updates_per_rollout,
            epochs_per_rollout=epochs_per_rollout,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        penalty = "must be finite and at least 0: it is a penalty. Use 0 for none"
        check_rules(
            {
                f"kl_coef={kl_coef} {penalty}": 0 <= kl_coef < math.inf,
                f"entropy_coef={entropy_coef} must be finite. Use 0 for no bonus": math.isfinite(entropy_coef),
            }
        )
        self.kl_coef, self.kl_estimator, self.kl_placement = kl_coef, kl_estimator, kl_placement
        self.entropy_coef, self.loss_aggregation = entropy_coef, loss_aggregation
        self.rollout_correction = rollout_correction
        self.active_correction = rollout_correction if isinstance(rollout_correction, RolloutCorrection) else None
        self.proximal_policy = proximal_policy
        self.policy_objective: PolicyObjective | None = None
        self.sampling = Sampling()
        self.weight_version = 0
        self._update_progress = 0.0
        self._untrained: set[str] = set()  # parameters with a gradient and no optimizer, of which a warning was logged

    @property
    def prompts_per_step(self) -> int:
        """The number of prompts of a rollout, over all ranks."""
        return self.plan.prompts_per_step

    @property
    def samples_per_prompt(self) -> int:
        """The number of completions of each prompt."""
        return self.plan.samples_per_prompt

    def configure_roles(self) -> dict[str, ModelRole]:
        """Return the actor, and a frozen reference if the KL needs a model other than the actor's own base."""
        roles = super().configure_roles()
        if self.kl_coef and not self.is_own_reference:
            load = partial(self.load_model, self.reference_path, is_trained=False)
            roles[REFERENCE] = ModelRole(load=load, config=self.reference_config)
        return roles

    def on_fit_start(self) -> None:
        """Raise a ConfigError for optimizers that cannot be stepped, and for terms of the loss with one name; log
        which override has sequences without advantage computed.
        """
        super().on_fit_start()
        check_names(self.loss_components())
        override = find_override(self, UPDATE_METHODS)
        if override is not None and self.generates and is_own(self, "skippable_sequences"):
            log.info(
                "Sequences without advantage are computed, too: %s overrides %s(), which may give them a gradient. Use "
                "loss_components() for a further term of the loss, or override skippable_sequences().",
                *(type(self).__name__, override),
            )

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference model is the actor without its adapter."""
        return self.adapter is not None and self.reference_path == self.model_path

    def evaluate_reference(self, evaluate: Callable[[PreTrainedModel], Tensor]) -> Tensor:
        """Return the result of ``evaluate`` for the reference model: [T] log-probabilities; every rank must call it."""
        if self.is_own_reference:
            with adapter_off(self.loaded_actor):
                return evaluate(self.loaded_actor)
        reference = self.roles[REFERENCE].network
        assert isinstance(reference, PreTrainedModel)
        return evaluate(reference)

    def choose_correction(self, max_staleness: int) -> None:
        """With ``rollout_correction="auto"``, set ``active_correction``: a correction if ``max_staleness`` is above 0
        (arXiv:2505.24298), otherwise None.
        """
        if self.rollout_correction == "auto":
            self.active_correction = RolloutCorrection() if max_staleness > 0 else None
        if self.rollout_correction == "auto" and self.active_correction is not None:
            log.info(
                "Completions may be %s old: each token's loss is weighed by the ratio of its probabilities now "
                "and when it was sampled, up to %g. model.rollout_correction: null leaves that out.",
                "1 update" if max_staleness == 1 else f"{max_staleness} updates",
                self.active_correction.bounds[1],
            )

    def rebalance(self, batch: RolloutBatch) -> RolloutBatch:
        """Set ``batch.is_skipped``, and exchange groups between ranks to balance the cost of the other sequences. Every
        rank must call it.

        Args:
            batch: a batch with advantages, on the CPU.

        Returns:
            This rank's part of the batch after the exchange.
        """
        is_skipped = self.decide_skipped(batch)
        return rebalance(
            batch,
            self.costs(batch).masked_fill(is_skipped, 0.0),
            num_minibatches=self.plan.updates_per_rollout,
            seed=minibatch_seed(self.weight_version),
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def decide_skipped(self, batch: RolloutBatch) -> Tensor:
        """Set ``batch.is_skipped`` to :meth:`skippable_sequences`, unless it is equal, and return it: [N] bool. Every
        rank must call it.
        """
        skippable = self.skippable_sequences(batch)
        if batch.is_skipped is None or not torch.equal(batch.is_skipped, skippable):
            batch.is_skipped = skippable  # a controller's workers store a changed batch once more
        return skippable

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Run the rollout's optimizer steps, which count as one step of the Trainer, and return the update's metrics;
        every rank must call it.

        Args:
            batch: a batch with advantages, on the CPU.
        """
        optimizers = wrapped_optimizers(self)
        means = RunningMeans()
        minibatches = self._minibatches(batch)
        for number, minibatch in enumerate(minibatches, start=1):
            self._update_progress = (number - 1) / len(minibatches)
            self.accumulate_gradients(batch.select(minibatch), means)
            drop_untrained(self, optimizers, self._untrained)
            self.average_gradients()
            means.add(clip_by_role(self, self.roles))
            # Lightning runs training_step() under autocast, which would round an optimizer's products.
            with torch.autocast(self.device.type, enabled=False), exact_float32():
                step_optimizers(optimizers, is_last=number == len(minibatches))
        rates = learning_rates(optimizers)
        step_schedules(self.trainer.lr_scheduler_configs, self.trainer.global_step)
        metrics = means.compute(self.all_sum, self.all_max)
        if metrics.get(SKIPPED_SHARE) == 1:  # every token was skipped: there is no mean
            computed = {name for name in metrics if name.startswith("policy/")} - {SKIPPED_SHARE}
            metrics |= dict.fromkeys(computed, math.nan)
        return metrics | rates

    def skip_update(self) -> dict[str, float]:
        """Advance the Trainer's step count and the schedules without changing weights, and return the metrics of this
        skipped update.
        """
        optimizers = wrapped_optimizers(self)
        for optimizer in optimizers:
            optimizer.zero_grad()  # with gradients of None, a step changes nothing
        step_optimizers(optimizers, is_last=True)
        rates = learning_rates(optimizers)
        step_schedules(self.trainer.lr_scheduler_configs, self.trainer.global_step)
        return {"optim/skipped": 1.0} | rates

    def skippable_sequences(self, batch: RolloutBatch) -> Tensor:
        """Return which sequences have no gradient, so that forward and backward can skip them; every rank must call it.

        These are the sequences with zero advantage on all sampled tokens, if no term of the loss has a gradient on them
        on any rank (:func:`~rlightning.objectives.zero_gradient.has_zero_gradient`), and if no method between rollout
        and gradient is overridden (:data:`~rlightning.module.overrides.UPDATE_METHODS`). Normalisers still count them.
        An override that returns False everywhere computes all sequences.

        Args:
            batch: a batch with advantages, on the CPU.

        Returns:
            [N] bool.
        """
        skippable = torch.zeros(batch.num_sequences, dtype=torch.bool)
        if find_override(self, UPDATE_METHODS) is not None:
            return skippable
        if batch.advantages is not None:
            has_advantage = (batch.advantages != 0) & batch.is_sampled
            skippable = batch.sum_tokens(has_advantage.long(), "N") == 0
        components = [replace(one, term=partial(checked_term, one)) for one in self.loss_components()]
        counted = replace(batch)
        count_units(counted)
        # All ranks make the same number of passes: a term may compute with a sharded model.
        candidates = counted.select(skippable.nonzero()[:, 0], "N")
        for sequences in self.split_microbatches(candidates, self.plan.max_tokens_per_microbatch):
            microbatch = self.to_microbatch(candidates, sequences)
            microbatch.totals = LossTotals(1.0, 1.0, 1.0, 1.0, 1.0)
            has_gradient = not has_zero_gradient(components, microbatch)
            if self.all_max(torch.tensor(float(has_gradient))):
                return torch.zeros_like(skippable)
        return skippable

    def _minibatches(self, batch: RolloutBatch) -> list[Tensor]:
        """Return the indices of this rank's trajectories in each minibatch of the rollout; some may be empty."""
        groups = batch.group_ids
        num_groups = int(all_reduce(torch.cat([groups, groups.new_tensor([-1])]).max(), "max")) + 1
        plan, seed = self.plan, minibatch_seed(self.weight_version)
        epochs = assign_minibatches(num_groups, plan.updates_per_rollout, seed, plan.epochs_per_rollout)
        return [torch.isin(groups, torch.tensor(chosen)).nonzero()[:, 0] for epoch in epochs for chosen in epoch]

    def accumulate_gradients(self, minibatch: RolloutBatch, means: RunningMeans) -> None:
        """Run forward and backward over one minibatch, adding to gradients and to ``means``; the number of
        micro-batches does not change the gradient. Every rank must call it.

        The host never waits for the device, so that it can queue work in advance.
        """
        totals = LossTotals(*self.all_sum(count_units(minibatch)).tolist())
        if minibatch.is_skipped is not None:
            sampled = minibatch.sampled_lengths
            skipped = torch.stack([(minibatch.is_skipped * sampled).sum(), sampled.sum()])
            means.add_share(SKIPPED_SHARE, *move(skipped, self.device))
            minibatch = minibatch.select((~minibatch.is_skipped).nonzero()[:, 0], "N")
        # If no rank has a sequence, gradients are 0 rather than None: optimizers then step by their moments.
        microbatches = self.split_microbatches(minibatch, self.plan.max_tokens_per_microbatch) or [[]]
        for number, sequences in enumerate(microbatches, start=1):
            batch = self.to_microbatch(minibatch, sequences)
            batch.totals = totals
            num_computed = batch.num_tokens if batch.shared is None else batch.shared.unique.numel()
            shared = torch.tensor([batch.num_tokens - num_computed, batch.num_tokens * bool(sequences)])
            means.add_share(SHARED_SHARE, *move(shared, self.device))
            # The strategy averages gradients over ranks, but the loss is already divided by the tokens of all ranks.
            with self.local_gradients() if number < len(microbatches) else nullcontext():
                self.manual_backward(self.loss(batch, means) * self.data_parallel_size)

    def loss(self, batch: RolloutBatch, means: RunningMeans) -> Tensor:
        """Return this micro-batch's share of the minibatch's loss, the sum of :meth:`loss_components`, and add its
        metrics to ``means``.
        """
        forward = ForwardPass(*self.compute_logprobs(batch))
        if batch.old_logprobs is None:
            staleness = self.weight_version - batch.weight_versions
            batch.old_logprobs = approximate_proximal(
                forward.logprobs, batch.rollout_logprobs, staleness, self._update_progress
            )
        components = self.loss_components()
        values: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for component in components:
            value, details = checked_term(component, forward, batch)
            values.append(value)
            metrics |= details
        if self.generates:
            gap = torch.where(batch.is_sampled, (batch.old_logprobs - batch.rollout_logprobs).abs(), 0)
            metrics["rollout_gap_mean"] = gap
            means.add_max("policy/rollout_gap_max", gap)
        metrics |= {component.name: value for component, value in zip(components, values, strict=True)}
        means.add({f"policy/{name}": value for name, value in metrics.items()}, batch.is_sampled)
        return sum_components(components, values, batch, constant=self.sampling.max_new_tokens)

    def policy_gradient(self, forward: ForwardPass, batch: RolloutBatch) -> TokenLoss:
        """Return the :meth:`policy_loss` of each token times the weight of ``rollout_correction``: [T]."""
        loss, metrics = returned_loss(self.policy_loss(forward.logprobs, batch), batch.num_tokens, "policy_loss")
        if self.active_correction is None:
            return loss, metrics
        assert batch.old_logprobs is not None
        weights, corrected = self.active_correction.importance_weights(
            batch.old_logprobs, batch.rollout_logprobs, batch.is_sampled, batch.cu_seqlens
        )
        return loss * weights, metrics | corrected

    def loss_components(self) -> list[LossComponent]:
        """Return the terms of the loss: policy loss, KL from the reference, and entropy bonus.

        An override extends or replaces the result of ``super()``.
        """
        kind = self.loss_aggregation
        components = [LossComponent("loss", self.policy_gradient, denominator=kind)]
        if self.kl_coef:
            weight = self.kl_coef if self.kl_placement == "loss" else 0.0
            components.append(LossComponent("kl", ReferenceKL(self.kl_estimator), weight=weight, denominator=kind))
        return [*components, LossComponent("entropy", entropy, weight=-self.entropy_coef, denominator=kind)]

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
        """Return the policy loss of each token; by default that of the algorithm's ``policy_objective``.

        Args:
            logprobs: [T], of the current policy, with gradient.
            batch: a micro-batch, with ``advantages`` [T] and ``old_logprobs`` [T].

        An override must have no side effects: :meth:`skippable_sequences` calls it with invented values.

        Returns:
            [T] losses, neither masked nor averaged (``loss_aggregation`` does that), and [T] values for the metrics,
            which are averaged over sampled tokens and logged as ``policy/<name>``.
        """
        if self.policy_objective is None:
            raise NotImplementedError(f"{type(self).__name__} does not define policy_loss(logprobs, batch).")
        return self.policy_objective(logprobs, batch)

    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Return the actor's log-probabilities and entropies of the sampled tokens, at the sampling temperature.

        Logits are kept for at most as many tokens as the memory plan counts: with shared prefixes a micro-batch may
        have more sampled tokens than it computes.

        Returns:
            [T] and [T], float32; 0 where not sampled.
        """
        keeps_logits = self.keeps_logits and len(batch.sampled_index) <= self.plan.max_tokens_per_microbatch
        return packed_logprobs(
            self.loaded_actor,
            batch,
            temperature=self.sampling.temperature,
            needs_entropy_grad=self.entropy_coef != 0,
            keeps_logits=keeps_logits,
        )


def checked_term(component: LossComponent, forward: ForwardPass, batch: RolloutBatch) -> TokenLoss:
    """Return the result of a loss component: [T] losses, and metrics by name; raise a ConfigError if it has another
    form.
    """
    return returned_loss(component.term(forward, batch), batch.num_tokens, component.name)


def count_units(minibatch: RolloutBatch) -> Tensor:
    """Return the numbers by which a loss can be normalised, for this rank's part of a minibatch (whole groups), and set
    ``group_lengths``, the sampled tokens of each trajectory's group.

    Returns:
        [5] float64: the numbers of sampled tokens, sequences, trajectories, groups and turns of the policy in it.
    """
    ids, group = torch.unique(minibatch.group_ids, return_inverse=True)
    lengths = minibatch.completion_lengths
    minibatch.group_lengths = lengths.new_zeros(len(ids)).index_add(0, group, lengths)[group]
    num_turns = sum(len(one.samples) for one in minibatch.trajectories)
    counts = [minibatch.is_sampled.sum(), minibatch.num_sequences, minibatch.num_trajectories, len(ids), num_turns]
    return torch.tensor(counts, dtype=torch.float64)
