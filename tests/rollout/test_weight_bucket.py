"""The bucket by itself: what fits, and that both ends see the same."""

import gc
import os
from pathlib import Path

import pytest
import torch

from rlightning.errors import EngineError
from rlightning.rollout.weights import WeightBucket, open_bucket, plan_chunks, weight_shapes

CPU = torch.device("cpu")


def test_chunks_fill_up_to_the_bucket() -> None:
    # In float32: 40, 24 and 400 bytes, each starting at a multiple of 256.
    shapes = [("a", (10,)), ("b", (2, 3)), ("c", (100,))]
    chunks, size = plan_chunks(shapes, torch.float32, 700)
    assert [[(slot.name, slot.offset) for slot in chunk] for chunk in chunks] == [[("a", 0), ("b", 256)], [("c", 0)]]
    assert size == 400
    chunks, size = plan_chunks(shapes, torch.float32, 1000)
    assert [[(slot.name, slot.offset) for slot in chunk] for chunk in chunks] == [[("a", 0), ("b", 256), ("c", 512)]]
    assert size == 912


def test_a_tensor_larger_than_the_bucket_makes_it_larger() -> None:
    chunks, size = plan_chunks([("a", (8,)), ("b", (1000,)), ("c", (8,))], torch.bfloat16, 100)
    assert [[slot.name for slot in chunk] for chunk in chunks] == [["a"], ["b"], ["c"]]
    assert size == 2000


def test_receiver_reads_each_chunk_in_engine_dtype() -> None:
    weights = {"a": torch.randn(3, 5), "scalar": torch.tensor(2.5), "b": torch.randn(64)}
    shapes = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    bucket = WeightBucket(shapes, torch.bfloat16, CPU, 300)
    chunks, dtype, memory = open_bucket(bucket.handle(), CPU)
    for factor in (1.0, 2.0):
        seen: dict[str, torch.Tensor] = {}
        for index in bucket.fill((name, weight * factor) for name, weight in weights.items()):
            seen |= {slot.name: slot.view(memory, dtype).clone() for slot in chunks[index]}
        assert len(chunks) == 2 and seen.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(seen[name], (weight * factor).bfloat16())
    bucket.close()


def test_buffers_travel_in_their_own_dtype() -> None:
    weights = {"matrix": torch.nn.Parameter(torch.randn(3, 5)), "biases": torch.tensor([1.0, 1.001])}
    shapes = weight_shapes(weights.items())
    bucket = WeightBucket(shapes, torch.bfloat16, CPU, 300)
    end = open_bucket(bucket.handle(), CPU)
    (index,) = bucket.fill(weights.items())
    seen = dict(end.receive(index))
    assert torch.equal(seen["matrix"], weights["matrix"].bfloat16())
    assert torch.equal(seen["biases"], weights["biases"])  # in bfloat16 both would be 1
    assert plan_chunks(shapes, torch.bfloat16, 300)[1] == 256 + 8
    bucket.close()


@pytest.mark.long
def test_closing_gives_the_memory_back() -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rlightning-weights" in line]

    gc.collect()  # other tests' files
    before = mapped(), len(os.listdir("/proc/self/fd"))
    bucket = WeightBucket([("a", (1000,))], torch.float32, CPU, 1 << 20)
    assert len(mapped()) > len(before[0])
    bucket.close()
    bucket.close()
    gc.collect()
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before


def test_what_changed_between_two_syncs_is_named() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    bucket = WeightBucket([("a", (2,)), ("b", (3,))], torch.float32, CPU, 1 << 20)
    with pytest.raises(EngineError, match=r"expected b \(3,\), got b \(4,\)"):
        list(bucket.fill([("a", a), ("b", torch.zeros(4))]))
    with pytest.raises(EngineError, match=r"expected a \(2,\), got b \(3,\)"):
        list(bucket.fill([("b", b), ("a", a)]))
    with pytest.raises(EngineError, match=r"expected b \(3,\), got nothing"):
        list(bucket.fill([("a", a)]))
    with pytest.raises(EngineError, match="expected nothing more, got c"):
        list(bucket.fill([("a", a), ("b", b), ("c", a)]))
    bucket.close()
