"""The seconds of collectives on more GPUs than were measured."""

import math
from collections import defaultdict
from collections.abc import Sequence


class Links:
    """Seconds of collectives on any number of GPUs.

    Args:
        rows: of collectives.py.
        gpus_per_node: that are linked as the measured ones are.
        bandwidth: bytes a second of the network, a GPU.
        latency: seconds of one hop through it.
    """

    def __init__(self, rows: Sequence[dict[str, str]], gpus_per_node: int, bandwidth: float, latency: float) -> None:
        self.gpus_per_node, self.bandwidth, self.latency = gpus_per_node, bandwidth, latency
        self._seconds: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            if row["dtype"] != "bfloat16":  # as fast, byte for byte, as float32
                self._seconds[row["operation"]][int(row["GPUs"])][int(row["bytes"])] = float(row["us"]) / 1e6

    def seconds(self, operation: str, size: float, num_gpus: int) -> float:
        """Of one call on so many bytes in all, by as few nodes as there can be."""
        if num_gpus == 1:
            return 0.0
        within, num_nodes = min(num_gpus, self.gpus_per_node), math.ceil(num_gpus / self.gpus_per_node)
        hop, most = self._hop(operation), max(self._seconds[operation])
        # A ring passes the ranks of a node, and then goes on to the next node.
        latency = self._latency(operation, within) + (num_nodes - 1) * (self.latency + (within - 1) * hop)
        share = (num_gpus - 1) / num_gpus
        beside_latency = self._interpolate(operation, size) - self._latency(operation, most)
        transfer = max(beside_latency, 0.0) * share / ((most - 1) / most)
        return latency + max(transfer, share * size / self.bandwidth if num_nodes > 1 else 0.0)

    def all_reduce(self, size: float, num_copies: int, shard_size: int) -> float:
        """Seconds of summing so many bytes over the copies of a model, each of which is on so many GPUs."""
        if num_copies * shard_size <= self.gpus_per_node:
            return self.seconds("all-reduce", size, num_copies)
        hops = 2 * math.ceil(math.log2(num_copies))  # up and down a tree
        return hops * self.latency + 2 * (num_copies - 1) / num_copies * size / self.bandwidth

    def _latencies(self, operation: str) -> list[tuple[int, float]]:
        """The numbers of ranks, and the seconds of the smallest size."""
        return [(ranks, by_size[min(by_size)]) for ranks, by_size in sorted(self._seconds[operation].items())]

    def _hop(self, operation: str) -> float:
        """Seconds of latency that one more rank adds."""
        latencies = self._latencies(operation)
        (first, least), (last, most) = latencies[0], latencies[-1]
        return max((most - least) / (last - first), 0.0) if last > first else 0.0

    def _latency(self, operation: str, num_ranks: int) -> float:
        first, least = self._latencies(operation)[0]
        return least + self._hop(operation) * (num_ranks - first)

    def _interpolate(self, operation: str, size: float) -> float:
        """Seconds on the most ranks that were measured, along lines through the measured sizes."""
        by_size = self._seconds[operation][max(self._seconds[operation])]
        sizes = sorted(by_size)
        above = next((number for number, one in enumerate(sizes) if one >= size), None)
        if above is None:
            return by_size[sizes[-1]] * size / sizes[-1]
        if above == 0:
            return by_size[sizes[0]]
        low, high = sizes[above - 1], sizes[above]
        return by_size[low] + (by_size[high] - by_size[low]) * (size - low) / (high - low)
