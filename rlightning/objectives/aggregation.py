"""Aggregates token losses to a scalar loss, in a way that can be chosen independently of the algorithm."""

from typing import Literal

import torch
from torch import Tensor

from rlightning.objectives.segments import spread_to_tokens, sum_by_run, sum_by_sequence
from rlightning.types import LossTotals

Aggregation = Literal["token_mean", "turn_mean", "sequence_mean", "trajectory_mean", "group_mean", "constant"]


def aggregate(
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    kind: Aggregation,
    totals: LossTotals,
    *,
    turn_ids: Tensor | None = None,
    trajectory_lengths: Tensor | None = None,
    group_lengths: Tensor | None = None,
    constant: float | None = None,
) -> Tensor:
    """Return the share that this micro-batch's token losses contribute to the scalar loss of the whole optimizer step.

    The shares of all micro-batches and ranks ADD UP to the loss, however the step's sequences were split, because
    ``totals`` counts all of them. A framework that averages gradients over ranks needs the share times the world size.
    A trajectory has one sequence, or one for each of its branches.

    - token_mean: every token weighs the same, ``sum / tokens`` (DAPO, arXiv:2503.14476, eq. 12).
    - turn_mean: every turn of the policy weighs the same, ``sum_k mean_t / turns``; what frameworks do that train each
      turn as a separate sequence (GiGPO, arXiv:2505.10978).
    - trajectory_mean: each trajectory weighs the same, ``sum_i mean_t / trajectories`` (GRPO, arXiv:2402.03300, eq. 3).
    - sequence_mean: every sequence weighs the same, ``sum_i mean_t / sequences``; a trajectory of two weighs as two.
    - group_mean: every group weighs the same, ``sum_g mean_t / groups``.
    - constant: ``sum / (trajectories * constant)``: as token_mean without the bias of long batches towards small
      steps (Dr. GRPO, arXiv:2503.20783, section 3.2, whose constant is the limit on completion tokens).

    Args:
        values: [T], the loss of each token.
        mask: [T] bool, the sampled tokens; values of other tokens are ignored, even if not finite.
        cu_seqlens: [N+1], the micro-batch's sequences, each whole.
        kind: one of the above.
        totals: sampled tokens, sequences, trajectories, groups and turns of the whole optimizer step.
        turn_ids: [T], for "turn_mean": the turn of each token.
        trajectory_lengths: [T], for "trajectory_mean": number of sampled tokens of each token's trajectory.
        group_lengths: [T], for "group_mean": number of sampled tokens of each token's group.
        constant: number of tokens, for "constant".

    Returns:
        A scalar, float32 or as wide as ``values``.
    """
    values = torch.where(mask, values if values.dtype is torch.float64 else values.float(), 0)
    match kind:
        case "token_mean":
            return values.sum() / max(totals.tokens, 1.0)
        case "turn_mean":
            assert turn_ids is not None
            lengths = sum_by_run(mask.float(), turn_ids, cu_seqlens).clamp(min=1)
            return (values / lengths).sum() / max(totals.turns, 1.0)
        case "sequence_mean":
            lengths = sum_by_sequence(mask.float(), cu_seqlens).clamp(min=1)
            return (values / spread_to_tokens(lengths, cu_seqlens, mask.numel())).sum() / max(totals.sequences, 1.0)
        case "trajectory_mean":
            assert trajectory_lengths is not None
            return (values / trajectory_lengths.float().clamp(min=1)).sum() / max(totals.trajectories, 1.0)
        case "group_mean":
            assert group_lengths is not None
            return (values / group_lengths.float().clamp(min=1)).sum() / max(totals.groups, 1.0)
        case "constant":
            assert constant is not None
            return values.sum() / (max(totals.trajectories, 1.0) * constant)
