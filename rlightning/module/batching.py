"""Distributes the ranks' trajectories over mini-batches and micro-batches, so that each rank has about equal work.

Every rank samples and rewards its own prompts. Lengths differ, so that in the update other ranks would wait for the one
with the most work; and the ranks of a tensor-parallel group need the same batch. Hence whole groups are exchanged::

    rank 0: groups 0 1     ->  data-parallel rank 0 (ranks 0 and 1): groups 0 3
    rank 1: groups 2 3     ->  data-parallel rank 1 (ranks 2 and 3): groups 1 2 ...

Groups are numbered over all ranks in the order of ranks, the same as in a single process, so that minibatches, which
depend on the numbers, do not depend on the number of ranks.

A minibatch is the data of one optimizer step over all ranks: a list of groups. A micro-batch is the data of one forward
pass: a list of this rank's sequences.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlightning.models.counts import model_flops
from rlightning.parallel.collectives import all_to_all_objects, gather_objects, global_rank, world_size
from rlightning.seeds import mix_seed, run_seed
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import Prefixes, find_prefixes

Batch = TypeVar("Batch", bound=RolloutBatch)
MIN_SHARED = 0.2
"""Least share of a sequence's tokens that a shared prefix must have to be computed once for all sequences."""
LEAST_SAVED_SHARES = 0.25, 0.4
"""Least and greatest :func:`least_saved_share`. On an H100, Qwen3-0.6B's shape is slower where shared prefixes save 29%
of the tokens, and faster where they save 44%; the 4B shape takes 0.84 of the time at 29% (docs/performance.md)."""
SAVED_SHARE_BY_ATTENTION = 768
"""Ratio of :func:`least_saved_share` to attention's operations for a pair of tokens over weights of the layers'
matrices: 0.4 for Qwen3-0.6B's shape, and for the 4B shape the 0.125 from which on it would gain by its measurement."""
MIN_GAIN = 0.95
"""Groups are moved again only if this reduces the time of an update to this share of it, or less."""


def least_saved_share(config: PreTrainedConfig) -> float:
    """Return the least share of an update's tokens that shared prefixes must save to be computed once with
    ``share_prefixes="auto"``.

    They cost further calls of attention, which take a smaller part of the time the more weights a layer has.
    """
    sizes, (least, most) = model_flops(config), LEAST_SAVED_SHARES
    attention = sizes.pair * sum(num_layers for _, num_layers in sizes.windows)
    return min(max(SAVED_SHARE_BY_ATTENTION * attention / sizes.matrices, least), most)


def balance(
    batch: Batch,
    costs: Callable[[RolloutBatch], Tensor] = lambda batch: batch.lengths,
    *,
    num_minibatches: int = 1,
    seed: int = 0,
    tensor_parallel_size: int = 1,
) -> Batch:
    """Exchange whole groups between ranks, so that all data-parallel ranks have about equal work in each minibatch, and
    return this rank's groups. Every rank must call it.

    Args:
        batch: this rank's trajectories, on the CPU.
        costs: returns the cost of each sequence [N]; by default its number of tokens.
        num_minibatches: number of minibatches, each of which is balanced.
        seed: determines the assignment to minibatches (:func:`assign_minibatches`).
        tensor_parallel_size: number of consecutive ranks that get the same trajectories.

    Returns:
        This rank's share, on the CPU; its ``group_ids`` are numbers in ``range(groups of all ranks)``, ascending.
    """
    local_ids, group = torch.unique(batch.group_ids, return_inverse=True)
    if world_size() == 1:
        batch.group_ids = group
        return batch
    group_of_sequence = group[batch.trajectory_ids]
    group_costs = torch.zeros(len(local_ids), dtype=torch.float64)
    own_costs = group_costs.index_add(0, group_of_sequence, costs(batch).double()).tolist()
    tables = gather_objects(own_costs, name="costs of groups")
    first = sum(len(table) for table in tables[: global_rank()])
    all_costs = [cost for table in tables for cost in table]
    minibatches = assign_minibatches(len(all_costs), num_minibatches, seed)[0]
    rank_of = assign_groups(all_costs, minibatches, world_size() // tensor_parallel_size)
    batch.group_ids = group + first
    return _move(batch, torch.tensor(rank_of, dtype=torch.int64)[batch.group_ids], tensor_parallel_size)


def rebalance(batch: Batch, costs: Tensor, *, num_minibatches: int, seed: int, tensor_parallel_size: int = 1) -> Batch:
    """Exchange groups between ranks again if new costs make that worthwhile, and return this rank's groups. Every rank
    must call it; other arguments are as for :func:`balance`.

    Args:
        batch: this rank's result of :func:`balance`.
        costs: [N], the cost of each sequence.

    Returns:
        This rank's share; the groups keep their numbers.
    """
    if world_size() == tensor_parallel_size:
        return batch
    numbers, group = torch.unique(batch.group_ids, return_inverse=True)
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, group[batch.trajectory_ids], costs.double())
    tables = gather_objects(dict(zip(numbers.tolist(), sums.tolist(), strict=True)), name="costs of groups")
    tables = tables[::tensor_parallel_size]  # neighbours have the same
    num_groups = sum(len(table) for table in tables)
    all_costs, before = [0.0] * num_groups, [0] * num_groups
    for rank, table in enumerate(tables):
        for number, cost in table.items():
            all_costs[number], before[number] = cost, rank
    minibatches = assign_minibatches(num_groups, num_minibatches, seed)[0]
    rank_of = reassign_groups(all_costs, minibatches, before, len(tables))
    if rank_of == before:
        return batch
    here = global_rank() % tensor_parallel_size == 0
    return _move(batch if here else batch.select([]), torch.tensor(rank_of)[batch.group_ids], tensor_parallel_size)


