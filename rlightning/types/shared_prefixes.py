"""Finds tokens of packed sequences with equal history, so that a model computes each of them only once.

::

    sequence 0   a b c d e          a b c d e    own tokens of each sequence, laid end to end: [U]
    sequence 1   a b c x            x
    sequence 2   a b y z            y z

A token's hidden state depends only on the tokens up to that token. If sequences are sorted by their tokens, each
sequence shares its longest prefix with the previous one; its remaining tokens are called its own, and attend to the
whole sequence, its path in the tree of prefixes. Prompts of a group, branches of a trajectory and system prompts of a
data set are all found from token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlightning.types import axes


class Prefixes(NamedTuple):
    """For each of ``N`` sorted sequences, the length of the prefix that it shares with the previous sequence.

    Attributes:
        order: the sequences in sorted order.
        lengths: [N] int64, length of each sequence's shared prefix, always less than the sequence's length.
    """

    order: list[int]
    lengths: NDArray[np.int64]

    @classmethod
    def none(cls, num_sequences: int) -> "Prefixes":
        """Return prefixes of length 0, with which each sequence is computed separately."""
        return cls([*range(num_sequences)], np.zeros(num_sequences, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The layout in which a model computes a micro-batch of ``T`` tokens from ``U`` distinct ones.

    The own tokens of the sequences are concatenated in the sorted order, so that the tokens of sequences that share a
    segment (a run of tokens that the same sequences share) are adjacent.

    Attributes:
        unique: [U] int64, indices in the batch of the tokens that are computed.
        places: [T] int64, for each token of the batch the index in ``unique`` of the equal token that is computed.
        cu_seqlens: [N+1] int32, the first of each sorted sequence's own tokens, and ``U``.
        max_length: maximum number of a sequence's own tokens.
        segments: [2 x depth, B+1] int32: for each depth of the tree a row of bounds of queries and a row of bounds of
            keys; queries ``queries[b]:queries[b+1]`` attend to all keys ``keys[b]:keys[b+1]``; either range may be
            empty.
        max_segment: maximum numbers of queries and of keys between two bounds; both at least 2.
        paths: [T] int64, indices in ``unique`` of all tokens of each sorted sequence, one sequence after the other.
        path_cu_seqlens: [N+1] int32, the first token of each sequence in ``paths``, and ``T``.
        max_path: number of tokens of the longest sequence.
    """

    unique: Tensor
    places: Tensor
    cu_seqlens: Tensor
    max_length: int
    segments: Tensor
    max_segment: tuple[int, int]
    paths: Tensor
    path_cu_seqlens: Tensor
    max_path: int

    def to(self, device: torch.device) -> "SharedPrefixes":
        """Return the layout on a device; copies from host to GPU are asynchronous."""
        return axes.to(self, device)


def find_prefixes(token_ids: Tensor, cu_seqlens: Tensor, groups: Sequence[int] | None = None) -> Prefixes:
    """Return the sorted order of sequences, and the length of the prefix that each shares with the previous one.

    Args:
        token_ids: [T] on the CPU.
        cu_seqlens: [N+1], bounds of the sequences.
        groups: [N], the group of each sequence; sequences of different groups share nothing. None for a single group.
    """
    tokens, bounds = token_ids.numpy(), cu_seqlens.tolist()
    sequences = [tokens[start:end] for start, end in pairwise(bounds)]
    group_of = [0] * len(sequences) if groups is None else groups
    order = sorted(range(len(sequences)), key=lambda n: (group_of[n], sequences[n].astype(">u4").tobytes()))
    lengths = np.zeros(len(sequences), np.int64)
    for before, n in pairwise(order):
        if group_of[before] == group_of[n]:
            lengths[n] = _common_length(sequences[before], sequences[n][:-1])
    return Prefixes(order, lengths)


