"""Distribute the ranks' trajectories over mini-batches and micro-batches so that each rank has about equal work.

Every rank samples and rewards prompts of its own. Lengths differ, and a rank with more work would let the others wait
in the update; tensor-parallel neighbours must compute on the same batch. So whole groups move::

    rank 0: groups 0 1     ->  data-parallel rank 0 (ranks 0 and 1): groups 0 3
    rank 1: groups 2 3     ->  data-parallel rank 1 (ranks 2 and 3): groups 1 2 ...

Groups are numbered through in the order of ranks, which is the order that one process would have them in: what is made
from the numbers (minibatches) does not depend on the number of ranks.

A minibatch is what one optimizer step sees, over all ranks: a list of groups. A micro-batch is what one forward pass
sees: a list of this rank's sequences.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlightning.parallel.collectives import all_to_all_objects, gather_objects, global_rank, world_size
from rlightning.seeds import mix_seed, run_seed
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import Prefixes, find_prefixes

Batch = TypeVar("Batch", bound=RolloutBatch)
MIN_SHARED = 0.2
"""Least share of a sequence's tokens that others have too for these tokens to be computed once for all."""
MIN_GAIN = 0.95
"""Maximum time of an update, as a share of its time before, for which groups are moved once more."""


def balance(
    batch: Batch,
    costs: Callable[[RolloutBatch], Tensor] = lambda batch: batch.lengths,
    *,
    num_minibatches: int = 1,
    seed: int = 0,
    tensor_parallel_size: int = 1,
) -> Batch:
    """Move whole groups between ranks so that all data-parallel ranks have about equal work in each minibatch.

    Args:
        batch: this rank's trajectories, on the CPU.
        costs: of each sequence [N]; its tokens by default.
        num_minibatches: that the groups are assigned to, each of which is balanced.
        seed: of the assignment (:func:`assign_minibatches`).
        tensor_parallel_size: so many neighbouring ranks get the same trajectories.

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
    owner = assign_groups(all_costs, minibatches, world_size() // tensor_parallel_size)
    batch.group_ids = group + first
    return _move(batch, torch.tensor(owner, dtype=torch.int64)[batch.group_ids], tensor_parallel_size)


def rebalance(batch: Batch, costs: Tensor, *, num_minibatches: int, seed: int, tensor_parallel_size: int = 1) -> Batch:
    """Move groups between ranks again if their costs are no longer balanced; the arguments are those of
    :func:`balance`.

    Args:
        batch: what :func:`balance` gave this rank.
        costs: [N], of each sequence.

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
    owner = reassign_groups(all_costs, minibatches, before, len(tables))
    if owner == before:
        return batch
    here = global_rank() % tensor_parallel_size == 0
    return _move(batch if here else batch.select([]), torch.tensor(owner)[batch.group_ids], tensor_parallel_size)


def reassign_groups(
    costs: Sequence[float], minibatches: Sequence[Sequence[int]], before: Sequence[int], num_ranks: int
) -> list[int]:
    """Return the rank of each group as :func:`assign_groups` does, or the current ranks if moving saves too little.

    Groups that cost nothing stay where they are.
    """
    assigned = assign_groups(costs, minibatches, num_ranks)
    owner = [new if cost else old for cost, new, old in zip(costs, assigned, before, strict=True)]
    work = [_slowest(costs, minibatches, placement) for placement in (before, owner)]
    return list(before) if work[1] >= MIN_GAIN * work[0] else owner


def _slowest(costs: Sequence[float], minibatches: Sequence[Sequence[int]], owner: Sequence[int]) -> float:
    """Return the cost of the busiest rank, for which the others wait, summed over the minibatches."""
    total = 0.0
    for minibatch in minibatches:
        load: defaultdict[int, float] = defaultdict(float)
        for group in minibatch:
            load[owner[group]] += costs[group]
        total += max(load.values(), default=0.0)
    return total


