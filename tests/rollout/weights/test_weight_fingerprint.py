"""Noticing that weights have changed."""

from collections.abc import Callable

import pytest
import torch

from rlightning.rollout.weights.fingerprint import WeightFingerprint, checksum


def make_weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.zeros(0)}


def test_fingerprint_notices_a_swap_through_data() -> None:
    weights, found = make_weights(), WeightFingerprint()
    assert not found.has_changed(weights.items())  # the first call has nothing to compare with
    assert not found.has_changed(weights.items())
    averaged = weights["b"].clone()
    weights["b"].data.copy_(-averaged)  # of equal norm
    assert found.has_changed(weights.items())
    weights["b"].data.copy_(averaged)
    assert found.has_changed(weights.items())
    assert not found.has_changed(weights.items())


def exchange(values: torch.Tensor, one: int, other: int) -> torch.Tensor:
    exchanged = values.clone()
    exchanged[[one, other]] = values[[other, one]]
    return exchanged


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two rows exchanged": lambda weight: exchange(weight, 3, 200),
    "two numbers exchanged": lambda weight: exchange(weight.view(-1), 1, 4097).view_as(weight),
    "one nudged": lambda weight: weight + 1e-5 * (torch.arange(weight.numel()).view_as(weight) == 1093),
    "rows reversed": lambda weight: weight.flip(0),
    "negated": lambda weight: -weight,
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_notices_every_change(change: str) -> None:
    for seed in range(50):
        weight = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
        found = WeightFingerprint()
        found.has_changed([("a", weight)])
        weight.data.copy_(CHANGES[change](weight))  # whose version does not count as the weight's
        assert weight._version == 0
        assert found.has_changed([("a", weight)]) and not found.has_changed([("a", weight)])


def test_fingerprint_of_more_or_fewer_tensors_differs() -> None:
    weights, found = make_weights(), WeightFingerprint()
    found.has_changed(weights.items())
    assert found.has_changed([("a", weights["a"])])
    assert found.has_changed([])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_checksum_is_of_bits_in_their_order(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    assert checksum([tensor]) == checksum([tensor.clone()]) == checksum([tensor.T.contiguous().T])
    assert checksum([tensor]) != checksum([tensor.flip(0)])


def test_checksum_of_an_element_has_odd_factors() -> None:
    # 3.0 is 0x40400000 in float32, so 2^22 is the largest power of two in its checksum.
    number = int(checksum([torch.tensor(3.0)]))
    assert number % 2**22 == 0 and number % 2**23 != 0


def test_fingerprint_of_nan_equals_itself() -> None:
    weights, found = {"a": torch.tensor([float("nan"), 1.0])}, WeightFingerprint()
    found.has_changed(weights.items())
    assert not found.has_changed(weights.items())


def test_fingerprint_leaves_offloaded_weights_alone() -> None:
    weights, found = make_weights(), WeightFingerprint()
    found.has_changed(weights.items())
    storage = weights["a"].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert not found.has_changed(weights.items())
    storage.resize_(size)
    weights["a"].copy_(make_weights()["a"])
    assert not found.has_changed(weights.items())
