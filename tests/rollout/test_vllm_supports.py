"""Supports from vLLM's log-probabilities, by hand."""

from math import inf, log

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import LogprobsLists

from rlightning.rollout.vllm.supports import drop_cut_tokens, read_supports


def flat(*rows: list[tuple[int, float]]) -> FlatLogprobs:
    """Of each token its own log-probability and those of the likeliest ones."""
    found = FlatLogprobs()
    for row in rows:
        tokens, logprobs = zip(*row, strict=True)
        found.append_fast(list(tokens), list(logprobs), iter(range(len(row))), [None] * len(row))  # type: ignore[arg-type]
    return found


def test_supports_are_tokens_above_minus_infinity() -> None:
    half, quarter = log(0.5), log(0.25)
    given = flat(
        [(7, quarter), (3, half), (7, quarter), (5, quarter), (9, -inf)],
        [(4, 0.0), (4, 0.0), (1, -inf)],
        [(2, half), (8, half), (2, half)],
    )
    logprobs, tokens, sizes = read_supports(given, 4)
    assert tokens.tolist() == [7, 3, 5, 4, 2, 8] and sizes.tolist() == [3, 1, 2]
    assert logprobs.tolist() == pytest.approx([quarter, 0.0, half], abs=1e-7)


def test_tokens_beyond_limit_do_not_count_as_mass() -> None:
    """Four equal logits at the limit of two: the sampled one is not among the two that were returned."""
    logprobs, tokens, sizes = read_supports(flat([(9, log(0.25)), (3, log(0.25)), (4, log(0.25))]), 2)
    assert tokens.tolist() == [9, 3, 4] and sizes.tolist() == [3]
    assert logprobs.tolist() == pytest.approx([log(1 / 3)], abs=1e-7)


def test_larger_support_is_dropped_and_token_keeps_logprob() -> None:
    quarter, half = log(0.25), log(0.5)
    given = flat(
        [(3, half), (3, half), (5, quarter), (9, -inf)],
        [(8, log(0.1)), (3, half), (5, quarter), (9, log(0.15))],
        [(5, half), (3, half), (5, half), (9, -inf)],
    )
    logprobs, tokens, sizes = read_supports(given, 2)
    assert tokens.tolist() == [3, 5, 5, 3] and sizes.tolist() == [2, 0, 2]
    assert logprobs.tolist() == pytest.approx([log(2 / 3), log(0.1), half], abs=1e-7)


def test_no_token_has_no_support() -> None:
    assert [part.tolist() for part in read_supports(FlatLogprobs(), 2)] == [[], [], []]


def test_columns_of_cut_tokens_are_dropped() -> None:
    given = np.array([[-1.0, -0.5, -1.0, -inf, -inf], [-0.1, -0.1, -inf, -inf, -inf]], np.float32)
    lists = LogprobsLists(np.arange(10, dtype=np.int32).reshape(2, 5), given, np.array([2, 1]))
    dropped = drop_cut_tokens(lists)
    assert dropped.logprob_token_ids.tolist() == [[0, 1, 2], [5, 6, 7]] and dropped.logprobs.shape == (2, 3)
    assert dropped.logprobs.flags.c_contiguous and drop_cut_tokens(
        dropped._replace(logprobs=given[:, :1])
    ).logprobs.shape == (2, 1)