def _move(batch: Batch, owner: Tensor, tensor_parallel_size: int) -> Batch:
    """Send each trajectory [M] to the ranks of its new data-parallel rank; return those received, in order of group."""
    shares_by_rank = {}
    for data_parallel_rank in set(owner.tolist()) if batch.num_trajectories else ():
        share = batch.select((owner == data_parallel_rank).nonzero()[:, 0])
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
    """Assign the groups of all ranks to minibatches at random, with a new assignment for each epoch.

    It follows from the arguments alone, so that all ranks get the same, and so do balance and update.

    Returns:
        For each epoch its minibatches, each a list of groups.
    """
    order = torch.Generator().manual_seed(seed)
    return [split_minibatches(num_groups, num_minibatches, order) for _ in range(num_epochs)]


def split_minibatches(num_groups: int, num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Split groups at random into minibatches whose numbers of groups differ by at most one.

    Args:
        num_groups: of all ranks.
        num_minibatches: at most the number of groups are made.
        generator: decides which groups go together; equal on all ranks.

    Returns:
        Groups in ``range(num_groups)``, a list a minibatch; every group in exactly one.
    """
    order = torch.randperm(num_groups, generator=generator).tolist() if num_minibatches > 1 else list(range(num_groups))
    count = min(num_minibatches, num_groups)
    return [order[first::count] for first in range(count)]


def minibatch_seed(weight_version: int) -> int:
    """Return the seed of :func:`assign_minibatches` for a weight version, which is the same on all ranks."""
    return mix_seed(run_seed() or 0, "mini-batches", weight_version)


def assign_groups(costs: Sequence[float], minibatches: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return a rank for each group: in each minibatch, the most expensive group first, to the rank with the least work.

    Of ranks that are level the one with the least work over all minibatches is taken, so that no rank stays without
    a group as long as there are enough.

    Args:
        costs: [G], of each group.
        minibatches: groups, a list a minibatch.
        num_ranks: data-parallel ones.

    Returns:
        [G] ranks.
    """
    owner = [0] * len(costs)
    total = [0.0] * num_ranks
    for minibatch in minibatches:
        load = [0.0] * num_ranks
        for group in sorted(minibatch, key=lambda g: -costs[g]):
            rank = min(range(num_ranks), key=lambda r: (load[r], total[r]))
            owner[group] = rank
            load[rank] += costs[group]
            total[rank] += costs[group]
    return owner


def find_long_prefixes(batch: RolloutBatch) -> Prefixes:
    """Return the prefixes that sequences of a batch on the CPU share, 0 if below :data:`MIN_SHARED` of a sequence."""
    order, lengths = find_prefixes(batch.token_ids, batch.cu_seqlens)
    return Prefixes(order, np.where(lengths >= MIN_SHARED * batch.lengths.numpy(), lengths, 0))


def join_families(
    prefixes: Prefixes, lengths: Sequence[int], max_tokens: int, path_share: float
) -> tuple[list[list[int]], list[float]]:
    """Join sequences whose common prefix is so long that one micro-batch should compute it once.

    Args:
        prefixes: of all sequences.
        lengths: [N], in tokens.
        max_tokens: of a family; one that has more is cut, and each part computes the prefix again.
        path_share: what a shared token takes of the memory of one that is computed, where its key and value are copied.

    Returns:
        Sequences, a list a family, in the order of their first ones; and the tokens that each family takes.
    """
    families: list[list[int]] = []
    tokens: list[float] = []
    for n in prefixes.order:
        shared = int(prefixes.lengths[n])
        added = lengths[n] - (1 - path_share) * shared
        if families and shared >= MIN_SHARED * lengths[n] and tokens[-1] + added <= max_tokens:
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

    The longest sequence goes first, each into the cheapest of the micro-batches that have room for it
    (longest-processing-time rule); one more is opened only when a sequence fits nowhere.

    Args:
        lengths: [N], in tokens.
        max_tokens: no micro-batch holds more, except one of a single longer sequence.
        costs: [N], of each sequence, which grow with its length; its tokens unless given. Attention makes a long
            sequence more expensive than several short ones of as many tokens.
        at_least: make as many, though tokens ask for fewer, as far as there are sequences.

    Returns:
        Sequence indices, a list a micro-batch.
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
            if one[1] + shortest <= max_tokens:  # others have room for no sequence any more
                heapq.heappush(cheapest, one)
    return [sorted(one) for one in bins if one]