def reassign_groups(
    costs: Sequence[float], minibatches: Sequence[Sequence[int]], before: Sequence[int], num_ranks: int
) -> list[int]:
    """Return a new rank for each group (:func:`assign_groups`), or the current ranks, ``before``, if the update would
    hardly become faster.

    Groups without cost stay on their rank.
    """
    assigned = assign_groups(costs, minibatches, num_ranks)
    rank_of = [new if cost else old for cost, new, old in zip(costs, assigned, before, strict=True)]
    work = [_slowest(costs, minibatches, placement) for placement in (before, rank_of)]
    return list(before) if work[1] >= MIN_GAIN * work[0] else rank_of


def _slowest(costs: Sequence[float], minibatches: Sequence[Sequence[int]], rank_of: Sequence[int]) -> float:
    """Return the cost of the most loaded rank in each minibatch, summed over the minibatches."""
    total = 0.0
    for minibatch in minibatches:
        load: defaultdict[int, float] = defaultdict(float)
        for group in minibatch:
            load[rank_of[group]] += costs[group]
        total += max(load.values(), default=0.0)
    return total


def _move(batch: Batch, rank_of: Tensor, tensor_parallel_size: int) -> Batch:
    """Send each trajectory [M] to its new data-parallel rank's ranks; return the received ones, ordered by group."""
    shares_by_rank = {}
    for data_parallel_rank in set(rank_of.tolist()) if batch.num_trajectories else ():
        share = batch.select((rank_of == data_parallel_rank).nonzero()[:, 0])
        for neighbour in range(tensor_parallel_size):
            shares_by_rank[data_parallel_rank * tensor_parallel_size + neighbour] = share
    received = list(all_to_all_objects(shares_by_rank, name="groups to their ranks").values()) or [batch.select([])]
    numbers = torch.cat([share.group_ids for share in received])
    if bool((numbers.diff() < 0).any()):
        single = [
            part.select((part.group_ids == number).nonzero()[:, 0])
            for part in received
            for number in part.group_ids.unique()
        ]
        received = sorted(single, key=lambda part: int(part.group_ids[0]))
        numbers = torch.cat([share.group_ids for share in received])
    merged = type(batch).concatenate(received)
    merged.group_ids = numbers
    return merged


def assign_minibatches(num_groups: int, num_minibatches: int, seed: int, num_epochs: int = 1) -> list[list[list[int]]]:
    """Return a random assignment of the groups of all ranks to minibatches, a new one for each epoch.

    The result depends only on the arguments, so that it is the same on all ranks, and in balance and update.

    Args:
        num_groups: number of groups of all ranks.
        num_minibatches: number of minibatches of an epoch; fewer if there are fewer groups. Their numbers of groups
            differ by at most one.
        seed: seed of the random order.
        num_epochs: number of epochs.

    Returns:
        For each epoch its minibatches, each a list of groups in ``range(num_groups)``; every group is in exactly one.
    """
    generator, count = torch.Generator().manual_seed(seed), min(num_minibatches, num_groups)
    epochs = []
    for _ in range(num_epochs):
        order = list(range(num_groups))
        if num_minibatches > 1:
            order = torch.randperm(num_groups, generator=generator).tolist()
        epochs.append([order[first::count] for first in range(count)])
    return epochs


