"""Rounding: to one of the two neighbours, right in the mean, and what nearest rounding would freeze moves."""

from typing import Any

import pytest
import torch

from rlightning.optim.moments import (
    BLOCK,
    CHUNK,
    block_length,
    bytes_per_parameter,
    dequantize,
    levels,
    pack_moment,
    quantize,
    round_to_bfloat16,
    unpack_moment,
)

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sign", [1, -1])
def test_bfloat16_stochastic_rounding_is_unbiased(sign: int) -> None:
    """Between 1 and 2 numbers in bfloat16 are 2^-7 apart."""
    step = 2.0**-7
    rounded = sign * round_to_bfloat16(torch.full((40_000,), sign * (1 + step / 4)), generator()).float()
    assert set(rounded.tolist()) == {1.0, 1 + step}
    # five standard deviations of the mean of 40,000 draws: 5 sqrt(3/16 / 40,000) = 0.011
    assert ((rounded.mean() - 1) / step).item() == pytest.approx(1 / 4, abs=0.011)


def test_what_bfloat16_can_say_stays() -> None:
    known = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3e38, float("inf")]).bfloat16().float()
    assert torch.equal(round_to_bfloat16(known, generator()).float(), known)
    # up over a power of two, where the exponent changes too
    almost = torch.full((100,), 2 - 2.0**-23)
    assert set(round_to_bfloat16(almost, generator()).tolist()) <= {2.0, 2 - 2.0**-7}


