"""The store of one process: who keeps what alive, whether it stores at all, the cap."""

import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlightning.controller import tensor_store
from rlightning.controller.rtensor import SHARED_BELOW, RTensor, fetch_tensors, store_tensors
from rlightning.controller.tensor_store import (
    Holding,
    LocalStore,
    StoreFullError,
    live_bytes,
    live_entries,
    set_store,
    set_storing_policy,
    stores_results,
)
from rlightning.errors import ConfigError

LARGE = SHARED_BELOW // 4
"""Elements of a float32 tensor that is stored alone."""


pytestmark = pytest.mark.usefixtures("fresh_process")


def test_small_tensors_share_object_large_ones_do_not() -> None:
    large = torch.zeros(LARGE)
    tree = {"a": torch.zeros(10), "b": torch.zeros(5, dtype=torch.int64), "large": large, "again": large}
    stored = store_tensors(tree)
    assert (live_entries(), live_bytes()) == (2, 40 + 40 + SHARED_BELOW)
    del stored["large"]
    assert live_entries() == 2
    del stored["again"]
    assert (live_entries(), live_bytes()) == (1, 80)
    del stored["a"]
    assert (live_entries(), live_bytes()) == (1, 80)  # what is shared goes as a whole
    kept = fetch_tensors(stored)["b"]
    del stored
    assert (live_entries(), live_bytes(), kept.tolist()) == (0, 0, [0] * 5)


def test_a_slice_keeps_nothing_else_alive() -> None:
    handle = store_tensors(torch.zeros(LARGE)[10:20])
    assert handle.nbytes == live_bytes() == 40


def test_copies_of_a_handle_are_handles_to_the_same() -> None:
    handle = store_tensors({"x": torch.arange(3)})
    copies = [copy.copy(handle), copy.deepcopy(handle)]
    del handle
    assert (live_entries(), live_bytes()) == (1, 24)
    assert [fetch_tensors(tree)["x"].tolist() for tree in copies] == [[0, 1, 2]] * 2
    copies.clear()
    assert live_entries() == 0


@pytest.mark.long
def test_an_exception_leaves_nothing_behind() -> None:
    def fail() -> None:
        stored = store_tensors(torch.ones(4))
        raise RuntimeError(f"out of luck with {stored}")

    with pytest.raises(RuntimeError, match="out of luck") as caught:
        fail()
    assert live_entries() == 1  # whoever has the exception has its frames
    del caught
    gc.collect()
    assert live_entries() == 0


@pytest.mark.long
def test_many_threads_at_once() -> None:
    def work(tree: dict[str, Tensor], num_steps: int = 200) -> None:
        kept: list[Any] = []
        for _ in range(num_steps):
            kept = [*kept[-3:], store_tensors(tree)]
            assert fetch_tensors(kept[0])["x"].tolist() == [1, 2]
            tensor_store.tensor_store().holdings()

    threads = [threading.Thread(target=work, args=({"x": torch.tensor([1, 2])},)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (live_entries(), live_bytes()) == (0, 0)


def test_a_handle_does_not_leave_its_process() -> None:
    with pytest.raises(pickle.PicklingError, match=r"'rollout' stored .* set_store\(RayStore\(\)\)"):
        pickle.dumps(store_tensors(torch.ones(1), label="rollout"))


def test_another_store_counts_anew_and_old_handles_stay_good() -> None:
    old = store_tensors(torch.ones(2))
    set_store(LocalStore())
    assert live_entries() == 0
    assert fetch_tensors([old, store_tensors(torch.zeros(1))])[0].tolist() == [1, 1] and live_entries() == 0


# Whether it stores at all


def test_one_policy_decides() -> None:
    set_storing_policy(lambda: False)
    assert not stores_results()
    assert store_tensors({"x": torch.ones(2), "loss": 1.0}) is None and live_entries() == 0
    set_storing_policy(None)
    assert stores_results() and isinstance(store_tensors(torch.ones(2)), RTensor)


# The cap


@pytest.fixture
def capped() -> Iterator[LocalStore]:
    """A store that takes 100 bytes."""
    store = LocalStore(max_bytes=100)
    set_store(store)
    yield store
    assert store.live_bytes() <= 100


def test_a_full_store_says_who_holds_what(capped: LocalStore) -> None:
    kept = [store_tensors(torch.zeros(5), label="rollout"), store_tensors(torch.zeros(5), label="rollout")]
    kept.append(store_tensors(torch.zeros(12), label="values"))
    assert capped.holdings() == [Holding("values", 1, 48), Holding("rollout", 2, 40)]
    with pytest.raises(
        StoreFullError,
        match=r"'update' would store 16 bytes more than the 88 .* rank 0 .*max_bytes=100\. "
        r"Held are: 'values': 1 x, 48 bytes; 'rollout': 2 x, 40 bytes\. Let go",
    ):
        store_tensors(torch.zeros(4), label="update")
    assert live_bytes() == 88
    kept.append(store_tensors(torch.zeros(3), label="update"))  # to the last byte
    assert live_bytes() == 100
    kept.clear()
    assert live_entries() == 0 and store_tensors(torch.zeros(25)).nbytes == 100


def test_without_a_label_the_caller_is_named(capped: LocalStore) -> None:
    handle = store_tensors(torch.zeros(2))
    label = capped.holdings()[0].label
    assert (
        label.startswith("test_without_a_label_the_caller_is_named (test_rtensor_lifetimes.py:") and handle.nbytes == 8
    )


@pytest.mark.long
def test_a_call_that_does_not_fit_stores_nothing() -> None:
    set_store(LocalStore(max_bytes=SHARED_BELOW + 10))
    with pytest.raises(StoreFullError):
        store_tensors([torch.zeros(1), torch.zeros(LARGE), torch.zeros(LARGE)])
    gc.collect()
    assert live_entries() == 0


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes=0 must be positive"):
        LocalStore(max_bytes=0)
