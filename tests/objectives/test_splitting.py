"""The same data gives the same gradient however it is cut into micro-batches."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlightning.objectives import (
    Aggregation,
    RolloutCorrection,
    aggregate,
    capped_weight_loss,
    clipped_loss,
    estimate_kl,
    reinforce_loss,
    sequence_log_ratio,
    soft_gate_loss,
    token_log_ratio,
)
from rlightning.types import LossTotals

# (logprobs, old_logprobs, advantages, mask, cu_seqlens) -> loss a token
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def corrected(correction: RolloutCorrection) -> Loss:
    def loss(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        weights, _ = correction.weigh(old, old - 0.1 * a, mask, cu_seqlens)
        return reinforce_loss(new, a)[0] * weights

    return loss


LOSSES: dict[str, Loss] = {
    "clipped": lambda n, o, a, m, c: clipped_loss(token_log_ratio(n, o), a, clip_low=0.2, clip_high=0.28)[0],
    "sequence": lambda n, o, a, m, c: clipped_loss(sequence_log_ratio(n, o, m, c), a, clip_low=0.1, clip_high=0.1)[0],
    "capped": lambda n, o, a, m, c: capped_weight_loss(n, token_log_ratio(n, o), a, max_ratio=1.5)[0],
    "gate": lambda n, o, a, m, c: soft_gate_loss(
        token_log_ratio(n, o), a, temperature_positive=1.0, temperature_negative=1.05
    )[0],
    "reinforce": lambda n, o, a, m, c: reinforce_loss(n, a)[0],
    "kl": lambda n, o, a, m, c: estimate_kl(n, o, "k3"),
    "truncated": corrected(RolloutCorrection("truncate", "token", upper=1.05)),
    "masked_sequences": corrected(RolloutCorrection("icepop", "sequence_sum", lower=0.8, upper=1.2)),
}


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_random_cuts_give_the_same_loss_and_gradient(name: str, kind: Aggregation, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 30, (12,), generator=random)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - cu_seqlens[:-1].repeat_interleave(lengths)
    prompts = (torch.rand(12, generator=random) * (lengths - 1)).long() + 1
    mask = positions >= prompts.repeat_interleave(lengths)
    old = -torch.rand(total, generator=random) * 3
    new = (old + 0.3 * torch.randn(total, generator=random)).requires_grad_()
    advantages = torch.randn(total, generator=random)
    totals = LossTotals(float(mask.sum()), 12)

    def share(start: int, end: int) -> Tensor:
        """Of sequences start to end, as a micro-batch of their own."""
        bounds = cu_seqlens[start : end + 1]
        cut = slice(int(bounds[0]), int(bounds[-1]))
        bounds = bounds - bounds[0]
        loss = LOSSES[name](new[cut], old[cut], advantages[cut], mask[cut], bounds)
        return aggregate(loss, mask[cut], bounds, kind, totals, constant=25.0)

    whole = share(0, 12)
    gradient = torch.autograd.grad(whole, new)[0]
    cuts = [0, *sorted((torch.randperm(11, generator=random)[: seed + 1] + 1).tolist()), 12]
    parts = torch.stack([share(start, end) for start, end in pairwise(cuts)]).sum()
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(parts, new)[0], gradient, rtol=1e-5, atol=1e-8)
    assert gradient[~mask].abs().sum() == 0
