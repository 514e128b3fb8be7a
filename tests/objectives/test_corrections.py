import math

import pytest
import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.objectives import RolloutCorrection, aggregate
from rlightning.types import LossTotals


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of)[0]


# A prompt token and a completion of three with ratios 4, 0.25, 1.5; a prompt token and a completion of one, 0.4.
RATIOS = torch.tensor([100.0, 4.0, 0.25, 1.5, 100.0, 0.4])
MASK = torch.tensor([False, True, True, True, False, True])
CU_SEQLENS = torch.tensor([0, 4, 6], dtype=torch.int32)
SAMPLER = torch.tensor([0.0, -1.0, -2.0, -3.0, 0.0, -1.0])


def weigh(correction: RolloutCorrection) -> tuple[list[float], list[float]]:
    logprobs = (SAMPLER + RATIOS.log()).requires_grad_()
    weights, metrics = correction.importance_weights(logprobs, SAMPLER, MASK, CU_SEQLENS)
    assert not weights.requires_grad
    assert torch.equal(weights[~MASK], torch.ones(2))
    assert torch.equal(metrics["correction_weight"], weights)
    return weights[MASK].tolist(), metrics["correction_out_of_bounds"][MASK].tolist()


@pytest.mark.parametrize(
    ("correction", "expected", "outside"),
    [
        (RolloutCorrection(), [2.0, 0.25, 1.5, 0.4], [1, 0, 0, 0]),
        (RolloutCorrection("truncate", lower=0.5, upper=3.0), [3.0, 0.5, 1.5, 0.5], [1, 1, 0, 1]),
        (RolloutCorrection("mask"), [0.0, 0.25, 1.5, 0.4], [1, 0, 0, 0]),
        (RolloutCorrection("icepop"), [4.0, 0.0, 1.5, 0.0], [0, 1, 0, 1]),
    ],
)
def test_token_level_by_hand(correction: RolloutCorrection, expected: list[float], outside: list[float]) -> None:
    weights, flags = weigh(correction)
    assert weights == pytest.approx(expected)
    assert flags == outside


def test_sequence_levels_by_hand() -> None:
    # The product of 4, 0.25 and 1.5 is 1.5, and its third root 1.1447.
    weights, _ = weigh(RolloutCorrection("truncate", "sequence_sum"))
    assert weights == pytest.approx([1.5, 1.5, 1.5, 0.4])
    weights, _ = weigh(RolloutCorrection("truncate", "sequence_mean"))
    assert weights == pytest.approx([1.5 ** (1 / 3)] * 3 + [0.4])
    weights, outside = weigh(RolloutCorrection("icepop", "sequence_mean", upper=1.1))
    assert weights == [0.0] * 4
    assert outside == [1.0] * 4


def test_summed_ratio_grows_with_length_mean_stays_constant() -> None:
    for length in (10, 1000):
        sampler = torch.full((length,), -1.0)
        mask, cu_seqlens = torch.ones(length, dtype=torch.bool), torch.tensor([0, length])
        batch = (sampler + 0.01, sampler, mask, cu_seqlens)
        by_sum, _ = RolloutCorrection("truncate", "sequence_sum", upper=1e9).importance_weights(*batch)
        by_mean, _ = RolloutCorrection("truncate", "sequence_mean", upper=1e9).importance_weights(*batch)
        torch.testing.assert_close(by_sum, torch.full((length,), math.exp(0.01 * length)), rtol=1e-3, atol=0)
        torch.testing.assert_close(by_mean, torch.full((length,), math.exp(0.01)), rtol=1e-5, atol=0)


def test_masked_tokens_stay_in_the_denominator() -> None:
    logprobs = (SAMPLER + RATIOS.log()).requires_grad_()
    weights, _ = RolloutCorrection("icepop").importance_weights(logprobs, SAMPLER, MASK, CU_SEQLENS)
    grad = gradient(aggregate(-logprobs * weights, MASK, CU_SEQLENS, "token_mean", LossTotals(4, 2, 2, 2, 2)), logprobs)
    # Weights 4, 0, 1.5, 0, each over all four tokens.
    torch.testing.assert_close(grad, torch.tensor([0.0, -4 / 4, 0.0, -1.5 / 4, 0.0, 0.0]))


def test_hopeless_gaps_stay_finite_and_bfloat16_becomes_float32() -> None:
    sampler = torch.tensor([-0.5, -900.0]).bfloat16()
    trainer = torch.tensor([-900.0, -0.5]).bfloat16()
    mask, cu_seqlens = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    for level in ("token", "sequence_sum", "sequence_mean"):
        weights, _ = RolloutCorrection("truncate", level).importance_weights(trainer, sampler, mask, cu_seqlens)
        assert weights.dtype == torch.float32
        assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lower": 1.5}, r"bounds \[1\.5, 2\.0\] leave out a ratio of 1"),
        ({"upper": 0.9}, r"bounds \[0\.0, 0\.9\] leave out a ratio of 1"),
        ({"lower": -0.5}, "leave out"),
        ({"kind": "mask", "lower": 0.5}, "kind 'mask' has no lower bound. Use kind 'icepop'"),
        ({"kind": "clip"}, "kind='clip' is unknown. Choose from: truncate, mask, icepop"),
        ({"level": "tokens"}, "level='tokens' is unknown. Did you mean 'token'"),
    ],
)
def test_wrong_correction_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutCorrection(**arguments)  # type: ignore[arg-type]
