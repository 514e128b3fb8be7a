"""A Ray cluster of several nodes on this machine."""

from typing import Any

from ray.cluster_utils import Cluster


def start_nodes(*nodes: dict[str, Any]) -> Cluster:
    """Start nodes with these arguments, the first as the head; by itself Ray gives each 30 s to come up."""
    cluster = Cluster()
    for node in nodes:
        cluster.add_node(wait=False, **node)
        cluster.wait_for_nodes(300)
    return cluster
