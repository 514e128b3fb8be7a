"""Later versions of an adapter are written as the first was, or it is noticed that they cannot be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlightning.rollout.vllm.recorded_writes import RecordedWrites

Weights = dict[str, Tensor]
Memory = list[Tensor]


def make_weights(seed: int) -> Weights:
    """Of rank 2, for four inputs and three outputs."""
    generator = torch.Generator().manual_seed(seed)
    return {"A": torch.randn(2, 4, generator=generator), "B": torch.randn(3, 2, generator=generator)}


def install(weights: Weights, memory: Memory) -> None:
    """As vLLM's layers do, with room for an adapter of rank 4: the second half of A is another worker's."""
    weights["B"] *= 1.5
    memory[0][0] = 0
    memory[0][0, :2, :2].copy_(weights["A"][:, :2], non_blocking=True)
    memory[1][0].zero_()
    memory[1][0, :3, :2].copy_(weights["B"])


def test_repeated_writes_equal_those_of_an_installation() -> None:
    memory = [torch.full((1, 4, 4), torch.nan) for _ in range(2)]
    sent = make_weights(0)
    with RecordedWrites(sent.values()) as writes:
        install(sent, memory)
    assert writes.is_repeatable
    for tensor in memory:
        tensor.fill_(torch.nan)  # as after a sleep
    for name, weight in make_weights(1).items():
        sent[name].copy_(weight)
    writes.repeat()
    expected = [torch.full((1, 4, 4), torch.nan) for _ in range(2)]
    install(make_weights(1), expected)
    assert all(map(torch.equal, memory, expected))


def read_less(weights: Weights, memory: Memory) -> None:
    weights.pop("A")
    memory[1][0, :3, :2].copy_(weights["B"])


def convert(weights: Weights, memory: Memory) -> None:
    install({name: weight.double() for name, weight in weights.items()}, memory)


def read_converted(weights: Weights, memory: Memory) -> None:
    install(weights, memory)
    memory[1][0, :3, :2].copy_(weights["B"].bfloat16())


def add(weights: Weights, memory: Memory) -> None:
    install(weights, memory)
    memory[1][0, :3, :2] += weights["B"]


def scale_after(weights: Weights, memory: Memory) -> None:
    install(weights, memory)
    weights["B"] *= 2


def scale_twice(weights: Weights, memory: Memory) -> None:
    weights["B"] *= 2
    install(weights, memory)


def copy_twice(weights: Weights, memory: Memory) -> None:
    install(weights, memory)
    memory[0][0, :2, :2].copy_(weights["A"][:, 2:])


def clear_after(weights: Weights, memory: Memory) -> None:
    install(weights, memory)
    memory[1][0, 2] = 0


def fill_with_another_number(weights: Weights, memory: Memory) -> None:
    memory[0].fill_(1)
    install(weights, memory)


def write_into_a_weight(weights: Weights, memory: Memory) -> None:
    weights["A"].copy_(weights["B"][:2, :1])
    install(weights, memory)


@pytest.mark.parametrize(
    "way",
    [
        read_less,
        convert,
        read_converted,
        add,
        scale_after,
        scale_twice,
        copy_twice,
        clear_after,
        fill_with_another_number,
        write_into_a_weight,
    ],
)
def test_other_writes_are_not_repeatable(way: Callable[[Weights, Memory], None]) -> None:
    weights, memory = make_weights(0), [torch.zeros(1, 4, 4) for _ in range(2)]
    with RecordedWrites(weights.values()) as writes:
        way(weights, memory)
    assert not writes.is_repeatable