def test_a_moment_that_nearest_rounding_would_freeze_decays() -> None:
    """0.999^300 is 0.741. A step of 1/1000 is less than half of the distance 2^-8 between numbers below 1."""
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    stochastic, numbers = nearest.clone(), generator()
    for _ in range(300):
        nearest = (0.999 * nearest.float()).bfloat16()
        stochastic = round_to_bfloat16(0.999 * stochastic.float(), numbers)
    assert nearest.eq(1).all()
    # A step's rounding has a variance of at most 2^-8^2 / 4: the mean of 4,096 sums of 300 of them is within
    # 5 * 2^-9 * sqrt(300 / 4096) = 0.0027 of the right one.
    assert stochastic.float().mean().item() == pytest.approx(0.999**300, abs=0.0027)


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_reach_over_seven_powers_of_ten(is_signed: bool) -> None:
    known = levels(is_signed, CPU)
    assert len(known) == 255 and known[-1] == 1 and (known.diff() > 0).all()
    if is_signed:
        assert torch.equal(known, -known.flip(0)) and known[127] == 0
        assert known[128].item() == pytest.approx(0.55e-6)  # the mean of 0.1e-6 and 1e-6
    else:
        assert known[:2].tolist() == pytest.approx([0.325e-6, 0.775e-6])  # of 0.1, 0.55 and 1


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_are_kept_exactly(is_signed: bool) -> None:
    """A block's largest magnitude is its scale, whatever its sign. Levels of it stay, without signs their squares."""
    known = levels(is_signed, CPU)[-BLOCK:]
    largest = torch.tensor([[1.0], [-1.0 if is_signed else 2.0], [2.0**-20]])
    values = largest * known
    codes, scales = quantize(values if is_signed else values.square(), is_signed=is_signed, generator=generator())
    assert (codes.shape, scales.shape) == ((3, 128), (3, 1))
    torch.testing.assert_close(scales, largest.abs(), rtol=3e-7, atol=0)
    got = dequantize(codes, scales, is_signed=is_signed)
    torch.testing.assert_close(got, values if is_signed else values.square(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_signed", [True, False])
def test_8_bit_rounding_is_unbiased_between_neighbours(is_signed: bool) -> None:
    share = 0.3
    row = torch.full((1, BLOCK), share)
    row[0, 0] = 1.0
    values = 5 * row.expand(1000, -1)
    codes, scales = quantize(values if is_signed else values.square(), is_signed=is_signed, generator=generator())
    got = dequantize(codes, scales, is_signed=is_signed)
    got = (got if is_signed else got.sqrt()) / 5
    torch.testing.assert_close(got[:, 0], torch.ones(1000), rtol=3e-7, atol=0)
    upper = int((levels(is_signed, CPU) > share).nonzero()[0])
    assert set(codes[:, 1:].unique().tolist()) == {upper - 1, upper}
    # at most 0.9 / 64 apart: the mean of 127,000 draws is within 5 * 0.9 / 64 / 2 / sqrt(127,000)
    assert got[:, 1:].mean().item() == pytest.approx(share, abs=1e-4)


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    values = torch.tensor([[1.0, 1e-20, 0.0, 1e-6], [0.0, 0.0, 0.0, 0.0]])
    codes, scales = quantize(values, is_signed=False, generator=generator())
    got = dequantize(codes, scales, is_signed=False)
    assert got[0, 1:3].tolist() == pytest.approx([0.325e-6**2] * 2)
    assert got[1].eq(0).all()


@pytest.mark.parametrize(
    ("columns", "length"), [(1024, 128), (896, 128), (960, 120), (576, 96), (2432, 128), (31, 31), (1, 1), (254, 127)]
)
def test_blocks_fill_a_row(columns: int, length: int) -> None:
    assert block_length(columns) == length
    codes, scales = quantize(torch.randn(2, 3, columns), is_signed=True, generator=generator())
    assert (codes.shape, scales.shape) == ((2, 3, columns), (2, 3, columns // length))


def test_empty_shard_keeps_its_shape() -> None:
    codes, scales = quantize(torch.zeros(0, 256), is_signed=True, generator=generator())
    assert (codes.shape, scales.shape) == ((0, 256), (0, 2))
    assert dequantize(codes, scales, is_signed=True).shape == (0, 256)
    assert round_to_bfloat16(torch.zeros(0, 256), generator()).shape == (0, 256)


def test_large_tensors_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts are reached, none twice."""
    monkeypatch.setattr("rlightning.optim.moments.CHUNK", 2 * BLOCK)
    assert CHUNK > 2 * BLOCK
    values = torch.arange(1.0, 5 * BLOCK + 1).view(5, BLOCK)
    # at most 2^-7 of a number apart in bfloat16; the two largest levels of 8 bits are 1.5 * 0.9 / 64 apart
    torch.testing.assert_close(round_to_bfloat16(values, generator()).float(), values, rtol=2.0**-7, atol=0)
    got = dequantize(*quantize(values, is_signed=True, generator=generator()), is_signed=True)
    for row, expected in zip(got, values, strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=1.5 * 0.9 / 64 * expected[-1].item())


@pytest.mark.parametrize(
    ("shape", "states", "num_bytes"),
    [
        ((64, 256), "float32", 8.0),
        ((64, 256), "bfloat16", 4.0),
        ((64, 256), "8bit", 2 * (1 + 4 / 128)),
        ((64, 131), "8bit", 2 * (1 + 4)),  # a prime: each value has a scale
        ((64, 7), "8bit", 2 * (1 + 4 / 7)),  # an adapter of rank 7
        ((64,), "8bit", 8.0),
    ],
)
def test_bytes_are_what_the_plan_counts(shape: tuple[int, ...], states: Any, num_bytes: float) -> None:
    values = torch.rand(shape)
    packed = [
        tensor
        for name in ("exp_avg", "exp_avg_sq")
        for tensor in pack_moment(name, values, states, generator()).values()
    ]
    total = sum(tensor.nbytes for tensor in packed)
    assert total / values.numel() == pytest.approx(num_bytes)
    assert bytes_per_parameter(states, [shape]) == pytest.approx(num_bytes)


def test_bytes_per_parameter_is_the_mean_over_tensors() -> None:
    shapes = [(2, 128), (2, 131)]  # 2 scales, and one of each of 262 values
    assert bytes_per_parameter("8bit", shapes) == pytest.approx(2 * (518 + 4 * (2 + 262)) / 518)


def test_8_bit_rounding_ignores_default_dtype() -> None:
    values = torch.rand(4, BLOCK)
    expected = pack_moment("exp_avg", values, "8bit", generator())
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does for bf16-true
    try:
        got = pack_moment("exp_avg", values, "8bit", generator())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_vectors_stay_as_they_are_with_8_bits() -> None:
    values = torch.rand(256)
    packed = pack_moment("exp_avg", values, "8bit", generator())
    assert torch.equal(unpack_moment("exp_avg", packed), values)
