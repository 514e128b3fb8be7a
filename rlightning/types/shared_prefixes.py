"""Finds tokens of packed sequences with equal history, so that a model computes each of them only once.

::

    sequence 0   a b c d e          a b c d e    own tokens of each sequence, laid end to end: [U]
    sequence 1   a b c x            x
    sequence 2   a b y z            y z

A token's hidden state depends only on the tokens up to it. If sequences are sorted by their tokens, each shares its
longest prefix with the sequence before it; the remaining tokens are its own, and attend to its whole path. Prompts of a
group, branches of a trajectory and system prompts of a data set are all found from token ids.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Prefixes(NamedTuple):
    """For each of ``N`` sorted sequences, the length of the prefix that it shares with the sequence before it.

    Attributes:
        order: the sequences in sorted order.
        lengths: [N] int64, by sequence: length of its shared prefix, less than that of the sequence.
    """

    order: list[int]
    lengths: NDArray[np.int64]

    def to_tensor(self) -> Tensor:
        """Return the prefix lengths, [N]."""
        return torch.from_numpy(self.lengths)

    @classmethod
    def none(cls, num_sequences: int) -> "Prefixes":
        """Return prefixes of length 0, with which each sequence is computed separately."""
        return cls([*range(num_sequences)], np.zeros(num_sequences, np.int64))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The layout in which a model computes a micro-batch of ``T`` tokens from ``U`` distinct ones.

    Attributes:
        unique: [U] int64, positions in the batch of the computed tokens.
        places: [T] int64, for each token of the batch the index of the computed token.
        cu_seqlens: [N+1] int32, where each sequence's own tokens begin, and ``U``.
        max_length: maximum number of a sequence's own tokens.
    """

    unique: Tensor
    places: Tensor
    cu_seqlens: Tensor
    max_length: int

    def to(self, device: torch.device) -> "SharedPrefixes":
        """Return the layout on a device."""
        parts = (self.unique.to(device), self.places.to(device), self.cu_seqlens.to(device))
        return SharedPrefixes(*parts, self.max_length)


def find_prefixes(token_ids: Tensor, cu_seqlens: Tensor) -> Prefixes:
    """Find the prefixes that sequences share.

    Args:
        token_ids: [T] on the CPU.
        cu_seqlens: [N+1].
    """
    tokens, bounds = token_ids.numpy(), cu_seqlens.tolist()
    sequences = [tokens[start:end] for start, end in pairwise(bounds)]
    order = sorted(range(len(sequences)), key=lambda n: sequences[n].astype(">u4").tobytes())
    lengths = np.zeros(len(sequences), np.int64)
    for before, n in pairwise(order):
        lengths[n] = _common_length(sequences[before], sequences[n][:-1])
    return Prefixes(order, lengths)


def _common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def share_prefixes(cu_seqlens: Tensor, prefixes: Prefixes) -> SharedPrefixes:
    """Return the layout of a micro-batch in which shared prefixes are computed once.

    Args:
        cu_seqlens: [N+1], of the micro-batch.
        prefixes: of its sequences.
    """
    bounds = cu_seqlens.numpy().astype(np.int64)
    own = np.diff(bounds) - prefixes.lengths
    starts = np.concatenate([[0], own.cumsum()])
    places = np.empty(bounds[-1], np.int64)
    unique = np.empty(starts[-1], np.int64)
    path = np.zeros(0, np.int64)
    for n in prefixes.order:
        path = np.concatenate([path[: prefixes.lengths[n]], np.arange(starts[n], starts[n + 1])])
        places[bounds[n] : bounds[n + 1]] = path
        unique[starts[n] : starts[n + 1]] = np.arange(bounds[n] + prefixes.lengths[n], bounds[n + 1])
    return SharedPrefixes(
        torch.from_numpy(unique),
        torch.from_numpy(places),
        torch.from_numpy(starts.astype(np.int32)),
        int(own.max(initial=0)),
    )
