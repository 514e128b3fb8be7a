"""Sums over the sequences of a packed tensor, and repetition of a value for each sequence over its tokens."""

import torch
from torch import Tensor


def sum_by_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of token ``values`` over each sequence of a packed tensor: [N] from [T].

    Args:
        values: [T]; half precision is summed in float32.
        cu_seqlens: [N+1], the sequences' bounds.

    Returns:
        [N] sums.
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    num_sequences = cu_seqlens.numel() - 1
    sequences = spread_to_tokens(torch.arange(num_sequences, device=values.device), cu_seqlens, values.numel())
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


def sum_by_run(values: Tensor, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum token values over each run of equal ids in a sequence, such as a turn; return each token's sum: [T].

    Args:
        values: [T].
        ids: [T], integers.
        cu_seqlens: [N+1], the sequences' bounds.

    Returns:
        [T], on each token the sum over its run.
    """
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    # An empty sequence at the end begins after the last token.
    firsts = cu_seqlens[:-1].long()
    starts = torch.cat([starts, starts.new_zeros(1)]).index_fill(0, firsts, True)[:-1]
    runs = starts.cumsum(0) - 1
    return torch.zeros_like(values).index_add(0, runs, values)[runs]


def spread_to_tokens(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Repeat each sequence's value over the sequence's tokens in a packed tensor: [T] from [N].

    Args:
        values: [N].
        cu_seqlens: [N+1], the sequences' bounds.
        num_tokens: T, given so that the host need not wait for the GPU.

    Returns:
        [T] values.
    """
    return values.repeat_interleave((cu_seqlens[1:] - cu_seqlens[:-1]).long(), output_size=num_tokens)
