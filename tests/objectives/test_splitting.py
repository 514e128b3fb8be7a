"""The same data gives the same gradient however it is cut into micro-batches, ordered, and split over ranks."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import random_groups
from test_policy import policy_batch
from torch import Tensor

from rlightning.module.update import count_units
from rlightning.objectives import (
    Aggregation,
    CappedWeight,
    RolloutCorrection,
    SoftGate,
    aggregate,
    clipped_loss,
    estimate_kl,
    reinforce,
    sequence_log_ratio,
    token_log_ratio,
)
from rlightning.types import LossTotals, RolloutBatch, axis

KINDS: list[Aggregation] = ["token_mean", "turn_mean", "sequence_mean", "trajectory_mean", "constant"]
RANDOM = st.integers(0, 2**32).map(random.Random)

# (logprobs, old_logprobs, advantages, mask, cu_seqlens) -> loss a token
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def corrected(correction: RolloutCorrection) -> Loss:
    def loss(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        weights, _ = correction.importance_weights(old, old - 0.1 * a, mask, cu_seqlens)
        return -a * new * weights

    return loss


LOSSES: dict[str, Loss] = {
    "clipped": lambda n, o, a, m, c: clipped_loss(token_log_ratio(n, o), a, clip_low=0.2, clip_high=0.28)[0],
    "sequence": lambda n, o, a, m, c: clipped_loss(sequence_log_ratio(n, o, m, c), a, clip_low=0.1, clip_high=0.1)[0],
    "capped": lambda n, o, a, m, c: CappedWeight(max_ratio=1.5)(n, policy_batch(o, a))[0],
    "gate": lambda n, o, a, m, c: SoftGate(temperature_positive=1.0, temperature_negative=1.05)(n, policy_batch(o, a))[
        0
    ],
    "reinforce": lambda n, o, a, m, c: reinforce(n, policy_batch(o, a))[0],
    "kl": lambda n, o, a, m, c: estimate_kl(n, o, "k3"),
    "truncated": corrected(RolloutCorrection("truncate", "token", upper=1.05)),
    "masked_sequences": corrected(RolloutCorrection("icepop", "sequence_sum", lower=0.8, upper=1.2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_random_cuts_give_the_same_loss_and_gradient(name: str, kind: Aggregation, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 30, (12,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - cu_seqlens[:-1].repeat_interleave(lengths)
    prompts = (torch.rand(12, generator=generator) * (lengths - 1)).long() + 1
    mask = positions >= prompts.repeat_interleave(lengths)
    old = -torch.rand(total, generator=generator) * 3
    new = (old + 0.3 * torch.randn(total, generator=generator)).requires_grad_()
    advantages = torch.randn(total, generator=generator)
    totals = LossTotals(float(mask.sum()), 12, 12, 12, 12)
    sampled = torch.zeros(12).index_add(0, torch.arange(12).repeat_interleave(lengths), mask.float())
    own_lengths = sampled.repeat_interleave(lengths)

    def share(start: int, end: int) -> Tensor:
        """Return the loss of sequences ``start`` to ``end`` as a micro-batch of their own."""
        bounds = cu_seqlens[start : end + 1]
        cut = slice(int(bounds[0]), int(bounds[-1]))
        bounds = bounds - bounds[0]
        loss = LOSSES[name](new[cut], old[cut], advantages[cut], mask[cut], bounds)
        own, turns = own_lengths[cut], mask[cut].int() - 1
        lengths: dict[str, Tensor] = {"turn_ids": turns, "trajectory_lengths": own}
        return aggregate(loss, mask[cut], bounds, kind, totals, **lengths, constant=25.0)

    whole = share(0, 12)
    gradient = torch.autograd.grad(whole, new)[0]
    cuts = [0, *sorted((torch.randperm(11, generator=generator)[: seed + 1] + 1).tolist()), 12]
    parts = torch.stack([share(start, end) for start, end in pairwise(cuts)]).sum()
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(parts, new)[0], gradient, rtol=1e-5, atol=1e-8)
    assert gradient[~mask].abs().sum() == 0


@dataclass(slots=True)
class PlacedBatch(RolloutBatch):
    """Knows each token's place in the whole batch."""

    place: Tensor | None = field(default=None, metadata=axis("T"))


@settings(max_examples=60, deadline=None)
@given(RANDOM, st.sampled_from([*KINDS, "group_mean"]))
@pytest.mark.long
def test_any_cut_order_and_ranks_give_same_loss(draw: random.Random, kind: Aggregation) -> None:
    groups = [group for group in random_groups(draw) if group]
    trajectories = [one for group in groups for one in group]
    batch = PlacedBatch.pack(groups)
    batch.place = torch.arange(batch.num_tokens)
    expected = [sum(one.num_sampled for one in trajectories), sum(len(one.branches) for one in trajectories)]
    expected += [len(trajectories), len(groups), sum(len(one.samples) for one in trajectories)]
    assert count_units(batch).tolist() == expected  # which sets the batch's group_lengths, too
    batch.advantages = batch.to_tokens(torch.tensor([draw.gauss(0, 1) for _ in batch.trajectories]).double())
    logprobs = torch.tensor([-draw.random() for _ in range(batch.num_tokens)]).double().requires_grad_()

    def count(parts: list[PlacedBatch]) -> LossTotals:
        copies = [
            part.select(range(part.num_trajectories)) for part in parts
        ]  # their group_lengths are of the whole batch
        counts = torch.stack([count_units(copy) for copy in copies]).sum(0).tolist()
        return LossTotals(*counts)._replace(groups=len(groups))  # some are of several ranks

    def share(part: PlacedBatch, totals: LossTotals) -> Tensor:
        assert part.place is not None and part.advantages is not None
        losses = -part.advantages * logprobs[part.place].exp()
        assert part.group_lengths is not None
        own, groups = part.to_tokens(part.completion_lengths), part.to_tokens(part.group_lengths)
        lengths = {"turn_ids": part.turn_ids, "trajectory_lengths": own, "group_lengths": groups}
        return aggregate(losses, part.is_sampled, part.cu_seqlens, kind, totals, **lengths, constant=7.0)

    whole = share(batch, count([batch]))
    # Whole trajectories go to ranks, in any order; each rank cuts its own by sequences, branches of one apart.
    order = draw.sample(range(batch.num_trajectories), batch.num_trajectories)
    cuts = sorted(draw.randint(0, len(order)) for _ in range(2))
    ranks = [batch.select(order[start:end]) for start, end in pairwise([0, *cuts, len(order)])]
    totals = count(ranks)
    assert totals == count([batch]) == LossTotals(*expected)
    shares = []
    for rank in ranks:
        sequences = draw.sample(range(rank.num_sequences), rank.num_sequences)
        bounds = [0, *sorted(draw.randint(0, len(sequences)) for _ in range(3)), len(sequences)]
        shares += [share(rank.select(sequences[start:end], axis="N"), totals) for start, end in pairwise(bounds)]
    cut = torch.stack(shares).sum()
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in (cut, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    assert gradients[0][~batch.is_sampled].abs().sum() == 0
