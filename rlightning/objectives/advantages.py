"""Advantages from rewards: group baselines, whitening over the batch, returns; and DAPO's filter and penalty.

Statistics are computed in float64, and rewards that differ only by rounding count as equal: a group without signal has
advantages of exactly zero, rather than rounding errors divided by a tiny standard deviation.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-6
ROUNDING = 1e-9
"""Rewards in float64 whose relative difference is less count as equal: sums in another order differ by rounding."""


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """Return each reward minus its group's mean; with ``scale_by_std`` divided by the group's standard deviation.

    ``A_i = (r_i - mean(r)) / std(r)`` (GRPO, arXiv:2402.03300, section 4.1.2); without the division that of Dr. GRPO
    (arXiv:2503.20783, section 3.2). ``std`` is the sample standard deviation (over ``n - 1``), plus 1e-6.

    Args:
        rewards: [N], one for each completion.
        group_ids: [N], equal for completions of one prompt; groups may differ in size.
        scale_by_std: whether to divide.

    Returns:
        [N] float32; zeros for a group whose rewards are all equal up to rounding, and for a group of one.
    """
    centred, groups, counts = _centre_groups(rewards, group_ids)
    if scale_by_std:
        variance = _sum_groups(centred**2, groups, counts) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPSILON)[groups]
    return centred.float()


def leave_one_out(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> Tensor:
    """Return each reward minus the mean of the other rewards in its group (RLOO, arXiv:2402.14740).

    ``A_i = r_i - sum_{j != i} r_j / (n - 1)``, which is ``n / (n - 1) * (r_i - mean(r))``.

    Args:
        rewards: [N], one for each completion; or the return of each turn.
        group_ids: [N], equal for completions of one prompt; groups may differ in size.
        trajectory_ids: [N], for returns of turns: the mean excludes all turns of the same trajectory, which depend on
            each other; None to exclude only the reward itself.

    Returns:
        [N] float32; zero where a group has no other completion to compare with.
    """
    centred, groups, counts = _centre_groups(rewards, group_ids)
    if trajectory_ids is None:
        return (centred * (counts / (counts - 1).clamp(min=1))[groups]).float()
    # The part of a group that belongs to an entry's trajectory, all of its turns: [N] each.
    parts = torch.unique(torch.stack([groups, trajectory_ids]), dim=1, return_inverse=True)[1]
    sizes = torch.zeros_like(centred).index_add_(0, parts, torch.ones_like(centred))[parts]
    own = torch.zeros_like(centred).index_add_(0, parts, centred)[parts]
    others = counts[groups] - sizes
    # Centred values sum to 0 over the group, so that the others' sum is minus the part's.
    return torch.where(others > 0, centred + own / others.clamp(min=1), 0).float()


def whiten(values: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the values under ``mask``, scaled to mean 0 and standard deviation 1 over the whole batch and all ranks.

    ``(A - mean(A)) / std(A)`` over every token of the global batch (REINFORCE++, arXiv:2501.03262, eq. 10). ``std`` is
    the population's, and at least 1e-4.

    Args:
        values: [T].
        mask: [T] bool, the completion tokens.
        all_sum: sums a tensor over the data-parallel ranks; None on one rank.

    Returns:
        [T] float32; zeros outside ``mask``, and everywhere if all values are equal.
    """
    add_ranks = all_sum or (lambda tensor: tensor)
    wide = torch.where(mask, values, 0).double()
    total, count = add_ranks(torch.stack([wide.sum(), mask.sum().double()])).unbind()
    centred = torch.where(mask, wide - total / count.clamp(min=1), 0)
    variance = add_ranks((centred**2).sum()) / count.clamp(min=1)
    return (centred / variance.clamp(min=1e-8).sqrt()).float()


