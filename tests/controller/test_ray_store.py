"""Handles between real Ray workers: bits, counting over processes, what becomes of memory, lost workers, the cap."""

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import memory_summary
from ray.experimental import get_object_locations
from rtensor_worker import start_workers
from test_rtensor import SAMPLES, bits
from waiting import wait_for

from rlightning.controller import object_store as ray_store
from rlightning.controller import tensor_store
from rlightning.controller.object_store import RayStore
from rlightning.controller.rtensor import RTensor, fetch_tensors, store_tensors
from rlightning.controller.tensor_store import LocalStore, StoreFullError, TensorLostError

pytestmark = pytest.mark.processes

MB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray."""
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=200 * MB, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def both(cluster: None) -> list[Any]:
    """Two workers; importing torch takes them seconds."""
    return start_workers(2)


@pytest.fixture
def workers(both: list[Any]) -> Iterator[list[Any]]:
    """Two workers that have stored nothing yet, and in the end store nothing any more."""
    nothing = [(0, 0)] * 2
    assert become(nothing, lambda: [live(worker) for worker in both]) == nothing
    yield both


def become(expected: Any, ask: Callable[[], Any]) -> Any:
    """Return the answer of ``ask`` once it is ``expected``, or the last one at the timeout."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: ask() == expected, 120)
    return ask()


def live(worker: Any) -> Any:
    return ray.get(worker.live.remote())


def ref_of(handle: RTensor) -> Any:
    """Ray's reference to the object that a tensor is in."""
    assert isinstance(handle.block, ray_store.RayBlock)
    return handle.block._ref


def test_tensors_cross_processes_bit_for_bit(workers: list[Any]) -> None:
    stored = ray.get(workers[0].store_samples.remote())
    owner = stored["bfloat16"].owner
    assert owner.pid == ray.get(workers[0].pid.remote()) != os.getpid() and owner.rank == 0
    back = fetch_tensors(stored)
    for name, sample in SAMPLES.items():
        tensor = sample.detach().resolve_conj()
        handle = stored[name]
        assert isinstance(handle, RTensor)
        assert (handle.shape, handle.dtype, handle.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
        assert (back[name].shape, back[name].dtype) == (tensor.shape, tensor.dtype)
        assert bits(back[name]) == bits(tensor)


def test_fetched_tensor_is_writable_and_outlives_stored_one(workers: list[Any]) -> None:
    stored = ray.get(workers[0].store_zeros.remote(8 * MB))
    first = fetch_tensors(stored)
    first += 1
    assert int(fetch_tensors(stored).max()) == 0
    del stored
    assert become((0, 0), lambda: live(workers[0])) == (0, 0)
    assert first.sum() == 8 * MB


def test_a_handle_is_small(workers: list[Any]) -> None:
    handle = ray.get(workers[0].store_zeros.remote(64 * MB))
    ref = ray.put({"handle": handle})
    location = get_object_locations([ref])[ref]
    assert 0 < location["object_size"] < 4096


def test_the_last_handle_anywhere_frees_the_memory(workers: list[Any]) -> None:
    first, second = workers
    stored = ray.get(first.store_zeros.remote(2 * MB))
    assert live(first) == (1, 2 * MB)
    ray.get(second.keep.remote([stored]))
    later = ray.get(first.store_zeros.remote(MB))
    del stored
    # Held by the second worker only, and by nobody in this process: what it sums comes from the first one's memory.
    assert ray.get(second.sum_kept.remote()) == [0.0]
    del later  # once this has been freed, so would be what was released before it
    assert become((1, 2 * MB), lambda: live(first)) == (1, 2 * MB)
    ray.get(second.let_go.remote())
    assert become((0, 0), lambda: live(first)) == (0, 0)


def used_megabytes() -> float:
    """Return the megabytes that Ray reports for its object store."""
    report: str = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)  # type: ignore[no-untyped-call]
    line = next(line for line in report.splitlines() if "Plasma memory usage" in line)
    return float(line.split("usage ")[1].split()[0])


