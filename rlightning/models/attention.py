"""Attention over packed sequences, as an attention function of transformers.

The model runs on one row of ``T`` tokens; only attention has to know where a sequence ends. On CUDA in half precision
that is FlashAttention 4, or ``torch.nn.attention.varlen.varlen_attn`` where that is not installed or cannot be used
(:mod:`~rlightning.models.flash_attention_trial`). For what neither can do (:func:`varlen_obstacle`) queries, keys and
values are padded to [N, longest] inside this function alone, which is exact: padding lies to the right of a causal
sequence, so that no real token attends to it.

``torch.compile`` traces each of these functions into one graph for all numbers of tokens and sequences: no code here
may branch on these numbers.

Letters: ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``T`` tokens, ``N`` sequences, ``L`` the longest.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from rlightning.models.counts import count_windows, head_size, num_key_value_heads
from rlightning.models.flash_attention_4 import flash_attention
from rlightning.models.flash_attention_trial import flash_attention_obstacle, shared_prefix_obstacle
from rlightning.models.segment_attention import segment_attention, shared_heads
from rlightning.types.shared_prefixes import SharedPrefixes

T = TypeVar("T")

PACKED_ATTENTION = "rlightning_packed"
"""The name to load a model with: ``attn_implementation=PACKED_ATTENTION``."""
MAX_HEAD_SIZE = 256
"""The largest that ``varlen_attn`` takes; a smaller one has to be a multiple of 8."""


def packed_inputs(
    token_ids: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    shared: SharedPrefixes | None = None,
) -> dict[str, Any]:
    """Return the arguments of a model's forward pass over packed sequences.

    Args:
        token_ids: [T].
        position_ids: [T].
        cu_seqlens: [N+1] int32, the first token of each sequence, and ``T``.
        max_length: ``L`` or more; a larger value only wastes computation.
        shared: prefixes that sequences share, of which each is computed once: ``U`` tokens in the order of
            ``shared.unique``.
    """
    if shared is not None:
        tensors = {"input_ids": token_ids[shared.unique][None], "position_ids": position_ids[shared.unique][None]}
        queries = {"cu_seq_lens_q": shared.cu_seqlens, "max_length_q": shared.max_length}
        keys = {"cu_seq_lens_k": shared.path_cu_seqlens, "max_length_k": shared.max_path, "key_places": shared.paths}
        segments = {"segments": shared.segments, "max_segment": shared.max_segment}
        return {**tensors, **queries, **keys, **segments, "use_cache": False}
    tensors = {"input_ids": token_ids[None], "position_ids": position_ids[None]}
    bounds = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return {**tensors, **bounds, "max_length_q": max_length, "max_length_k": max_length, "use_cache": False}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int = 0,
    key_places: Tensor | None = None,
    segments: Tensor | None = None,
    max_segment: tuple[int, int] = (0, 0),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    as_on_cuda: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None, since transformers creates no mask for this function.
        cu_seq_lens_q: see :func:`packed_inputs`.
        max_length_q: see :func:`packed_inputs`.
        cu_seq_lens_k: the first key of each sequence; with shared prefixes there are more keys than queries.
        max_length_k: the largest number of keys of a sequence, or more.
        key_places: [T] with shared prefixes: for each key, the index of the token [U] that computes it.
        segments: for shared prefixes, see :class:`~rlightning.types.shared_prefixes.SharedPrefixes`.
        max_segment: see :func:`~rlightning.models.segment_attention.segment_attention`.
        scaling: factor of the dot products; None for ``D ** -0.5``.
        dropout: must be 0: a policy's log-probabilities are not random.
        sliding_window: number of tokens that a token attends to, including itself; None for all earlier ones.
        as_on_cuda: whether to choose the function for a GPU on any device, to measure its memory.
        kwargs: arguments of other attention functions; ``softcap`` and ``s_aux``, which would change the result, are
            rejected.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} asks attention for '{name}', which packed attention lacks"
            )
    if cu_seq_lens_q is None:
        raise NotImplementedError(f"{type(module).__name__} does not tell attention where a sequence ends")
    if dropout:
        raise NotImplementedError(f"{type(module).__name__} asks attention for dropout={dropout}; a policy has none")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # [T, heads, D], the layout of packed kernels
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attend = _choose_kernel(q, k, v, has_window=sliding_window is not None, as_on_cuda=as_on_cuda)
    if key_places is None:
        return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None
    assert cu_seq_lens_k is not None and segments is not None
    if attend is not padded_attention and sliding_window is None:
        bounds = cu_seq_lens_q, max_length_q, segments, max_segment
        is_fast = attend is flash_attention and shared_prefix_obstacle(*_sizes(q, k)) is None
        return segment_attention(q, k, v, *bounds, scaling, has_flash_attention=is_fast).unsqueeze(0), None
    # A sequence's own tokens, the last of its path, attend to the whole path: the causal mask is aligned at the end,
    # from which a window, which differs between the tokens of a segment, is counted too.
    k, v = (_Gather.apply(x, key_places) for x in (k, v))  # type: ignore[no-untyped-call]
    ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
    return attend(q, k, v, ends, longest, scaling, sliding_window).unsqueeze(0), None


def _choose_kernel(q: Tensor, k: Tensor, v: Tensor, *, has_window: bool, as_on_cuda: bool) -> Callable[..., Tensor]:
    """Return the fastest available attention function; with ``as_on_cuda`` the one for a GPU, on any device."""
    sizes = q.dtype, q.shape[-1], v.shape[-1]
    obstacle = kernel_obstacle(*sizes) if as_on_cuda else varlen_obstacle(q.device, *sizes)
    if obstacle is not None:
        return padded_attention
    if as_on_cuda:  # FlashAttention 4 needs no more memory
        return varlen_attention
    slower = flash_attention_obstacle(*_sizes(q, k), has_window)
    return flash_attention if slower is None else varlen_attention


def _sizes(q: Tensor, k: Tensor) -> tuple[torch.device, torch.dtype, int, int]:
    """Return device, dtype, head size and number of query heads of a key/value head."""
    return q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1]


class _Gather(torch.autograd.Function):
    """Selects rows of a tensor by index; the backward pass handles rows that are selected several times.

    The gradients of a row are summed in at least float32, by ``index_add``: the backward of ``x[rows]`` would sort the
    indices and add serially.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [rows], [grad] = ctx.saved_tensors, grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=wide)
        return total.index_add(0, rows, grad.to(wide)).to(grad.dtype), None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # calls the driver, which torch.compile cannot trace
