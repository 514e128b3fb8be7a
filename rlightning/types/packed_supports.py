"""The supports of a batch's tokens as one tensor, which the trainer truncates its own distributions by.

Letters: ``T`` tokens of a batch, ``K`` tokens of the largest support.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlightning.types.trajectory import Trajectory

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