def test_ray_has_the_memory_back(workers: list[Any]) -> None:
    stored = ray.get([worker.store_zeros.remote(20 * MB) for worker in workers])
    assert become(True, lambda: used_megabytes() >= 40) is True
    del stored
    assert become(True, lambda: used_megabytes() < 20) is True


def test_an_exception_in_a_worker_leaves_nothing_behind(workers: list[Any]) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"out of luck with RTensor\(\[1000\], torch.uint8, stored by rank 0"):
            ray.get(workers[0].store_and_fail.remote(1000))
    assert become((0, 0), lambda: live(workers[0])) == (0, 0)


def test_many_handles_are_one_request(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ray.get([worker.store.remote([torch.ones(3), torch.ones(MB)]) for worker in workers])
    requests: list[int] = []
    get = ray.get
    monkeypatch.setattr(ray, "get", lambda refs: requests.append(len(refs)) or get(refs))  # type: ignore[func-returns-value]
    back = fetch_tensors(stored)
    assert requests == [4]
    assert [[int(tensor.sum()) for tensor in tensors] for tensors in back] == [[3, MB]] * 2


def test_handle_is_pickled_for_ray_calls_only(workers: list[Any]) -> None:
    stored = ray.get(workers[0].store_zeros.remote(MB, "rollout"))
    for dumps in (pickle.dumps, ray.cloudpickle.dumps):
        with pytest.raises(pickle.PicklingError, match="'rollout' stored can only be sent in an argument"):
            dumps(stored)
    del stored
    assert become((0, 0), lambda: live(workers[0])) == (0, 0)


@pytest.mark.slow
def test_a_worker_that_is_gone_is_named(cluster: None) -> None:
    lost, lives = start_workers(2)
    tree = [ray.get(lives.store_zeros.remote(100)), ray.get(lost.store_zeros.remote(2 * MB, "values"))]
    pid = ray.get(lost.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TensorLostError, match=rf"What 'values' stored is gone: rank 0 \(process {pid} on .* has ended"):
        wait_for(lambda: not fetch_tensors(tree), 60)  # until Ray notices, what was stored on this node can be read
    assert fetch_tensors(tree[0]).numel() == 100
    ray.kill(lives)


def set_full_timeout(worker: Any, seconds: float) -> None:
    ray.get(worker.run.remote(lambda: setattr(tensor_store.tensor_store(), "full_timeout", seconds)))


@pytest.mark.slow
def test_full_store_names_labels_and_waits_for_release(cluster: None) -> None:
    (worker,) = start_workers(1, 3 * MB)
    kept = [ray.get(worker.store_zeros.remote(MB, label)) for label in ("rollout", "rollout", "values")]
    full = (
        r"'update' would store 1,048,576 bytes .* max_bytes=3,145,728.*'rollout': 2 x, 2,097,152 bytes; 'values': 1 x"
    )
    set_full_timeout(worker, 0.1)
    with pytest.raises(StoreFullError, match=full):
        ray.get(worker.store_zeros.remote(MB, "update"))
    assert live(worker) == (3, 3 * MB)
    set_full_timeout(worker, 120)
    for _ in range(20):  # each asks for room at once, while the news of letting go is under way
        kept[0] = None
        kept[0] = ray.get(worker.store_zeros.remote(MB, "update"))
    held = [("rollout", 1, MB), ("update", 1, MB), ("values", 1, MB)]
    assert become(held, lambda: sorted(ray.get(worker.usage_by_label.remote()))) == held
    ray.kill(worker)


def test_this_process_can_store_too(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_store, "_store", LocalStore())
    local = store_tensors(torch.ones(2))
    tensor_store.set_store(RayStore())
    shared = store_tensors(torch.zeros(2))
    assert tensor_store.live_entries() == 1
    assert [tensor.tolist() for tensor in fetch_tensors([local, shared])] == [[1, 1], [0, 0]]  # from both places
    del shared
    assert become(0, tensor_store.live_entries) == 0