def minibatch_seed(weight_version: int) -> int:
    """Return the seed for :func:`assign_minibatches` at a weight version; it is equal on all ranks."""
    return mix_seed(run_seed() or 0, "mini-batches", weight_version)


def assign_groups(costs: Sequence[float], minibatches: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return a rank for each group: in each minibatch, the most expensive group first, to the rank with the least work.

    Between ranks with equal work in the minibatch, the one with the least work over all minibatches is chosen, so that
    every rank gets a group if there are enough.

    Args:
        costs: [G], the cost of each group.
        minibatches: a list of groups for each minibatch.
        num_ranks: number of data-parallel ranks.

    Returns:
        [G] ranks.
    """
    rank_of = [0] * len(costs)
    total = [0.0] * num_ranks
    for minibatch in minibatches:
        load = [0.0] * num_ranks
        for group in sorted(minibatch, key=lambda g: -costs[g]):
            rank = min(range(num_ranks), key=lambda r: (load[r], total[r]))
            rank_of[group] = rank
            load[rank] += costs[group]
            total[rank] += costs[group]
    return rank_of


def find_long_prefixes(batch: RolloutBatch, groups: Sequence[int] | None = None) -> Prefixes:
    """Return the length of the prefix that each sequence of a batch on the CPU shares with another; 0 if it is less
    than the share :data:`MIN_SHARED` of the sequence.

    Args:
        batch: a batch on the CPU.
        groups: [N]; sequences of different groups share nothing. None for a single group.
    """
    order, lengths = find_prefixes(batch.token_ids, batch.cu_seqlens, groups)
    return Prefixes(order, np.where(lengths >= MIN_SHARED * batch.lengths.numpy(), lengths, 0))


def join_families(
    prefixes: Prefixes, lengths: Sequence[int], max_tokens: int, path_share: float
) -> tuple[list[list[int]], list[float]]:
    """Group sequences with a long common prefix into families; a family stays in one micro-batch, which computes the
    prefix once.

    Args:
        prefixes: of all sequences, from :func:`find_long_prefixes`.
        lengths: [N], in tokens.
        max_tokens: maximum tokens of a family; a larger family is split, and each part computes the prefix.
        path_share: memory of a shared token, whose key and value are copied, as a share of a computed token's memory.

    Returns:
        For each family a list of sequences, in the order of first sequences; and the effective tokens of each family.
    """
    families: list[list[int]] = []
    tokens: list[float] = []
    for n in prefixes.order:
        shared = int(prefixes.lengths[n])
        added = lengths[n] - (1 - path_share) * shared
        if families and shared and tokens[-1] + added <= max_tokens:
            families[-1].append(n)
            tokens[-1] += added
        else:
            families.append([n])
            tokens.append(lengths[n])
    order = sorted(range(len(families)), key=lambda f: min(families[f]))
    return [families[f] for f in order], [tokens[f] for f in order]


def split_microbatches(
    lengths: Sequence[float], max_tokens: int, *, costs: Sequence[float] | None = None, at_least: int = 1
) -> list[list[int]]:
    """Pack sequences into as few micro-batches as the token limit allows, of about equal cost.

    Sequences are assigned in order of decreasing length, each to the cheapest micro-batch with room for it
    (longest-processing-time rule); a new one is opened only if there is no room.

    Args:
        lengths: [N], in tokens.
        max_tokens: maximum tokens of a micro-batch, except for a single longer sequence.
        costs: [N], the cost of each sequence, increasing with its length; None for its number of tokens. Attention
            makes a long sequence more expensive than several short ones with the same total number of tokens.
        at_least: minimum number of micro-batches, if there are as many sequences.

    Returns:
        For each micro-batch a list of sequence indices.
    """
    costs = lengths if costs is None else costs
    bins: list[list[int]] = [[] for _ in range(max(at_least, math.ceil(sum(lengths) / max_tokens)))]
    cheapest = [(0.0, 0.0, index) for index in range(len(bins))]  # (cost, tokens, index), a heap
    shortest = min(lengths, default=0)
    for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, too_full = lengths[sequence], []
        while cheapest and cheapest[0][1] and cheapest[0][1] + length > max_tokens:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            heapq.heappush(cheapest, (0.0, 0.0, len(bins)))
            bins.append([])
        cost, tokens, index = cheapest[0]
        bins[index].append(sequence)
        heapq.heapreplace(cheapest, (cost + costs[sequence], tokens + length, index))
        for one in too_full:
            if one[1] + shortest <= max_tokens:  # the other micro-batches are full
                heapq.heappush(cheapest, one)
    return [sorted(one) for one in bins if one]
