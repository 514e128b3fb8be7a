"""The supports of a batch's tokens as one tensor, which the trainer truncates its own distributions by.

Letters: ``T`` tokens of a batch, ``K`` tokens of the largest support.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlightning.errors import RunError
from rlightning.types.supports import Supports
from rlightning.types.trajectory import Sample

if TYPE_CHECKING:
    from rlightning.types.batch import RolloutBatch

Batch = TypeVar("Batch", bound="RolloutBatch")
NO_TOKEN = -1
"""What fills the row of a smaller support; a row of nothing else is of a distribution that was not truncated."""


def pack_supports(batch: "RolloutBatch") -> Tensor | None:
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


def align_supports(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return batches whose supports can be laid end to end: all as wide as the widest, if any batch has some."""
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
