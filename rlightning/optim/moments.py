"""AdamW's moments in fewer bytes than in its computation: bfloat16, or 8-bit codes with a scale for each block.

Both are rounded stochastically, so that the mean is exact. Rounding to nearest would fail: with ``betas[1]`` 0.999 a
step reduces a second moment by a thousandth, less than half the relative distance of two bfloat16 numbers, which is at
least 2^-9. Without a large gradient the moment would never change.

Letters: ``C`` columns of a tensor, its last dimension; ``S`` blocks of a row.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import torch
from torch import Generator, Tensor

OptimizerStates = Literal["float32", "bfloat16", "8bit"]

BLOCK = 128
"""Maximum number of values with a common scale."""
CHUNK = 1 << 24
"""Number of values that are rounded at a time, which bounds temporary memory to a few times 64 MiB."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's moments by name, and whether they have a sign."""


def bytes_per_parameter(states: OptimizerStates, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> float:
    """Return the bytes of both moments of tensors with these shapes, for each of their elements.

    Args:
        states: the format.
        shapes: shapes of all tensors. With 8 bits the number of scales depends on the rows' length: one of each value
            in a row of a prime above 128.
        itemsize: bytes of an element of the parameters.
    """
    if states != "8bit":
        return 4.0 if states == "bfloat16" else 2.0 * itemsize
    total = 0.0
    for shape in shapes:
        each = 1 + 4 / block_length(shape[-1]) if len(shape) > 1 else itemsize
        total += 2 * each * math.prod(shape)
    return total / sum(map(math.prod, shapes))


def scale_name(name: str) -> str:
    """Return the key of a moment's block scales in the optimizer's state, such as "exp_avg_scale"."""
    return f"{name}_scale"


def pack_moment(name: str, values: Tensor, states: OptimizerStates, generator: Generator) -> dict[str, Tensor]:
    """Convert one of AdamW's moments to the format in which it is stored between steps; return the tensors by name.

    Args:
        name: AdamW's name of the moment, such as "exp_avg".
        values: this rank's part of the moment, of any shape. Vectors (norms, biases) are never stored in 8 bits, since
            they are small.
        states: the format; ``float32`` keeps the dtype of ``values``.
        generator: random generator on the same device.

    Returns:
        By name, a tensor of the shape of ``values``, and with 8 bits the scales.
    """
    if states == "bfloat16" and values.dtype == torch.float32:
        return {name: round_to_bfloat16(values, generator)}
    if states == "8bit" and values.ndim > 1:
        codes, scales = quantize(values, is_signed=SIGNED[name], generator=generator)
        return {name: codes, scale_name(name): scales}
    return {name: values}


def unpack_moment(name: str, kept: Mapping[str, Tensor]) -> Tensor:
    """Return the moment that :func:`pack_moment` stored, in its stored dtype; float32 if it was stored in 8 bits."""
    if (scales := kept.get(scale_name(name))) is None:
        return kept[name]
    return dequantize(kept[name], scales, is_signed=SIGNED[name])


def round_to_bfloat16(values: Tensor, generator: Generator) -> Tensor:
    """Round finite float32 numbers to one of the two nearest in bfloat16, at random; the nearer one is more probable.

    A bfloat16 consists of the upper 16 bits of a float32, and the lower 16 bits are the distance to the next bfloat16.
    Adding 16 random bits carries into the upper ones with the right probability.
    """
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    for part, target in zip(values.reshape(-1).split(CHUNK), rounded.view(-1).split(CHUNK), strict=True):
        noise = torch.randint(1 << 16, part.shape, dtype=torch.int32, device=part.device, generator=generator)
        bits = noise.add_(part.view(torch.int32)).bitwise_and_(-1 << 16)
        target.copy_(bits.view(torch.float32))
    return rounded


def quantize(values: Tensor, *, is_signed: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Quantise a tensor to 8-bit codes, with a scale for each block of a row; values are rounded stochastically.

    The codes have dynamic levels (arXiv:2110.02861, section 2).

    A block is a part of a row, so that shards of rows have their own blocks. A number is divided by the block's largest
    magnitude, and stored as the index of one of the two nearest levels. Unsigned numbers (the second moment) are stored
    as square roots, by which AdamW divides; their seven powers of ten cover fourteen of the moment.

    Args:
        values: [..., C], finite.
        is_signed: whether values may be negative.
        generator: random generator on the same device.

    Returns:
        Codes [..., C], uint8, and scales [..., S], float32.
    """
    length = block_length(values.shape[-1])
    blocks = values.reshape(-1, length)
    codes = torch.empty(blocks.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(blocks), dtype=torch.float32, device=values.device)
    known = levels(is_signed, values.device)
    num_blocks = max(CHUNK // length, 1)
    for start in range(0, len(blocks), num_blocks):
        part = blocks[start : start + num_blocks].float()
        part = part if is_signed else part.sqrt()
        largest = part.abs().amax(1)
        shares = part / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        below = torch.bucketize(shares, known, out_int32=True, right=True).sub_(1).clamp_(0, len(known) - 2)
        lower, upper = known[below], known[below + 1]
        chance = (shares - lower) / (upper - lower)
        draw = torch.rand(part.shape, dtype=torch.float32, device=part.device, generator=generator)
        codes[start : start + num_blocks] = below + (draw < chance)
        scales[start : start + num_blocks] = largest
    return codes.view(values.shape), scales.view(*values.shape[:-1], values.shape[-1] // length)


def dequantize(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the values of codes [..., C] and scales [..., S] that :func:`quantize` returned: float32 [..., C]."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    known = levels(is_signed, codes.device)
    length = codes.shape[-1] // scales.shape[-1]
    num_blocks = max(CHUNK // length, 1)
    blocks, flat = codes.reshape(-1, length).split(num_blocks), scales.reshape(-1, 1).split(num_blocks)
    for part, scale, target in zip(blocks, flat, values.view(-1, length).split(num_blocks), strict=True):
        torch.mul(known[part.int()], scale, out=target)
    return values if is_signed else values.square_()


@cache
def block_length(num_columns: int) -> int:
    """Return the number of values with a common scale in a row of ``num_columns``: its largest divisor up to 128."""
    return max(length for length in range(1, BLOCK + 1) if num_columns % length == 0)


@cache
def levels(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 255 numbers that 8-bit codes stand for, ascending to 1: denser near 0, over seven powers of ten.

    As in arXiv:2110.02861, with two differences. Levels include both -1 and 1, so that the largest magnitude is exact.
    Without signs there is no 0 (arXiv:2309.01507): AdamW divides by the second moment's root, so that a moment rounded
    to 0 would give a huge step. A block of zeros has a scale of 0.
    """
    positive = []
    for power in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (power if is_signed else power + 1) + 1, dtype=torch.float64)
        positive.append((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (power - 6))
    known = torch.cat(positive)
    one = torch.ones(1, dtype=torch.float64)
    if is_signed:
        known = torch.cat([known[:-1], one])
        known = torch.cat([-known.flip(0), 0 * one, known])
    else:
        known = torch.cat([known, one])
    return known.to(device, torch.float32)
