"""A frozen base in 8 or 4 bits: linear layers store torchao's codes and dequantise their matrix for each use.

    int8   an 8-bit code for each number, and a scale for each row
    nf4    a 4-bit code for each number, of 16 quantiles of a normal distribution, and a scale for every 64 numbers
           (QLoRA, arXiv:2305.14314)

Forward and backward each dequantise the matrix, which is not kept. Files and engines get the dequantised matrix, so
that an engine in bfloat16 computes with the same numbers.
"""

from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.parallel.sharding import CodedLinear, base_name

QuantizedBase = Literal["int8", "nf4"]
NF4_BLOCK = 64
"""Numbers in a block, which have a common scale."""
NF4_SCALES = 256
"""Scales that torchao quantises together, if a matrix has as many."""
COMPUTING_BYTES = 8
"""Maximum bytes for each number of a matrix during dequantisation, including the result."""


class QuantizedLinear(CodedLinear):
    """A linear layer whose matrix [out, in] is stored as quantised codes.

    Args:
        codes: int8 [out, in], or uint8 with two 4-bit codes in each byte, the first in the upper half.
        scales: [blocks, 1], one for each block of consecutive elements of the matrix.
        values: [16] values of the 4-bit codes; None for 8-bit codes, which are the values.
        shape: shape of the matrix.
        dtype: dtype of the matrix.
        bias: bias of the layer, or None.
    """

    values: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        values: Tensor | None,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("values", values, persistent=False)
        self.bias = bias
        self.out_features, self.in_features = shape
        self.dtype = dtype

    @property
    def weight(self) -> nn.Parameter:
        """The dequantised matrix, computed at each access."""
        matrix = dequantize(self.codes, self.scales, self.values, self.in_features, self.dtype)
        return nn.Parameter(matrix, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for an input ``x``, computed with the dequantised matrix."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.codes, self.scales, self.values, self.in_features, self.dtype
        )
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """Computes ``x W^T``, and saves the codes rather than W for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, values: Tensor | None, columns: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, values)
        ctx.columns, ctx.dtype = columns, dtype
        return F.linear(x, dequantize(codes, scales, values, columns, dtype).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        codes, scales, values = ctx.saved_tensors
        matrix = dequantize(codes, scales, values, ctx.columns, ctx.dtype).to(gradient.dtype)
        return gradient @ matrix, None, None, None, None, None


def dequantize(codes: Tensor, scales: Tensor, values: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] in ``dtype`` from its quantised codes and scales. ``columns`` is the number of
    inputs; other arguments are those of :class:`QuantizedLinear`.
    """
    if values is None:
        numbers = codes.to(scales.dtype)
    else:
        numbers = values.index_select(0, torch.stack([codes >> 4, codes & 15], -1).flatten().int())
    return (numbers.view(scales.shape[0], -1) * scales).view(-1, columns).to(dtype)


def quantize_layers(policy: PreTrainedModel, names: set[str], kind: QuantizedBase, device: torch.device) -> None:
    """Replace the linear layers ``names`` of a policy by :class:`QuantizedLinear` on ``device``, one at a time, so that
    the policy itself may be on the host.

    ``names`` are the layers' names in a model without an adapter.
    """
    for name, module in list(policy.named_modules()):
        if type(module) is nn.Linear and base_name(f"{name}.weight").removesuffix(".weight") in names:
            parent, _, own = name.rpartition(".")
            setattr(policy.get_submodule(parent), own, quantize(module, kind, device))


@torch.no_grad()
def quantize(linear: nn.Linear, kind: QuantizedBase, device: torch.device) -> QuantizedLinear:
    """Return a :class:`QuantizedLinear` on ``device`` with the quantised matrix of a linear layer."""
    ao, matrix = import_torchao(kind), linear.weight.to(device)
    values: Tensor | None
    if kind == "int8":
        coded = ao.Int8Tensor.from_hp(matrix, ao.PerRow())
        codes, scales, values = coded.qdata, coded.scale, None
    else:
        blocks = matrix.numel() // NF4_BLOCK
        coded = ao.to_nf4(matrix, NF4_BLOCK, NF4_SCALES if blocks % NF4_SCALES == 0 else blocks)
        rounded = coded.quantized_scalers, coded.quantization_factor, coded.scaler_block_size
        codes, scales, values = coded.quantized_data, coded.dequantize_scalers(*rounded).view(-1, 1), coded.nf4
    shape = (linear.out_features, linear.in_features)
    return QuantizedLinear(codes, scales, values, shape=shape, dtype=matrix.dtype, bias=linear.bias)


def coded_bytes(kind: QuantizedBase, outputs: int, inputs: int, itemsize: int) -> int:
    """Return the bytes of codes and scales of a quantised matrix [outputs, inputs]; ``itemsize`` is that of the
    matrix's dtype.
    """
    numbers = outputs * inputs
    return numbers + 4 * outputs if kind == "int8" else numbers // 2 + itemsize * numbers // NF4_BLOCK


def import_torchao(kind: QuantizedBase) -> ModuleType:
    """Return torchao's quantisation module, or raise a ConfigError if torchao is missing."""
    try:
        import torchao.quantization
        from torchao.quantization import Int8Tensor, PerRow, to_nf4  # noqa: F401  # older versions lack some
    except ImportError as error:
        raise ConfigError(
            f"model.adapter.quantize_base={kind} needs the package torchao of version 0.18 or later "
            f"({cut_line(error)}). Install it by: pip install 'rlightning[torchao]'"
        ) from error
    package: ModuleType = torchao.quantization
    return package
