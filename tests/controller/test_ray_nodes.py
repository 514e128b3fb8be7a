"""Handles where there are several nodes, and where there is no Ray."""

from typing import Any

import pytest
import ray
from ray.experimental import get_object_locations
from ray_nodes import start_nodes
from rtensor_worker import start_workers
from test_ray_store import become, ref_of

from rlightning.controller.object_store import RayStore
from rlightning.errors import ConfigError

MB = 1 << 20


@pytest.mark.processes
@pytest.mark.slow
def test_tensor_bytes_move_between_nodes_without_controller() -> None:
    """Three nodes on this machine: the controller's, and one for each worker."""
    each: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * MB}
    nodes = start_nodes(each, *(each | {"resources": {name: 1}} for name in ("a", "b")))
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        workers = [start_workers(1, resources={name: 1})[0] for name in ("a", "b")]
        places = ray.get([worker.node.remote() for worker in workers])
        here = ray.get_runtime_context().get_node_id()
        assert len({here, *places}) == 3
        stored = ray.get(workers[0].store_zeros.remote(30 * MB))
        ray.get(workers[1].keep.remote([stored]))
        assert ray.get(workers[1].sum_kept.remote()) == [0.0]
        ref = ref_of(stored)
        assert become(set(places), lambda: set(get_object_locations([ref])[ref]["node_ids"])) == set(places)
        assert get_object_locations([ref])[ref]["object_size"] > 30 * MB
    finally:
        ray.shutdown()
        nodes.shutdown()  # type: ignore[no-untyped-call]


def test_without_ray_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Call ray.init\(\) first"):
        RayStore()
