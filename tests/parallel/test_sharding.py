"""Norms and biases as an engine has them."""

import pytest
import torch
from torch import nn

from rlightning.parallel.sharding import rounded_vectors


def test_rounded_vectors_are_masters_again_whatever_happens() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1 + 2**-9, 1 + 2**-7]))  # bfloat16 has 1 and 1 + 2^-7, and nothing in between
        layer.weight.fill_(1 + 2**-9)
    with pytest.raises(KeyError), rounded_vectors(layer, torch.bfloat16):
        assert layer.bias.tolist() == [1, 1 + 2**-7]
        assert (layer.weight == 1 + 2**-9).all()  # a matrix is rounded where it is multiplied
        raise KeyError
    assert layer.bias.tolist() == [1 + 2**-9, 1 + 2**-7]
