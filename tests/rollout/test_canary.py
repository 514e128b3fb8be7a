"""Noticing that weights have changed."""

import torch

from rlightning.rollout.canary import WeightPrint


def make_weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.zeros(0)}


def test_weight_print_notices_a_swap_through_data() -> None:
    weights, found = make_weights(), WeightPrint()
    assert not found.has_changed(weights.items())  # the first call has nothing to compare with
    assert not found.has_changed(weights.items())
    averaged = weights["b"].clone()
    weights["b"].data.copy_(-averaged)  # of equal norm
    assert found.has_changed(weights.items())
    weights["b"].data.copy_(averaged)
    assert found.has_changed(weights.items())
    assert not found.has_changed(weights.items())


def test_weight_print_of_nan_equals_itself() -> None:
    weights, found = {"a": torch.tensor([float("nan"), 1.0])}, WeightPrint()
    found.has_changed(weights.items())
    assert not found.has_changed(weights.items())


def test_weight_print_leaves_offloaded_weights_alone() -> None:
    weights, found = make_weights(), WeightPrint()
    found.has_changed(weights.items())
    storage = weights["a"].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert not found.has_changed(weights.items())
    storage.resize_(size)
    weights["a"].copy_(make_weights()["a"])
    assert not found.has_changed(weights.items())
