"""The supports of a batch's tokens as one tensor, by which the trainer truncates its own distributions.

Letters: ``T`` tokens of a batch, ``K`` tokens of the largest support.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from rlightning.types.batch import RolloutBatch

Batch = TypeVar("Batch", bound="RolloutBatch")
NO_TOKEN = -1
"""What fills the row of a smaller support; a row of nothing else is of a distribution that was not truncated."""


def pack_supports(batch: "RolloutBatch") -> Tensor | None:
    """Return the supports of a batch's tokens: [T, K] int32, padded with -1; None if no sample has any.

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


def align_supports(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return batches whose supports have the width of the widest, so that they can be concatenated."""
    width = max((one.supports.shape[1] for one in batches if one.supports is not None), default=None)
    if width is None:
        return batches
    aligned = []
    for one in batches:
        own = one.supports
        if own is None:
            own = torch.empty(one.num_tokens, 0, dtype=torch.int32, device=one.token_ids.device)
        aligned.append(replace(one, supports=pad(own, (0, width - own.shape[1]), value=NO_TOKEN)))
    return aligned
