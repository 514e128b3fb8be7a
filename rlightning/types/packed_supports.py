"""The supports of a batch's tokens as one tensor, by which the trainer truncates its own distributions.

Letters: ``T`` tokens of a batch, ``K`` tokens of the largest support.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlightning.errors import RunError
from rlightning.types.supports import Supports
from rlightning.types.trajectory import Sample, Trajectory

NO_TOKEN = -1
"""What fills the row of a smaller support; a row of nothing else is of a distribution that was not truncated."""


class PackedTrajectories(Protocol):
    """A batch, as far as the supports of its tokens are laid out by it."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """In the order of the batch."""

    @property
    def num_trajectories(self) -> int:
        """How many trajectories there are."""

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""

    @property
    def turn_ids(self) -> Tensor:
        """[T], the turn of its trajectory that each token is of."""

    @property
    def sampled_index(self) -> Tensor:
        """The places of the sampled tokens."""

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat values, one a trajectory, over the tokens of each: [T]."""


def pack_supports(batch: PackedTrajectories) -> Tensor | None:
    """Return the supports of a batch's tokens: [T, K] int32, filled up with -1; None if no sample has any.

    Args:
        batch: each sampled token of its trajectories is trained in one branch.
    """
    samples = [sample for one in batch.trajectories for sample in one.samples]
    if all(sample.supports is None for sample in samples):
        return None
    for sample in samples:
        if sample.supports is not None:
            _check_supports(sample, sample.supports)
    sizes = np.concatenate(
        [np.zeros(len(one.token_ids), np.int64) if one.supports is None else one.supports.sizes for one in samples]
    ).astype(np.int64)
    token_ids = np.concatenate([one.supports.token_ids for one in samples if one.supports is not None])
    sampled = batch.sampled_index.numpy()
    owners = batch.to_tokens(torch.arange(batch.num_trajectories)).numpy()[sampled]
    in_order = sampled[np.lexsort((batch.turn_ids.numpy()[sampled], owners))]  # of the samples
    columns = np.arange(len(token_ids)) - (sizes.cumsum() - sizes).repeat(sizes)
    table = np.full((batch.num_tokens, sizes.max(initial=1)), NO_TOKEN, np.int32)
    table[in_order.repeat(sizes), columns] = token_ids
    return torch.from_numpy(table)


def _check_supports(sample: Sample, supports: Supports) -> None:
    """Refuse supports that a sampler has given other tokens than its own."""
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


def align_supports(supports: Sequence[Tensor | None], token_ids: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return supports of batches that can be laid end to end: all as wide as the widest, if any batch has some.

    Args:
        supports: [T, K] of each batch, or None.
        token_ids: [T] of each batch.
    """
    width = max((one.shape[1] for one in supports if one is not None), default=None)
    if width is None:
        return supports
    aligned = []
    for one, ids in zip(supports, token_ids, strict=True):
        own = torch.empty(len(ids), 0, dtype=torch.int32, device=ids.device) if one is None else one
        aligned.append(pad(own, (0, width - own.shape[1]), value=NO_TOKEN))
    return aligned