def token_returns(token_rewards: Tensor, cu_seqlens: Tensor, *, discount: float = 1.0) -> Tensor:
    """Return each token's discounted sum of rewards to go: ``G_t = sum_{s >= t} discount^(s-t) r_s``.

    Args:
        token_rewards: [T]; a reward of the whole completion belongs on its last token.
        cu_seqlens: [N+1], the sequences' bounds.
        discount: in [0, 1]; language tasks use 1 (REINFORCE++, arXiv:2501.03262, eq. 8).

    Returns:
        [T] float32.
    """
    returns = token_rewards.double()
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    # Recursive doubling: after k rounds each token holds the sum of the next 2^k rewards, so that a sequence of L
    # tokens takes log2(L) rounds, each over the whole batch, rather than L.
    ends = (starts + lengths).repeat_interleave(lengths)
    positions = torch.arange(returns.numel(), device=returns.device)
    reach = 1
    while lengths.numel() and reach < int(lengths.max()):
        inside = positions + reach < ends
        later = returns[(positions + reach).clamp(max=returns.numel() - 1)]
        returns = returns + torch.where(inside, discount**reach * later, 0)
        reach *= 2
    return returns.float()


def has_signal(rewards: Tensor, group_ids: Tensor, *, tolerance: float = EPSILON) -> Tensor:
    """Return which completions are in a group whose rewards differ (DAPO's dynamic sampling, arXiv:2503.14476, eq. 11).

    Args:
        rewards: [N], one for each completion.
        group_ids: [N], equal for completions of one prompt.
        tolerance: largest difference of equal rewards; rewards that differ only by rounding are always equal.

    Returns:
        [N] bool, equal within a group; False for a group of one.
    """
    _, groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    spread, rounding = _spread_groups(rewards, groups, counts.numel())
    return (spread > rounding.clamp(min=tolerance))[groups]


def overlong_penalty(lengths: Tensor, max_tokens: int | Tensor, cache_tokens: int | Tensor) -> Tensor:
    """Return a penalty for completions near the token limit (DAPO's soft overlong punishment, arXiv:2503.14476).

    The penalty (eq. 13) is 0 up to ``max_tokens - cache_tokens``, falls linearly to -1 at ``max_tokens``, and stays
    there.

    Args:
        lengths: [N], completion tokens.
        max_tokens: the limit on completion tokens, one for all or [N].
        cache_tokens: the number of tokens over which the penalty falls, one for all or [N]; 0 for no penalty.

    Returns:
        [N] float32 in [-1, 0], to be added to the rewards.
    """
    caches = torch.as_tensor(cache_tokens)
    slope = (max_tokens - caches - lengths.float()) / caches.clamp(min=1)
    return slope.clamp(min=-1.0, max=0.0).where(caches > 0, 0.0)


def _centre_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract each group's mean; the result is exactly 0 for groups whose rewards differ by rounding only.

    Returns:
        The centred rewards [N] in float64, the index [N] of each reward's group, and the groups' sizes [G] in float64.
    """
    _, groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    spread, rounding = _spread_groups(rewards, groups, counts.numel())
    rewards, counts = rewards.double(), counts.double()
    centred = rewards - (_sum_groups(rewards, groups, counts) / counts)[groups]
    return centred.masked_fill((spread <= rounding)[groups], 0.0), groups, counts


def _spread_groups(rewards: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the range of each group's rewards, and the range that rounding alone can cause: [G] each, in float64."""
    relative = max(ROUNDING, 4 * torch.finfo(rewards.dtype).eps) if rewards.is_floating_point() else 0.0
    rewards = rewards.double()
    highest = rewards.new_zeros(num_groups).scatter_reduce(0, groups, rewards, "amax", include_self=False)
    lowest = rewards.new_zeros(num_groups).scatter_reduce(0, groups, rewards, "amin", include_self=False)
    return highest - lowest, relative * torch.maximum(highest.abs(), lowest.abs())


def _sum_groups(values: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the values [N] of each group: [G]."""
    return torch.zeros_like(counts).index_add_(0, groups, values)