def _common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def share_prefixes(cu_seqlens: Tensor, prefixes: Prefixes) -> SharedPrefixes:
    """Return the layout of a micro-batch in which shared prefixes are computed once.

    Args:
        cu_seqlens: [N+1], bounds of the micro-batch's sequences.
        prefixes: shared prefixes of these sequences.
    """
    bounds, order = cu_seqlens.numpy().astype(np.int64), np.array(prefixes.order, np.int64)
    lengths, shared = np.diff(bounds)[order], prefixes.lengths[order]
    starts = _bounds(lengths - shared)
    unique, places = np.empty(starts[-1], np.int64), np.empty(bounds[-1], np.int64)
    paths = [np.zeros(0, np.int64)]
    for n, own, end, kept in zip(order, starts[:-1], starts[1:], shared, strict=True):
        paths.append(np.concatenate([paths[-1][:kept], np.arange(own, end)]))
        places[bounds[n] : bounds[n + 1]] = paths[-1]
        unique[own:end] = np.arange(bounds[n] + kept, bounds[n + 1])
    found = _find_segments(lengths.tolist(), shared.tolist(), starts.tolist())
    segments = _lay_out(found, int(starts[-1]))
    # The kernel sets results without a key or a query to zero. With a maximum of 1 it would assume one query each.
    longest = [max(int(rows.diff().max()), 2) for rows in (segments[::2], segments[1::2])]
    return SharedPrefixes(
        unique=torch.from_numpy(unique),
        places=torch.from_numpy(places),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_length=int((lengths - shared).max(initial=0)),
        segments=segments,
        max_segment=(longest[0], longest[1]),
        paths=torch.from_numpy(np.concatenate(paths)),
        path_cu_seqlens=torch.from_numpy(_bounds(lengths).astype(np.int32)),
        max_path=int(lengths.max(initial=0)),
    )


class _Segment(NamedTuple):
    """A run of tokens (keys), and the own tokens of the sequences that share it (queries), as ranges in ``U``."""

    queries: int
    queries_end: int
    keys: int
    keys_end: int


def _find_segments(lengths: Sequence[int], shared: Sequence[int], starts: Sequence[int]) -> list[_Segment]:
    """Return the segments in the prefix tree of sorted sequences.

    Args:
        lengths: [N], in tokens.
        shared: [N], number of tokens that each sequence has in common with the previous one.
        starts: [N+1], the first of each sequence's own tokens among the ``U`` tokens.
    """
    segments = []
    # Pieces of the path: start and end in it, index of the first token, first own token of the sharing sequences.
    path: list[tuple[int, int, int, int]] = []
    for n, kept in enumerate([*shared, 0]):
        while path and path[-1][1] > kept:
            begin, end, place, sharers = path.pop()
            if begin < kept:
                path.append((begin, kept, place, sharers))
            if sharers < starts[n]:
                keys = place + max(kept - begin, 0)
                segments.append(_Segment(sharers, starts[n], keys, place + end - begin))
        if n < len(lengths):
            path.append((kept, lengths[n], starts[n], starts[n + 1]))
    return segments


def _lay_out(segments: Sequence[_Segment], num_tokens: int) -> Tensor:
    """Return the bounds of segments, including the ranges between them: queries without keys, and keys without queries.

    Segments that share a query are nested, and get different rows. Of two segments that share no query, the queries and
    keys of the first precede those of the second.
    """
    rows = [([0], [0])]
    for one in sorted(segments, key=lambda segment: (segment.queries, -segment.queries_end)):
        depth = next((d for d, (queries, _) in enumerate(rows) if queries[-1] <= one.queries), len(rows))
        if depth == len(rows):
            rows.append(([0], [0]))
        queries, keys = rows[depth]
        queries += [one.queries, one.queries, one.queries_end]
        keys += [keys[-1], one.keys, one.keys_end]
    width = max(len(queries) for queries, _ in rows) + 2
    bounds = torch.full((2 * len(rows), width), num_tokens, dtype=torch.int32)
    for depth, (queries, keys) in enumerate(rows):
        bounds[2 * depth, : len(queries)] = torch.tensor(queries)
        bounds[2 * depth + 1, : len(keys) + 1] = torch.tensor([*keys, keys[-1]])
    return bounds


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of several concatenated parts, and the end of the last one."""
    return np.concatenate([[0], lengths.cumsum()])
