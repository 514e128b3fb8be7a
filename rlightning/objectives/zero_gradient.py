"""Checks whether a loss can have a gradient on given sequences, by differentiating it without a model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlightning.objectives.components import ForwardPass, LossComponent
from rlightning.types import RolloutBatch

LOG_RATIO_SCALES = (0.0, 0.01, 0.3, 3.0)
"""Standard deviations of the random log-ratios between the tested log-probabilities and the old ones."""
ROLLOUT_SCALES = (None, 0.0, 0.01)
"""Standard deviations of random log-ratios between the tested old log-probs and the sampler's; None for unrelated."""
MIN_LOGPROB = -60.0


def has_zero_gradient(components: Sequence[LossComponent], batch: RolloutBatch) -> bool:
    """Return whether no loss term can have a gradient on these sequences, whatever log-probabilities the model returns.

    Each term is differentiated at random log-probabilities and entropies, with importance ratios of exactly 1, near 1,
    and far beyond every clip; and with old log-probabilities equal to the sampler's, near them, and far beyond every
    bound of a correction. A term that trains another model than the actor, such as a critic, counts as having a
    gradient.

    Args:
        components: terms of the loss; those of weight 0 are ignored.
        batch: a micro-batch with the fields that the terms read. Its ``old_logprobs`` are replaced.
    """
    with torch.random.fork_rng(devices=[batch.token_ids.device] if batch.token_ids.is_cuda else []):
        torch.manual_seed(0)
        # Every term at every draw, although one may suffice: ranks would differ, and a term may run a sharded model.
        found = [
            _has_gradient(component, batch, scale, rollout_scale)
            for scale in LOG_RATIO_SCALES
            for rollout_scale in ROLLOUT_SCALES
            for component in components
            if component.weight
        ]
    return not found or not bool(torch.stack(found).any())  # synchronizes with the device once


def _has_gradient(component: LossComponent, batch: RolloutBatch, scale: float, rollout_scale: float | None) -> Tensor:
    """Return, as a scalar tensor, whether a loss term has a gradient at random log-probabilities and entropies."""
    mask = batch.is_sampled
    likely, entropy, weights = torch.rand(3, batch.num_tokens, device=mask.device)
    evenly = -0.001 * 30000**likely  # between -30 and -0.001 nats, uniform in the logarithm
    old = evenly if rollout_scale is None else _scatter(batch.rollout_logprobs, rollout_scale)
    logprobs, entropy = (
        torch.where(mask, values, 0).requires_grad_() for values in (_scatter(old, scale), 5 * entropy)
    )
    given = replace(batch, old_logprobs=torch.where(mask, old, 0))
    losses, _ = component.term(ForwardPass(logprobs, entropy), given)
    # Each token's loss with a different weight, so that gradients of several tokens do not cancel.
    total = torch.where(mask, losses * (0.5 + weights), 0).sum()
    if not total.requires_grad:
        return mask.new_zeros(())
    if any(leaf is not logprobs and leaf is not entropy for leaf in _leaves(total)):
        return mask.new_ones(())
    gradients = torch.autograd.grad(total, [logprobs, entropy], allow_unused=True, materialize_grads=True)
    return (torch.stack(gradients) != 0).any()  # NaN is not 0


def _scatter(logprobs: Tensor, scale: float) -> Tensor:
    """Multiply log-probabilities by random log-normal factors; ``scale`` is the logarithm's standard deviation."""
    return (logprobs * torch.exp(scale * torch.randn_like(logprobs))).clamp(min=MIN_LOGPROB)


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that a backward pass from a value would reach."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and isinstance(node.variable, Tensor):  # an AccumulateGrad node
            yield node.variable
        waiting += [following for following, _ in node.next_functions]
