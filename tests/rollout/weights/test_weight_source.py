"""Chunks in a bucket of shared memory: what fits, and that both sides read the same."""

import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_models import Weights

from rlightning.errors import EngineError
from rlightning.rollout.weights import ChunkPlan, plan_chunks
from rlightning.rollout.weights.driver import WeightSender
from rlightning.rollout.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from rlightning.rollout.weights.source import weight_shapes

CPU = torch.device("cpu")


def test_chunks_fill_up_to_the_bucket() -> None:
    # In float32: 40, 24 and 400 bytes, each starting at a multiple of 256.
    shapes = [("a", (10,)), ("b", (2, 3)), ("c", (100,))]
    chunks, size = plan_chunks(shapes, torch.float32, 700)[:2]
    assert [[(slot.name, slot.offset) for slot in chunk] for chunk in chunks] == [[("a", 0), ("b", 256)], [("c", 0)]]
    assert size == 400
    chunks, size = plan_chunks(shapes, torch.float32, 1000)[:2]
    assert [[(slot.name, slot.offset) for slot in chunk] for chunk in chunks] == [[("a", 0), ("b", 256), ("c", 512)]]
    assert size == 912


def test_tensor_larger_than_bucket_enlarges_it() -> None:
    chunks, size = plan_chunks([("a", (8,)), ("b", (1000,)), ("c", (8,))], torch.bfloat16, 100)[:2]
    assert [[slot.name for slot in chunk] for chunk in chunks] == [["a"], ["b"], ["c"]]
    assert size == 2000


def test_buffers_are_sent_in_their_own_dtype() -> None:
    weights = Weights(matrix=torch.nn.Parameter(torch.randn(3, 5)), biases=torch.tensor([1.0, 1.001]))
    plan = plan_chunks(weight_shapes(weights), torch.bfloat16, 300)
    assert plan.num_bytes == 256 + 8
    sender = SharedMemorySender(plan, CPU)
    receiver: SharedMemoryReceiver = pickle.loads(pickle.dumps(sender.make_receivers([""])[0]))
    receiver.open(CPU)
    (chunk,) = sender.fill(weights)
    seen = dict(receiver.receive(chunk))
    assert torch.equal(seen["matrix"], weights["matrix"].bfloat16())
    assert torch.equal(seen["biases"], weights["biases"])  # in bfloat16 both would be 1
    sender.close()


def test_weights_made_while_sent_are_not_kept() -> None:
    """Weights that are computed while they are sent, such as sums of base and adapter, are freed after their chunk."""
    alive = weakref.WeakSet[torch.Tensor]()
    numbers = []

    class Source:
        def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number in range(8):
                made = torch.full((4,), float(number))
                alive.add(made)
                numbers.append(len(alive))
                yield str(number), made

    plan = plan_chunks([(str(number), (4,)) for number in range(8)], torch.float32, 1 << 20)
    bucket = torch.empty(plan.num_bytes, dtype=torch.uint8)
    assert list(WeightSender(plan, bucket).fill(Source())) == [0]
    assert max(numbers) <= 3
    assert [float(tensor[0]) for _, tensor in plan.tensors(bucket, 0)] == list(range(8))


@pytest.mark.long
def test_closing_releases_the_memory() -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rlightning-weights" in line]

    def opened() -> list[Path]:
        return [fd for fd in Path("/proc/self/fd").iterdir() if "rlightning-weights" in os.path.realpath(fd)]

    gc.collect()  # other tests' files
    before = mapped(), opened()
    sender = SharedMemorySender(plan_of(a=1000), CPU)
    assert len(mapped()) > len(before[0]) and len(opened()) > len(before[1])
    sender.close()
    sender.close()
    gc.collect()
    assert (mapped(), opened()) == before


def plan_of(**lengths: int) -> ChunkPlan:
    return plan_chunks([(name, (length,)) for name, length in lengths.items()], torch.float32, 1 << 20)


def test_what_changed_between_two_syncs_is_named() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    sender = SharedMemorySender(plan_of(a=2, b=3), CPU)
    with pytest.raises(EngineError, match=r"expected b \(3,\), got b \(4,\)"):
        list(sender.fill(Weights(a=a, b=torch.zeros(4))))
    with pytest.raises(EngineError, match=r"expected a \(2,\), got b \(3,\)"):
        list(sender.fill(Weights(b=b, a=a)))
    with pytest.raises(EngineError, match=r"expected b \(3,\), got nothing"):
        list(sender.fill(Weights(a=a)))
    with pytest.raises(EngineError, match="expected nothing more, got c"):
        list(sender.fill(Weights(a=a, b=b, c=a)))
    sender.close()
