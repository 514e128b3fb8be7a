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


def split_microbatches(lengths: Sequence[int], max_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Pack sequences into as few micro-batches as their tokens ask for, of about equal size.

    The longest sequence goes first, each into the emptiest of the micro-batches (longest-processing-time rule); one
    more is opened only when a sequence fits nowhere.

    Args:
        lengths: [N], in tokens.
        max_tokens: no micro-batch holds more, except one of a single longer sequence.
        at_least: make as many, though tokens ask for fewer, as far as there are sequences.

    Returns:
        Sequence indices, a list a micro-batch.
    """
    num_bins = max(at_least, -(-sum(lengths) // max_tokens))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, i) for i in range(num_bins)]
    for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, index = emptiest[0]
        if tokens and tokens + lengths[sequence] > max_tokens:
            index = len(bins)
            bins.append([sequence])
            heapq.heappush(emptiest, (lengths[sequence], index))
            continue
        bins[index].append(sequence)
        heapq.heapreplace(emptiest, (tokens + lengths[sequence], index))
    return [sorted(one) for one in bins if one]
