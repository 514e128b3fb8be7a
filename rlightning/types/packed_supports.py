"""The supports (tokens that truncated sampling can choose) of a batch's sampled tokens as one tensor, for the trainer.

The samples contain supports of various sizes. The tensor is as wide as the largest support, and is made for one
micro-batch at a time.

Letters: ``D`` sampled tokens of a batch, ``S`` those that are trained on, ``K`` tokens of the largest support.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlightning.errors import RunError
from rlightning.types.supports import Supports
from rlightning.types.trajectory import Sample, Trajectory

NO_TOKEN = -1
"""Filler at the end of a smaller support's row; a row of only this belongs to a distribution that is not truncated."""


class PackedTrajectories(Protocol):
    """The fields of a RolloutBatch that :func:`pack_supports` reads, to find the sample of each sampled token."""

    trajectories: list[Trajectory]
    trajectory_ids: Tensor
    cu_seqlens: Tensor
    turn_ids: Tensor
    weight_versions: Tensor
    is_sampled: Tensor


def pack_supports(batch: PackedTrajectories) -> Tensor | None:
    """Return the supports of a batch's sampled tokens: [S, K] int32 ids, padded with -1; None if there are none.

    The tensor is computed on the CPU, and moved to the batch's device.
    """
    if not _has_supports(batch):
        return None
    drawn, samples = _drawn_samples(batch)
    supports = [one.supports or Supports([], [0] * len(one.token_ids)) for one in samples]
    sizes = np.concatenate([np.zeros(0, np.int64), *(one.sizes for one in supports)])
    token_ids = np.concatenate([np.zeros(0, np.int32), *(one.token_ids for one in supports)])
    table = np.full((len(drawn), sizes.max(initial=1)), NO_TOKEN, np.int32)
    table[np.arange(sizes.max(initial=1)) < sizes[:, None]] = token_ids
    return torch.from_numpy(table[batch.is_sampled.cpu().numpy()[drawn]]).to(batch.is_sampled.device)


def check_supports(batch: PackedTrajectories) -> None:
    """Raise a RunError if a support does not contain its sampled token exactly once, or sizes do not match."""
    for sample in _drawn_samples(batch)[1] if _has_supports(batch) else ():
        if sample.supports is not None:
            _check_sample(sample, sample.supports)


def _has_supports(batch: PackedTrajectories) -> bool:
    """Return whether any sample of a batch has supports."""
    return any(sample.supports is not None for one in batch.trajectories for sample in one.samples)


def _drawn_samples(batch: PackedTrajectories) -> tuple[NDArray[np.intp], list[Sample]]:
    """Return the indices [D] in the batch of all sampled tokens, and the samples in the same order.

    ``is_sampled`` does not suffice, since training may exclude sampled tokens.
    """
    drawn = np.flatnonzero(batch.weight_versions.cpu().numpy() >= 0)
    sequences = np.searchsorted(batch.cu_seqlens.cpu().numpy(), drawn, side="right") - 1
    turns = batch.turn_ids.cpu().numpy()[drawn]
    is_first = (np.diff(sequences, prepend=-1) != 0) | (np.diff(turns, prepend=-1) != 0)
    owners = batch.trajectory_ids.cpu().numpy()[sequences[is_first]]
    found = [batch.trajectories[m].turns[turn].sample for m, turn in zip(owners, turns[is_first], strict=True)]
    samples = [sample for sample in found if sample is not None]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    if num_tokens != len(drawn):
        raise ValueError(
            f"{len(drawn)} tokens of the branches have a weight version, and {num_tokens} tokens of their samples. "
            "A sample with supports is trained in one branch, and each of its tokens has a version of at least 0."
        )
    return drawn, samples


def _check_sample(sample: Sample, supports: Supports) -> None:
    sizes, token_ids = np.asarray(supports.sizes, np.int64), np.asarray(supports.token_ids)
    is_cut = sizes > 0
    if len(sizes) != len(sample.token_ids) or sizes.sum() != len(token_ids):
        raise RunError(
            f"A sample of {len(sample.token_ids)} tokens has supports of {len(sizes)} tokens, whose sizes add up to "
            f"{sizes.sum()}, and {len(token_ids)} token ids. The sampler has to give a size for each sampled token."
        )
    sampled = np.asarray(sample.token_ids)[is_cut]
    starts = (sizes.cumsum() - sizes)[is_cut]
    found = np.add.reduceat(token_ids == sampled.repeat(sizes[is_cut]), starts, dtype=np.int64)
    if len(sampled) and (found != 1).any():
        first = np.flatnonzero(found != 1)[0]
        place = int(np.flatnonzero(is_cut)[first])
        raise RunError(
            f"Token {place} of a sample, {sample.token_ids[place]}, is in its support {found[first]} times. "
            "A sampler gives the tokens that each token was drawn from, each of them once, and the token among them."
        )
