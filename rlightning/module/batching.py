"""From each rank's own trajectories to each data-parallel rank's share of the update.

Every rank samples and rewards prompts of its own. Lengths differ, and a rank with more work would let the others wait
in the update; tensor-parallel neighbours must compute on the same batch. So whole groups move::

    rank 0: groups 0 1     ->  data-parallel rank 0 (ranks 0 and 1): groups 0 3
    rank 1: groups 2 3     ->  data-parallel rank 1 (ranks 2 and 3): groups 1 2 ...

Groups are numbered through in the order of ranks, which is the order that one process would have them in: what is made
from the numbers (minibatches) does not depend on the number of ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlightning.module.packing import split_minibatches
from rlightning.parallel.collectives import exchange, gather_objects, global_rank, world_size
from rlightning.seeds import mix_seed, run_seed
from rlightning.types import RolloutBatch


def balance(
    batch: RolloutBatch,
    costs: Callable[[RolloutBatch], Tensor] = lambda batch: batch.lengths,
    *,
    num_minibatches: int = 1,
    seed: int = 0,
    tensor_parallel_size: int = 1,
) -> RolloutBatch:
    """Move whole groups between ranks, so that data-parallel ranks have about as much work with each minibatch.

    Args:
        batch: this rank's trajectories, on the CPU.
        costs: of each sequence [N]; its tokens by default.
        num_minibatches: that the groups will be dealt out to, each of which is balanced.
        seed: of the deal (:func:`deal_groups`).
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
    tables = gather_objects(own_costs, name="groups to share out")
    first = sum(len(table) for table in tables[: global_rank()])
    all_costs = [cost for table in tables for cost in table]
    minibatches = deal_groups(len(all_costs), num_minibatches, seed)[0]
    owner = assign_groups(all_costs, minibatches, world_size() // tensor_parallel_size)
    owner_of_trajectory = torch.tensor(owner[first : first + len(own_costs)], dtype=torch.int64)[group]
    batch.group_ids = group + first
    parcels = {}
    for data_parallel_rank in set(owner_of_trajectory.tolist()):
        share = batch.select((owner_of_trajectory == data_parallel_rank).nonzero()[:, 0])
        for neighbour in range(tensor_parallel_size):
            parcels[data_parallel_rank * tensor_parallel_size + neighbour] = share
    received = list(exchange(parcels, name="share out groups").values()) or [batch.select([])]
    numbers = torch.cat([share.group_ids for share in received])
    merged = type(batch).concatenate(received)
    merged.group_ids = numbers
    return merged


def deal_groups(num_groups: int, num_minibatches: int, seed: int, num_epochs: int = 1) -> list[list[list[int]]]:
    """Deal all ranks' groups out to minibatches, anew in each epoch.

    Ranks agree on it without a word, because it follows from the arguments; so do the balance and the update.

    Returns:
        For each epoch its minibatches, each a list of groups.
    """
    order = torch.Generator().manual_seed(seed)
    return [split_minibatches(num_groups, num_minibatches, order) for _ in range(num_epochs)]


def deal_seed(weight_version: int) -> int:
    """Return the seed of :func:`deal_groups` in the step that updates these weights, the same on all ranks."""
    return mix_seed(run_seed() or 0, "mini-batches", weight_version)


def assign_groups(costs: Sequence[float], minibatches: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """The rank of each group: in each minibatch the dearest group goes first, each to the rank with the least work.

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
