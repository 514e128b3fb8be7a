"""Cutting a rollout into minibatches and micro-batches.

A minibatch is what one optimizer step sees, a micro-batch what one forward pass sees; both are lists of sequences.
"""

import heapq
from collections.abc import Sequence

import torch


def split_minibatches(group_ids: Sequence[int], num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Deal whole groups out to minibatches at random, as evenly as they can be.

    Args:
        group_ids: [N].
        num_minibatches: at most the number of groups are made.
        generator: decides which groups go together.

    Returns:
        Sequence indices, a list a minibatch; every sequence in exactly one.
    """
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(group_ids):
        members.setdefault(group, []).append(sequence)
    groups = list(members.values())
    order = torch.randperm(len(groups), generator=generator).tolist() if num_minibatches > 1 else range(len(groups))
    dealt: list[list[int]] = [[] for _ in range(min(num_minibatches, len(groups)))]
    for place, group_index in enumerate(order):
        dealt[place % len(dealt)] += groups[group_index]
    return dealt


def split_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences into as few micro-batches as their tokens ask for, of about equal size.

    The longest sequence goes first, each into the emptiest of the micro-batches (longest-processing-time rule); one
    more is opened only when a sequence fits nowhere.

    Args:
        lengths: [N], in tokens.
        max_tokens: no micro-batch holds more, except one of a single longer sequence.

    Returns:
        Sequence indices, a list a micro-batch.
    """
    num_bins = max(1, -(-sum(lengths) // max_tokens))
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
