"""Handles and the store of one process: bits, structures, what is refused; who keeps what alive, and the cap."""

import copy
import gc
import pickle
import re
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from observed_run import make_batch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from rlightning.controller import tensor_store
from rlightning.controller.rtensor import SHARED_BELOW, RTensor, fetch_tensors, store_tensors
from rlightning.controller.tensor_store import (
    LabelUsage,
    LocalStore,
    StoreFullError,
    live_bytes,
    live_entries,
    set_store,
    set_stores_results,
    stores_results,
)
from rlightning.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_process")


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor's elements."""
    values: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


SAMPLES = {
    # a quiet NaN with a payload, infinity, -0, the smallest subnormal: what a conversion would lose
    "bfloat16": torch.tensor([0x7FC1, 0x7F80, -0x8000, 0x0001], dtype=torch.int16).view(torch.bfloat16),
    "float16": torch.tensor([0.5, float("nan"), -65504.0], dtype=torch.float16),
    "float32": torch.tensor([[1.5, -0.0], [float("inf"), 1e-45]]),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "float8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.tensor([255, 0], dtype=torch.uint8),
    "0-d": torch.tensor(7.0),
    "0-d bool": torch.tensor(True),
    "empty": torch.empty(0),
    "empty matrix": torch.empty(3, 0, 2, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every other": torch.arange(10)[::2],
    "expanded": torch.tensor([3.0]).expand(2, 4),
    "offset": torch.arange(10, dtype=torch.bfloat16)[3:7],
    "parameter": nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_tensor_comes_back_bit_for_bit(name: str) -> None:
    tensor = SAMPLES[name]
    handle = store_tensors(tensor)
    assert isinstance(handle, RTensor)
    assert (handle.shape, handle.dtype, handle.nbytes) == (tensor.shape, tensor.dtype, tensor.numel() * tensor.itemsize)
    back = fetch_tensors(handle)
    assert (back.shape, back.dtype, back.requires_grad) == (tensor.shape, tensor.dtype, False)
    assert bits(back) == bits(tensor.detach().resolve_conj())


@pytest.mark.gpu
def test_device_tensor_is_fetched_to_host() -> None:
    matrix = torch.arange(6, dtype=torch.bfloat16, device="cuda").reshape(2, 3)
    back = fetch_tensors(store_tensors([matrix, matrix.T]))
    assert [tensor.device.type for tensor in back] == ["cpu", "cpu"]
    assert torch.equal(back[0], matrix.cpu()) and torch.equal(back[1], matrix.T.cpu())


def test_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rtensor.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(example, {})
    handle, *sizes = capsys.readouterr().out.splitlines()
    assert handle.startswith("RTensor([4096], torch.float32, stored by rank 0 (process ") and sizes == ["16384", "0"]


# Structures


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    note: str
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.value * 2)


def test_nested_structures_keep_types_and_non_tensor_values() -> None:
    one, plain = torch.ones(2), [1, "two", None, 3.0]
    tree: dict[str, Any] = {
        "pair": Pair(one, plain),
        "frozen": Frozen(one, "a note"),
        "counts": defaultdict(list, {"x": [one]}),
        "ordered": OrderedDict(a=one),
        "user": UserDict({"a": (one, 1)}),
        "plain": plain,
    }
    stored = store_tensors(tree)
    assert tree["pair"].left is one
    assert isinstance(stored["pair"], Pair) and isinstance(stored["pair"].left, RTensor)
    assert isinstance(stored["frozen"], Frozen) and stored["frozen"].note == "a note"
    assert isinstance(stored["frozen"].twice, RTensor)
    assert stored["counts"].default_factory is list and isinstance(stored["counts"]["x"][0], RTensor)
    assert type(stored["ordered"]) is OrderedDict and type(stored["user"]) is UserDict
    assert stored["plain"] is plain and stored["pair"].right is plain

    back = fetch_tensors(stored)
    assert torch.equal(back["frozen"].twice, 2 * one) and back["frozen"].note == "a note"
    assert torch.equal(back["user"]["a"][0], one) and back["user"]["a"][1] == 1
    assert back["pair"].left is back["counts"]["x"][0]  # one tensor in all places, as before
    assert isinstance(stored["pair"].left, RTensor)  # what was localized is still there


def test_rollout_batch_is_stored_and_fetched() -> None:
    batch = make_batch()
    batch.advantages = torch.arange(22.0)
    batch.scores = {"exact": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    stored = store_tensors(batch)
    assert type(stored) is type(batch) and stored.trajectories == batch.trajectories and stored.ref_logprobs is None
    assert isinstance(stored.token_ids, RTensor) and stored.token_ids.shape == (22,)
    assert isinstance(batch.token_ids, Tensor)
    back = fetch_tensors(stored)
    assert back.num_sequences == 4 and torch.equal(back.advantages, batch.advantages)
    assert torch.equal(back.is_sampled, batch.is_sampled)
    assert torch.equal(back.scores["exact"], batch.scores["exact"])


def test_what_has_no_tensor_is_stored_nowhere() -> None:
    tree = {"loss": 0.5, "rows": [(1, 2), "text"]}
    assert store_tensors(tree) is tree and fetch_tensors(tree) is tree and live_entries() == 0


def test_handles_are_passed_on_as_they_are() -> None:
    handle = store_tensors(torch.ones(3))
    both = store_tensors({"old": handle, "new": torch.zeros(3)})
    assert both["old"] is handle and live_entries() == 2


def test_stored_and_fetched_tensors_are_copies() -> None:
    tensor = torch.zeros(3)
    handle = store_tensors(tensor)
    tensor += 1
    first = fetch_tensors(handle)
    first += 2
    assert fetch_tensors(handle).tolist() == [0, 0, 0]


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_what_is_no_plain_tensor_is_refused(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        store_tensors([torch.ones(2), tensor])
    assert live_entries() == 0


def test_a_shard_is_not_taken_for_the_whole() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"DTensor .* full_tensor\(\)"):
            store_tensors(shard)
    finally:
        dist.destroy_process_group()


LARGE = SHARED_BELOW // 4
"""Elements of a float32 tensor that is stored alone."""


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


def test_copied_handles_share_one_object() -> None:
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
            tensor_store.tensor_store().usage_by_label()

    threads = [threading.Thread(target=work, args=({"x": torch.tensor([1, 2])},)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (live_entries(), live_bytes()) == (0, 0)


def test_a_handle_does_not_leave_its_process() -> None:
    with pytest.raises(pickle.PicklingError, match=r"'rollout' stored .* set_store\(RayStore\(\)\)"):
        pickle.dumps(store_tensors(torch.ones(1), label="rollout"))


def test_new_store_counts_anew_old_handles_stay() -> None:
    old = store_tensors(torch.ones(2))
    set_store(LocalStore())
    assert live_entries() == 0
    assert fetch_tensors([old, store_tensors(torch.zeros(1))])[0].tolist() == [1, 1] and live_entries() == 0


# Whether it stores at all


def test_one_policy_decides() -> None:
    set_stores_results(False)
    assert not stores_results()
    assert store_tensors({"x": torch.ones(2), "loss": 1.0}) is None and live_entries() == 0
    set_stores_results(True)
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
    assert capped.usage_by_label() == [LabelUsage("values", 1, 48), LabelUsage("rollout", 2, 40)]
    with pytest.raises(
        StoreFullError,
        match=r"'update' would store 16 bytes more than the 88 .* rank 0 .*max_bytes=100\. "
        r"Held are: 'values': 1 x, 48 bytes; 'rollout': 2 x, 40 bytes\. Drop",
    ):
        store_tensors(torch.zeros(4), label="update")
    assert live_bytes() == 88
    kept.append(store_tensors(torch.zeros(3), label="update"))  # to the last byte
    assert live_bytes() == 100
    kept.clear()
    assert live_entries() == 0 and store_tensors(torch.zeros(25)).nbytes == 100


def test_without_a_label_the_caller_is_named(capped: LocalStore) -> None:
    handle = store_tensors(torch.zeros(2))
    label = capped.usage_by_label()[0].label
    assert label.startswith("test_without_a_label_the_caller_is_named (test_rtensor.py:") and handle.nbytes == 8


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
