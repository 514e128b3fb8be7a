"""FlashAttention 4 over packed sequences: used where it is installed, can run, and agrees with ``varlen_attn``.

``torch.compile`` cannot trace the package: its forward and its backward are custom operators.

Letters: ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``T`` tokens, ``N`` sequences.
"""

import functools
import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

log = logging.getLogger(__name__)

INTERFACE = "flash_attn.cute.interface"
"""Module of the package ``flash-attn-4``."""
CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs that its backward supports with all that is asked of it here."""
MAX_HEAD_SIZE = 128
"""The largest head size that it takes on all of them."""
ROUNDING = 0.01
"""Largest difference from ``varlen_attn``, relative to the norm, that counts as rounding of half precision."""
TRIALS = (
    ([1, 70, 130, 5], [1, 70, 200, 300]),
    ([1, 2], [1, 2]),
    ([2] * 300, [2] * 300),
)
"""Lengths of the queries and of the keys of random sequences. For at most 128 tokens, and for more than 256 sequences,
the package has kernels of their own."""
_TRIAL = threading.Lock()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_length: int | tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention over packed sequences with FlashAttention 4. Arguments and result are those of
    :func:`~rlightning.models.attention.varlen_attention`.

    The maximum length is not passed to the package, which would compile separate kernels for short sequences.
    """
    bounds = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    tokens_left = None if window is None else window - 1
    out: Tensor = _forward(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, scaling, tokens_left)[0]
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it runs kernels, which torch.compile cannot trace
def flash_attention_obstacle(
    device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int, has_window: bool
) -> str | None:
    """Return why a model that can use ``varlen_attn`` cannot use FlashAttention 4; None if it can.

    The kernels are tried once for each set of arguments, which compiles all kernels that the model needs in some
    seconds, so that they cannot fail during training.

    Args:
        device: a CUDA device, or any other.
        dtype: float16 or bfloat16.
        head_size: ``D``.
        heads_per_key: ``H / K``.
        has_window: whether the model has layers with a sliding window.
    """
    return _find_obstacle(device, dtype, head_size, heads_per_key, has_window)


@functools.cache
def _find_obstacle(
    device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int, has_window: bool
) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return f"needs compute capability {' or '.join(map(str, CAPABILITIES))}"
    if head_size > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, not {head_size}"
    try:
        import_module(INTERFACE)
    except ImportError as error:
        return f"is not installed ({error}): pip install 'rlightning[fa4]'"
    compare = functools.partial(_compare, device, dtype, head_size, heads_per_key, has_window)
    # A new thread has none of this thread's modes: autocast, no_grad, hooks of gradient checkpointing.
    thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
    try:
        with _TRIAL, thread, warnings.catch_warnings(action="ignore"):  # the compiler's warnings
            difference = float(torch.tensor(list(thread.map(compare, TRIALS))).max())
    except Exception as error:  # kernels that are compiled here may raise any exception; the run can use others
        obstacle = f"fails here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        if difference <= ROUNDING:
            return None
        obstacle = f"differs from it by {difference:.2g}"
    log.warning("attention is by varlen_attn in this process, as FlashAttention 4 %s", obstacle)
    return obstacle


def _compare(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    heads_per_key: int,
    has_window: bool,
    lengths: tuple[list[int], list[int]],
) -> float:
    """Return the largest relative difference of results and gradients from those of ``varlen_attn``; NaN if one is NaN.

    The inputs are random sequences with ``lengths`` queries and keys.
    """
    own, whole = (torch.tensor([0, *accumulate(part)], dtype=torch.int32, device=device) for part in lengths)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((sum(lengths[0]), 2 * heads_per_key), (sum(lengths[1]), 2), (sum(lengths[1]), 2))
    tensors = [torch.randn(*shape, head_size, dtype=dtype, device=device, generator=generator) for shape in shapes]
    q, k, v = (tensor.requires_grad_() for tensor in tensors)
    direction = torch.randn(q.shape, dtype=dtype, device=device, generator=generator)
    window = 50 if has_window else None
    keys, values = (x.repeat_interleave(heads_per_key, 1) for x in (k, v))
    longest, sides = (max(lengths[0]), max(lengths[1])), (-1 if window is None else window - 1, 0)
    out = flash_attention(q, k, v, (own, whole), longest, None, window)
    expected = varlen_attn(q, keys, values, own, whole, *longest, window_size=sides)
    assert isinstance(expected, Tensor)  # a pair only with return_aux
    found, others = ([x.detach(), *torch.autograd.grad(x, (q, k, v), direction)] for x in (out, expected))
    pairs = [(a.float(), b.float()) for a, b in zip(found, others, strict=True)]
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())


@torch.library.custom_op("rlightning::flash_attention_4", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float | None,
    tokens_left: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the result [T, H, D] and the log-sum-exps [H, T].

    ``tokens_left`` is the number of earlier tokens that a token attends to; None for all.
    """
    out, sums = import_module(INTERFACE).flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        softmax_scale=scaling,
        causal=True,
        window_size=(tokens_left, None),
        return_lse=True,
    )
    return out, sums


@_forward.register_fake
def _(q: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("rlightning::flash_attention_4_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float | None,
    tokens_left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    # The package has no public function for its backward alone; torch's integration calls this function, too.
    grads: tuple[Tensor, Tensor, Tensor] = import_module(INTERFACE)._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        sums,
        softmax_scale=scaling,
        causal=True,
        window_size_left=tokens_left,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grads


@_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling, ctx.tokens_left = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, sums = ctx.saved_tensors
    grads = _backward(grad, q, k, v, out, sums, cu_seqlens_q, cu_seqlens_k, ctx.scaling, ctx.tokens_left)
    return *grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
