"""AdamW's moments in fewer bytes than it computes with: bfloat16, or 8-bit codes with a scale for each block.

Both are rounded up or down at random, so that the mean is exact. To the nearest would not do: with ``betas[1]`` 0.999 a
step takes a thousandth off a second moment, and half the distance between two numbers in bfloat16 is at least 2^-9 of
them, about two thousandths. Without a large gradient it would stay where it is for ever.

Letters: ``C`` columns of a tensor, its last dimension; ``S`` blocks of a row.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import torch
from torch import Generator, Tensor

OptimizerStates = Literal["float32", "bfloat16", "8bit"]

BLOCK = 128
"""Maximum number of values that share a scale."""
CHUNK = 1 << 24
"""Values that are rounded at a time: the temporary memory is some times 64 MiB, however large the tensor."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's moments by name, and whether they have a sign."""


def bytes_per_parameter(states: OptimizerStates, itemsize: int = 4) -> float:
    """Return the bytes of both moments for each number of a matrix; ``itemsize`` is that of the parameter's dtype."""
    return {"float32": 2.0 * itemsize, "bfloat16": 4.0, "8bit": 2 * (1 + 4 / BLOCK)}[states]


def scale_name(name: str) -> str:
    """Return the key in the optimizer's state of a moment's scales."""
    return f"{name}_scale"


def pack_moment(name: str, values: Tensor, states: OptimizerStates, generator: Generator) -> dict[str, Tensor]:
    """Return a moment in the form that is stored between steps.

    Args:
        name: AdamW's for it.
        values: of this rank, of any shape. A vector (norms, biases) is too small to be worth 8 bits: it stays.
        states: ``float32`` keeps the dtype that ``values`` have.
        generator: of the same device.

    Returns:
        By name, one tensor of the shape of ``values``, and with 8 bits the scales.
    """
    if states == "bfloat16" and values.dtype == torch.float32:
        return {name: round_to_bfloat16(values, generator)}
    if states == "8bit" and values.ndim > 1:
        codes, scales = quantize(values, is_signed=SIGNED[name], generator=generator)
        return {name: codes, scale_name(name): scales}
    return {name: values}


def unpack_moment(name: str, kept: Mapping[str, Tensor]) -> Tensor:
    """Return the moment that :func:`pack_moment` packed, in any form; float32 if it was stored in 8 bits."""
    if (scales := kept.get(scale_name(name))) is None:
        return kept[name]
    return dequantize(kept[name], scales, is_signed=SIGNED[name])


def round_to_bfloat16(values: Tensor, generator: Generator) -> Tensor:
    """Round finite float32 numbers to one of the two nearest in bfloat16, at random; the nearer one is more probable.

    The lower 16 bits of a float32 say how far it is on its way to the next bfloat16, which has the upper 16 bits.
    Adding 16 random bits carries into those with that probability.
    """
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    for part, target in zip(values.reshape(-1).split(CHUNK), rounded.view(-1).split(CHUNK), strict=True):
        noise = torch.randint(1 << 16, part.shape, dtype=torch.int32, device=part.device, generator=generator)
        bits = noise.add_(part.view(torch.int32)).bitwise_and_(-1 << 16)
        target.copy_(bits.view(torch.float32))
    return rounded


def quantize(values: Tensor, *, is_signed: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Blockwise dynamic quantisation (arXiv:2110.02861, section 2), rounded stochastically.

    A block is a part of a row, so that shards of rows have blocks of their own. A number becomes the place of one of
    the two levels that are nearest to its share of the block's largest magnitude. Of numbers without a sign, the second
    moment, this is done to their roots: by them AdamW divides, and seven powers of ten of them are fourteen of it.

    Args:
        values: [..., C], finite.
        is_signed: without, all of them are at least 0.
        generator: of the same device.

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
    """Return the values that :func:`quantize` rounded, of codes [..., C] and scales [..., S]: float32 [..., C]."""
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
    """Return the largest block length, up to :data:`BLOCK`, that divides the row length."""
    return max(length for length in range(1, BLOCK + 1) if num_columns % length == 0)


@cache
def levels(is_signed: bool, device: torch.device) -> Tensor:
    """Return the values of the 255 codes, ascending: finer towards 0, over seven powers of ten, up to the maximum.

    As in arXiv:2110.02861, with two differences. There is a -1 as there is a 1: the largest magnitude is kept exactly.
    Without signs there is no 0 (arXiv:2309.01507): AdamW divides by the second moment's root, and a weight whose moment
    is far below its block's largest would take a step without measure. A block of zeros has a scale of 0.
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
