"""A Ray worker that stores tensors, and what tests ask it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from rlightning.controller.object_store import RayStore
from rlightning.controller.rtensor import fetch_tensors, store_tensors
from rlightning.controller.tensor_store import live_bytes, live_entries, set_store, tensor_store

TESTS = Path(__file__).parents[1]


def worker_environment() -> dict[str, str]:
    """Return the variables with which workers can import the tests' own modules, and use one thread each."""
    folders = [TESTS, TESTS / "callbacks", TESTS / "controller", TESTS / "parallel"]
    return {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}


class StoringWorker:
    """Stores on Ray; made an actor by :func:`start_workers`."""

    def __init__(self, max_bytes: int | None = None) -> None:
        torch.set_num_threads(1)
        set_store(RayStore(max_bytes=max_bytes))
        self.kept: Any = None

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def store(self, tree: Any, label: str = "store") -> Any:
        """Handles to a tree that was sent whole."""
        return store_tensors(tree, label=label)

    def store_samples(self) -> Any:
        """Handles to tensors of all kinds, not all of which Ray itself could send here."""
        from test_rtensor import SAMPLES

        return store_tensors(SAMPLES)

    def store_zeros(self, num_bytes: int, label: str = "zeros") -> Any:
        """A handle to so many bytes that are made here."""
        return store_tensors(torch.zeros(num_bytes, dtype=torch.uint8), label=label)

    def store_and_fail(self, num_bytes: int) -> None:
        stored = store_tensors(torch.zeros(num_bytes, dtype=torch.uint8))
        raise RuntimeError(f"out of luck with {stored}")

    def keep(self, tree: Any) -> None:
        """Hold handles of others."""
        self.kept = tree

    def let_go(self) -> None:
        self.kept = None

    def sum_kept(self) -> list[float]:
        """The sum of each tensor behind the handles that are kept."""
        return [float(tensor.sum()) for tensor in fetch_tensors(self.kept)]

    def live(self) -> tuple[int, int]:
        """Live entries and bytes of this process."""
        return live_entries(), live_bytes()

    def usage_by_label(self) -> list[tuple[str, int, int]]:
        return [tuple(usage) for usage in tensor_store().usage_by_label()]  # type: ignore[misc]

    def run(self, function: Callable[[], Any]) -> Any:
        """Call something of the test's here."""
        return function()


def start_workers(num_workers: int, *args: Any, kind: type[StoringWorker] = StoringWorker, **options: Any) -> list[Any]:
    """So many actors, each a process of its own."""
    actor: Any = ray.remote(kind)
    options |= {"num_cpus": 1, "runtime_env": {"env_vars": worker_environment()}}
    return [actor.options(**options).remote(*args) for _ in range(num_workers)]
