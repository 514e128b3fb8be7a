"""Whether FlashAttention 4 can be used: installed, made for the GPU, and as exact here as ``varlen_attn``.

The kernels are tried once in a process for each kind of attention, which compiles them all in some seconds, so that
they cannot fail during training.

Letters: ``H`` query heads, ``K`` key/value heads, ``D`` head size.
"""

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlightning.models.flash_attention_4 import INTERFACE, flash_attention
from rlightning.models.segment_attention import segment_attention, shared_heads
from rlightning.types.shared_prefixes import Prefixes, share_prefixes

log = logging.getLogger(__name__)

CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs that its backward supports with all that is asked of it here."""
MAX_HEAD_SIZE = 128
"""The largest head size that it takes on all of them."""
ROUNDING = 0.01
"""Largest difference from ``varlen_attn``, relative to the norm, that counts as rounding of half precision."""
SEQUENCES = (
    ([1, 70, 130, 5], [1, 70, 200, 300]),
    ([1, 2], [1, 2]),
    ([2] * 300, [2] * 300),
)
"""Lengths of the queries and of the keys of random sequences. For at most 128 tokens, and for more than 256 sequences,
the package has kernels of their own."""
TREES = (
    ([300, 330, 131, 70, 200], [0, 200, 130, 0, 60]),
    ([3, 4, 5] * 100, [0, 2, 2] * 100),
)
"""Lengths of random sequences, and of the prefix that each shares with the one before."""
_TRIAL = threading.Lock()
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [T, H, D], keys and values [T', K, D]: [T, H, D]."""


class _Trial(NamedTuple):
    """Numbers of queries and of keys, and attention by FlashAttention 4 and by ``varlen_attn``."""

    num_queries: int
    num_keys: int
    ways: tuple[Attend, Attend]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it runs kernels, which torch.compile cannot trace
def flash_attention_obstacle(
    device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int, has_window: bool
) -> str | None:
    """Return why a model that can use ``varlen_attn`` cannot use FlashAttention 4; None if it can.

    Args:
        device: a CUDA device, or any other.
        dtype: float16 or bfloat16.
        head_size: ``D``.
        heads_per_key: ``H / K``.
        has_window: whether the model has layers with a sliding window.
    """
    return _find_obstacle(device, dtype, head_size, heads_per_key, "windows" if has_window else "sequences")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # as above
def shared_prefix_obstacle(device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int) -> str | None:
    """Return why :func:`~rlightning.models.segment_attention.segment_attention` cannot use FlashAttention 4; None if it
    can. Arguments are those of :func:`flash_attention_obstacle`.
    """
    return _find_obstacle(device, dtype, head_size, heads_per_key, "shared prefixes")


@functools.cache
def _find_obstacle(
    device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int, kind: str
) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return f"needs compute capability {' or '.join(map(str, CAPABILITIES))}"
    if head_size > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, not {head_size}"
    try:
        import_module(INTERFACE)
    except ImportError as error:
        return f"is not installed ({error}): pip install 'rlightning[fa4]'"
    compare = functools.partial(_compare, device, dtype, head_size, heads_per_key)
    # A new thread has none of this thread's modes: autocast, no_grad, hooks of gradient checkpointing.
    thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
    try:
        with _TRIAL, thread, warnings.catch_warnings(action="ignore"):  # the compiler's warnings
            difference = float(torch.tensor(list(thread.map(compare, _trials(kind)))).max())
    except Exception as error:  # kernels that are compiled here may raise any exception; the run can use others
        obstacle = f"fails here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        if difference <= ROUNDING:
            return None
        obstacle = f"differs from it by {difference:.2g}"
    log.warning("attention over %s is by varlen_attn in this process, as FlashAttention 4 %s", kind, obstacle)
    return obstacle


def _trials(kind: str) -> list[_Trial]:
    if kind == "shared prefixes":
        return [_shared_trial(*tree) for tree in TREES]
    return [_packed_trial(*lengths, 50 if kind == "windows" else None) for lengths in SEQUENCES]


def _packed_trial(queries: list[int], keys: list[int], window: int | None) -> _Trial:
    bounds = [torch.tensor([0, *accumulate(part)], dtype=torch.int32) for part in (queries, keys)]
    longest = max(queries), max(keys)

    def by_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, whole = (part.to(q.device) for part in bounds)
        return flash_attention(q, k, v, (own, whole), longest, None, window)

    def by_varlen_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, whole = (part.to(q.device) for part in bounds)
        sides = (-1 if window is None else window - 1, 0)
        out = varlen_attn(q, k, v, own, whole, *longest, window_size=sides, **shared_heads(q, k))
        assert isinstance(out, Tensor)  # a pair only with return_aux
        return out

    return _Trial(sum(queries), sum(keys), (by_flash_attention, by_varlen_attn))


def _shared_trial(lengths: list[int], prefixes: list[int]) -> _Trial:
    tree = Prefixes([*range(len(lengths))], np.array(prefixes))
    layout = share_prefixes(torch.tensor([0, *accumulate(lengths)]), tree)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, has_flash_attention: bool) -> Tensor:
        shared = layout.to(q.device)
        bounds = shared.cu_seqlens, shared.max_length, shared.segments, shared.max_segment
        return segment_attention(q, k, v, *bounds, None, has_flash_attention=has_flash_attention)

    num_tokens = layout.unique.numel()
    ways = functools.partial(attend, has_flash_attention=True), functools.partial(attend, has_flash_attention=False)
    return _Trial(num_tokens, num_tokens, ways)


def _compare(device: torch.device, dtype: torch.dtype, head_size: int, heads_per_key: int, trial: _Trial) -> float:
    """Return the largest relative difference of results and gradients of a trial's two ways for random inputs; NaN if
    one is NaN.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((trial.num_queries, 2 * heads_per_key), (trial.num_keys, 2), (trial.num_keys, 2))
    tensors = [torch.randn(*shape, head_size, dtype=dtype, device=device, generator=generator) for shape in shapes]
    inputs = [tensor.requires_grad_() for tensor in tensors]
    direction = torch.randn(inputs[0].shape, dtype=dtype, device=device, generator=generator)
    outs = [attend(*inputs) for attend in trial.ways]
    found, others = ([out.detach(), *torch.autograd.grad(out, inputs, direction)] for out in outs)
    pairs = [(a.float(), b.float()) for a, b in zip(found, others, strict=True)]
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())
