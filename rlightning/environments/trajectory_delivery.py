"""Delivery of finished groups from the collector's rank to the ranks that train on them, while others are sampled."""

from collections.abc import Iterable

from rlightning.parallel.collectives import all_to_all_objects, global_rank
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.sampler import OnCompleted
from rlightning.types import Prompt, Trajectory

Finished = tuple[int, Prompt, list[Trajectory]]
"""A group's number, its prompt, and its trajectories."""


class TrajectoryDelivery:
    """The groups of one rollout, of which each rank gets its own. Every rank constructs one.

    Args:
        ranks: the ranks that get groups; read on rank 0.
        on_completed: called on the rank that gets a group, when it arrives.
    """

    def __init__(self, ranks: Iterable[int], on_completed: OnCompleted | None) -> None:
        self._on_completed = on_completed
        self._waiting: dict[int, list[Finished]] = {rank: [] for rank in ranks}
        self._received: dict[int, list[Trajectory]] = {}

    def add(self, rank: int, finished: Finished) -> None:
        """Add a finished group of a rank, on rank 0, whose own groups arrive at once."""
        if rank == COLLECTOR_RANK:
            self._receive([finished])
        else:
            self._waiting[rank].append(finished)

    def is_waiting(self) -> bool:
        """Return, on rank 0, whether there are groups to send to other ranks."""
        return any(self._waiting.values())

    def send(self) -> None:
        """Send the groups that were added since the last call to their ranks; every rank must call it."""
        sent = all_to_all_objects(self._waiting, name="trajectories")
        for groups in self._waiting.values():
            groups.clear()
        if global_rank() != COLLECTOR_RANK:
            self._receive(sent[COLLECTOR_RANK])

    def received(self) -> list[list[Trajectory]]:
        """Return this rank's groups so far, in the order of their numbers."""
        return [trajectories for _, trajectories in sorted(self._received.items())]

    def _receive(self, groups: Iterable[Finished]) -> None:
        for number, prompt, trajectories in groups:
            self._received[number] = trajectories
            if self._on_completed is not None:
                self._on_completed(prompt, trajectories)


def assign_ranks(num_groups: int, missing: dict[int, int]) -> list[int]:
    """Assign further groups to ranks that lack some: to those that lack the most, in the order of ranks.

    Args:
        num_groups: number of groups, at most as many as all ranks lack.
        missing: number of groups that each rank lacks, from which the assigned ones are subtracted.

    Returns:
        The rank of each group. If all missing groups are assigned at once, the first rank gets the first ones.
    """
    ranks = []
    for _ in range(num_groups):
        rank = max(missing, key=missing.__getitem__)
        missing[rank] -= 1
        ranks.append(rank)
    return sorted(ranks)
