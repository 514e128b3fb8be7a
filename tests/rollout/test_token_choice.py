"""Which token comes next, by numbers worked out by hand."""

from math import log

import pytest
import torch

from rlightning.rollout import Sampling
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.rollout.token_choice import choose_tokens

# Probabilities 0.5, 0.25, 0.15, 0.1 at temperature 1, in another order than by size.
CHANCES = torch.tensor([[0.15, 0.5, 0.1, 0.25]])
LOGITS = CHANCES.log() + 3  # a constant that changes no probability


def choose(uniform: float, **sampling: float) -> tuple[int, float]:
    choice = choose_tokens(LOGITS, [Sampling(**sampling)], [uniform])  # type: ignore[arg-type]
    return int(choice.tokens), float(choice.logprobs)


@pytest.mark.parametrize(
    ("uniform", "token", "chance"),
    # cumulated: 0.15, 0.65, 0.75, 1
    [(0.0, 0, 0.15), (0.149, 0, 0.15), (0.151, 1, 0.5), (0.649, 1, 0.5), (0.651, 2, 0.1), (0.9999999, 3, 0.25)],
)
def test_choice_takes_token_at_cumulated_probability(uniform: float, token: int, chance: float) -> None:
    chosen, logprob = choose(uniform)
    assert chosen == token and logprob == pytest.approx(log(chance), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {1: 0.5 / 0.75, 3: 0.25 / 0.75}),
        ({"top_k": 9}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}),
        ({"top_p": 0.5}, {1: 1.0}),
        ({"top_p": 0.51}, {1: 0.5 / 0.75, 3: 0.25 / 0.75}),
        ({"min_p": 0.29}, {0: 0.15 / 0.9, 1: 0.5 / 0.9, 3: 0.25 / 0.9}),
        # of three tokens, 0.5 / 0.9 is more than half
        ({"top_k": 3, "top_p": 0.55}, {1: 1.0}),
        # squares: 0.0225, 0.25, 0.01, 0.0625, in all 0.345
        ({"temperature": 0.5}, {0: 0.0225 / 0.345, 1: 0.25 / 0.345, 2: 0.01 / 0.345, 3: 0.0625 / 0.345}),
    ],
)
def test_cut_distribution_keeps_likeliest_tokens(sampling: dict[str, float], kept: dict[int, float]) -> None:
    found = dict(choose((place + 0.5) / 200, **sampling) for place in range(200))
    assert found == {token: pytest.approx(log(chance), abs=1e-6) for token, chance in kept.items()}
    (support,) = choose_tokens(LOGITS, [Sampling(**sampling)], [0.5]).supports  # type: ignore[arg-type]
    assert sorted(support) == (sorted(kept) if Sampling(**sampling).is_truncated else [])  # type: ignore[arg-type]


def test_greedy_takes_likeliest_token_whatever_the_number() -> None:
    token, logprob = choose(0.99, temperature=0.0)
    assert token == 1 and logprob == pytest.approx(log(0.5), abs=1e-6)


def test_rows_follow_their_own_settings() -> None:
    logits = LOGITS.expand(4, 4)
    samplings = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=1), Sampling(min_p=0.6)]
    choice = choose_tokens(logits, samplings, [0.7, 0.7, 0.7, 0.0])
    assert choice.tokens.tolist() == [2, 1, 1, 1]
    assert choice.logprobs.tolist() == pytest.approx([log(0.1), log(0.5), 0.0, 0.0], abs=1e-6)
    assert choice.supports == [[], [], [1], [1]]


@pytest.mark.parametrize("sampling", [{"top_p": 0.999999}, {"min_p": 1e-9}, {"top_k": MAX_SUPPORT}])
def test_support_has_most_tokens_at_limit(sampling: dict[str, float]) -> None:
    logits = torch.linspace(1.0, 0.0, 3 * MAX_SUPPORT)[None]
    (support,) = choose_tokens(logits, [Sampling(**sampling)], [0.999]).supports  # type: ignore[arg-type]
    assert support == [*range(MAX_SUPPORT)]


def test_larger_top_k_is_kept_and_its_rest_counted() -> None:
    samplings = [Sampling(top_k=MAX_SUPPORT + 1), Sampling(top_k=MAX_SUPPORT + 1, top_p=0.5)]
    choice = choose_tokens(torch.zeros(2, 3 * MAX_SUPPORT), samplings, [0.9999] * 2)
    # half of the mass of 129 equal tokens is that of 65
    assert choice.tokens.tolist() == [MAX_SUPPORT, 64] and choice.supports == [[], [*range(65)]]


def test_supports_that_are_not_asked_for_change_no_token() -> None:
    logits, given = torch.linspace(1.0, 0.0, 3 * MAX_SUPPORT)[None], {"top_p": 0.999999}
    with_supports, without = (
        choose_tokens(logits, [Sampling(**given, returns_supports=asked)], [0.9999])  # type: ignore[arg-type]
        for asked in (True, False)
    )
    assert torch.equal(with_supports.tokens, without.tokens) and torch.equal(with_supports.logprobs, without.logprobs)
    assert without.supports == [[]] and with_supports.supports != [[]]
