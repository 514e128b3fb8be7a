"""Cutting a rollout into minibatches and micro-batches.

A minibatch is what one optimizer step sees, over all ranks: a list of groups. A micro-batch is what one forward pass
sees: a list of this rank's sequences.
"""

import heapq
from collections.abc import Sequence

import torch


def split_minibatches(num_groups: int, num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Deal groups out to minibatches at random, as evenly as they can be.

    Args:
        num_groups: of all ranks.
        num_minibatches: at most the number of groups are made.
        generator: decides which groups go together; equal on all ranks.

    Returns:
        Groups in ``range(num_groups)``, a list a minibatch; every group in exactly one.
    """
    order = torch.randperm(num_groups, generator=generator).tolist() if num_minibatches > 1 else list(range(num_groups))
    dealt = min(num_minibatches, num_groups)
    return [order[first::dealt] for first in range(dealt)]


def split_microbatches(
    lengths: Sequence[int], max_tokens: int, *, costs: Sequence[float] | None = None, at_least: int = 1
) -> list[list[int]]:
    """Pack sequences into as few micro-batches as their tokens ask for, of about equal cost.

    The longest sequence goes first, each into the cheapest of the micro-batches that have room for it
    (longest-processing-time rule); one more is opened only when a sequence fits nowhere.

    Args:
        lengths: [N], in tokens.
        max_tokens: no micro-batch holds more, except one of a single longer sequence.
        costs: [N], of each sequence, which grow with its length; its tokens unless given. Attention makes a long
            sequence dearer than several short ones of as many tokens.
        at_least: make as many, though tokens ask for fewer, as far as there are sequences.

    Returns:
        Sequence indices, a list a micro-batch.
    """
    costs = lengths if costs is None else costs
    bins: list[list[int]] = [[] for _ in range(max(at_least, -(-sum(lengths) // max_tokens)))]
    cheapest = [(0.0, 0, index) for index in range(len(bins))]  # (cost, tokens, index), a heap
    shortest = min(lengths, default=0)
    for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, too_full = lengths[sequence], []
        while cheapest and cheapest[0][1] and cheapest[0][1] + length > max_tokens:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            heapq.heappush(cheapest, (0.0, 0, len(bins)))
            bins.append([])
        cost, tokens, index = cheapest[0]
        bins[index].append(sequence)
        heapq.heapreplace(cheapest, (cost + costs[sequence], tokens + length, index))
        for one in too_full:
            if one[1] + shortest <= max_tokens:  # others have room for no sequence any more
                heapq.heappush(cheapest, one)
    return [sorted(one) for one in bins if one]