def varlen_obstacle(
    device: torch.device, dtype: torch.dtype, head_size: int, value_size: int | None = None
) -> str | None:
    """Return why ``varlen_attn`` cannot be used, so that sequences are padded; None if it can be used.

    ``dtype`` is autocast's if that is enabled. ``head_size`` is the size of queries and keys, and of values unless
    ``value_size`` is given.
    """
    if device.type != "cuda":
        return f"it runs on the {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return kernel_obstacle(dtype, head_size, value_size)


def kernel_obstacle(dtype: torch.dtype, head_size: int, value_size: int | None = None) -> str | None:
    """Return why ``varlen_attn`` cannot compute attention of this dtype and head size, on a GPU that it supports; None
    if it can.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(dtype).removeprefix('torch.')}"
    if head_size > MAX_HEAD_SIZE or head_size % 8:
        return f"its head size of {head_size} is not a multiple of 8 of at most {MAX_HEAD_SIZE}"
    if value_size not in (None, head_size):
        return f"its heads have keys of {head_size} and values of {value_size}"
    return None


def describe_attention(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation of attention that a model uses, and why a faster one is not used, for the log."""
    size, keys = head_size(config), num_key_value_heads(config)
    obstacle = varlen_obstacle(device, dtype, size)
    if obstacle is not None:
        return f"padded to the longest sequence, because {obstacle}"
    heads_per_key = config.get_text_config().num_attention_heads // keys
    kinds = sorted({window is not None for window, _ in count_windows(config)})
    obstacles = [flash_attention_obstacle(device, dtype, size, heads_per_key, has_window) for has_window in kinds]
    slower = next(filter(None, obstacles), None)
    if slower is None:
        return "packed (FlashAttention 4)"
    return f"packed (varlen_attn, as FlashAttention 4 {slower})"


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_length: int | tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention over packed sequences with ``varlen_attn``.

    Args:
        q: [T, H, D]; keys and values are [T, K, D].
        cu_seqlens: [N+1] int32; or a pair for queries and keys, whose sequences end at the same token.
        max_length: at least ``L``; or a pair for queries and keys.
        scaling: factor of the dot products.
        window: ``sliding_window`` of :func:`packed_attention`.

    Returns:
        [T, H, D].
    """
    options: dict[str, Any] = {"scale": scaling, **shared_heads(q, k)}
    # Numbers of tokens to the left (without the token itself) and to the right that it attends to; -1 for all.
    options["window_size"] = (-1 if window is None else window - 1, 0)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = varlen_attn(q, k, v, *_pair(cu_seqlens), *_pair(max_length), **options)
    assert isinstance(out, Tensor)  # a pair only with return_aux
    return out


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_length: int | tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention over packed sequences by padding them for ``scaled_dot_product_attention``. Arguments and
    result are those of :func:`varlen_attention`.
    """
    bounds, longest = _pair(cu_seqlens), _pair(max_length)
    is_suffix = isinstance(cu_seqlens, tuple)
    rows = _padded_rows(q.shape[0], bounds[0], longest[0])
    key_rows = _padded_rows(k.shape[0], bounds[1], longest[1]) if is_suffix else rows
    mask = None
    if is_suffix or window is not None:
        query_steps, key_steps = (torch.arange(length, device=q.device) for length in longest)
        if is_suffix:
            own, whole = (part.diff(append=part[-1:]).long() for part in bounds)
            # Each query's position among its keys. Padding attends to a key too: a softmax over no keys is NaN.
            places = ((whole - own)[:, None] + query_steps).clamp(max=longest[1] - 1)  # [N+1, longest of queries]
            distance = (places[:, :, None] - key_steps)[:, None]
        else:
            distance = query_steps[:, None] - key_steps
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        _pad(q, rows, bounds[0], longest[0]),
        _pad(k, key_rows, bounds[1], longest[1]),
        _pad(v, key_rows, bounds[1], longest[1]),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)


def _padded_rows(num_tokens: int, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return the row of each token [T] after padding: token t of sequence n goes to row n * longest + t."""
    positions = torch.arange(num_tokens, device=cu_seqlens.device)
    sequences = torch.searchsorted(cu_seqlens, positions, right=True, out_int32=True).long() - 1
    return positions + sequences * longest - cu_seqlens[sequences]


def _pad(x: Tensor, rows: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return packed values as padded sequences, by one copy for any number of sequences.

    One empty sequence is added, since torch.compile would make a separate graph for a single sequence.

    Args:
        x: [T, heads, D].
        rows: [T], from :func:`_padded_rows`.

    Returns:
        [N+1, heads, longest, D].
    """
    num_bounds = cu_seqlens.numel()
    padded = x.new_zeros(num_bounds * longest, *x.shape[1:]).index_copy(0, rows, x)
    return padded.view(num_bounds, longest, *x.shape[1:]).transpose(1, 2)


def _pair(value: T | tuple[T, T]) -> tuple[T, T]:
    """Return a pair of values, for queries and keys; a single value is used for both."""
    return value if isinstance(value, tuple) else (value, value)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
