"""Requests to an engine: sampling settings, random streams, and settings that are refused."""

import math
from typing import Any

import pytest

from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.rollout.engine import vllm_sampling
from rlightning.rollout.requests import RandomStreams, check_requests, check_stop_tokens, group_sampling
from rlightning.types import Prompt

PROMPT = Prompt(0, "", [1], {})
PROMPTS = [Prompt(index, "", [1, 2, 3], {}) for index in (0, 1, 15, 16, 1 << 24)]
SCALE = (1 << 62) - 1


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0, which is greedy, or from 0.01 to 2"),
        ({"temperature": 0.005}, "temperature=0.005 must be 0, which is greedy, or from 0.01 to 2"),
        ({"temperature": 2.5}, "temperature=2.5 must be 0"),
        ({"temperature": math.nan}, "temperature=nan must be 0"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1 must be at least 0"),
        ({"min_p": 2.0}, "min_p=2.0 must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"stop": ("x", "")}, "has an empty text"),
        ({"stop_token_ids": (3, -1)}, r"stop_token_ids=\[3, -1\] must be token ids, at least 0"),
    ],
)
def test_sampling_that_vllm_alters_or_refuses_is_error(wrong: dict[str, float], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperature_vllm_uses_as_it_is_is_taken(temperature: float) -> None:
    arguments = vllm_sampling(Sampling(temperature=temperature), 1, ())
    assert arguments["temperature"] == temperature


def seeds(seed: int | None, num_streams: int, num_samples: int) -> set[int]:
    """Of the samples of some prompts; vLLM gives sample i of a prompt the request's seed + i."""
    starts = [group_sampling(Sampling(seed=seed), PROMPT, stream).seed or 0 for stream in range(num_streams)]
    return {start + i for start in starts for i in range(num_samples)}


@pytest.mark.long
def test_neighbouring_seeds_and_streams_share_no_random_numbers() -> None:
    streams = [seeds(seed, 1000, 8) for seed in (-1, 0, 1, 2, 1000, 1 << 70)]
    assert len(set().union(*streams)) == 6 * 1000 * 8
    # Spread over the whole range, as if drawn at random: a tenth of them below a tenth of it.
    share = sum(seed < SCALE // 10 for seed in streams[1]) / 8000
    assert share == pytest.approx(0.1, abs=0.03)
    assert all(0 <= seed < 1 << 63 for some in streams for seed in some)


def test_number_of_samples_does_not_change_the_seed() -> None:
    few, many = (vllm_sampling(group_sampling(Sampling(seed=5), PROMPT, 7), n, ())["seed"] for n in (2, 8))
    assert few == many
    assert vllm_sampling(group_sampling(Sampling(), PROMPT, 2), 4, ())["seed"] is None


def test_request_says_what_ends_a_completion() -> None:
    arguments = vllm_sampling(Sampling(stop_token_ids=(9, 2)), 1, (7, 2))
    assert arguments["ignore_eos"] is True  # of the engine's own reading
    assert arguments["stop_token_ids"] == [2, 7, 9]


@pytest.mark.parametrize(
    ("truncation", "top_k", "logprobs"),
    [({}, 0, 0), ({"top_p": 0.9}, 128, 128), ({"min_p": 0.1, "top_k": 5}, 5, 5), ({"top_k": 128}, 128, 128)],
)
def test_what_is_sampled_from_fits_a_support(truncation: dict[str, Any], top_k: int, logprobs: int) -> None:
    arguments = vllm_sampling(Sampling(**truncation), 1, ())
    assert (arguments["top_k"], arguments["logprobs"]) == (top_k, logprobs)


@pytest.mark.parametrize("top_k", [129, 500])
def test_one_logprob_beyond_support_size_shows_larger_supports(top_k: int) -> None:
    arguments = vllm_sampling(Sampling(top_p=0.9, top_k=top_k), 1, ())
    assert (arguments["top_k"], arguments["logprobs"], arguments["max_support"]) == (top_k, 129, 128)


def test_same_tokens_are_sampled_from_without_supports() -> None:
    arguments = vllm_sampling(Sampling(top_p=0.9, returns_supports=False), 1, ())
    assert (arguments["top_k"], arguments["logprobs"], arguments["max_support"]) == (128, 0, 0)


def test_streams_differ_by_purpose_version_prompt_and_repetition() -> None:
    streams, drawn = RandomStreams(), []
    for purpose in ("training", "evaluation"):
        for version in (0, 1, 2):
            streams.begin(purpose)
            for _ in range(20):  # more often than a prompt could come while its number had 4 bits for that
                drawn += streams.draw(PROMPTS, version)
    assert len(set(drawn)) == len(drawn) == 2 * 3 * 20 * 5


def test_repeated_step_draws_the_same_streams() -> None:
    streams = RandomStreams()
    first = [streams.draw(PROMPTS, 3), streams.draw(PROMPTS[:2], 3)]
    streams.begin("training")
    assert [streams.draw(PROMPTS, 3), streams.draw(PROMPTS[:2], 3)] == first
    # They are the prompts' own: another order, or others beside them, changes none.
    streams.begin("training")
    assert streams.draw(PROMPTS[::-1], 3) == first[0][::-1]


def test_requests_without_a_seed_have_no_streams() -> None:
    streams = RandomStreams()
    assert streams.assign(PROMPTS[:2], Sampling(), 1) == [(PROMPTS[0], 0), (PROMPTS[1], 0)]
    assert len({number for _, number in streams.assign(PROMPTS, Sampling(seed=0), 1)}) == 5


def test_request_that_fits_exactly_is_taken() -> None:
    check_requests(PROMPTS, 4, Sampling(max_new_tokens=7), 10)
    check_requests(PROMPTS, 1, Sampling(max_new_tokens=7, temperature=0), 10)
    check_requests([], 4, Sampling(max_new_tokens=7), 10)
    message = r"A prompt of 3 tokens \+ max_new_tokens=8 = 11, but the engine takes 10 .* Lower max_new_tokens by 1"
    with pytest.raises(ConfigError, match=message):
        check_requests(PROMPTS, 4, Sampling(max_new_tokens=8), 10)


def test_prompts_own_sampling_stands_in_for_the_runs() -> None:
    sampling, own = Sampling(max_new_tokens=7, top_p=0.9), Prompt(0, "", [1], {}, temperature=0.5, max_new_tokens=3)
    assert sampling.of(PROMPTS[0]) is sampling
    assert sampling.of(own) == Sampling(temperature=0.5, max_new_tokens=3, top_p=0.9)
    assert sampling.of(own._replace(max_new_tokens=None)) == Sampling(temperature=0.5, max_new_tokens=7, top_p=0.9)
    assert vllm_sampling(sampling.of(own), 2, [0])["max_tokens"] == 3
    check_requests([own], 2, sampling, 10)
    with pytest.raises(ConfigError, match=r"own max_new_tokens=8 is above rollout\.max_new_tokens=7"):
        check_requests([own._replace(max_new_tokens=8)], 2, sampling, 100)
    with pytest.raises(ConfigError, match="temperature=0 makes all 2 samples of a prompt alike"):
        check_requests([own._replace(temperature=0.0)], 2, sampling, 10)


def test_stop_tokens_are_the_models() -> None:
    check_stop_tokens(Sampling(stop_token_ids=(0, 13)), 14)
    with pytest.raises(ConfigError, match=r"stop_token_ids=\[0, 14\] must be below 14"):
        check_stop_tokens(Sampling(stop_token_ids=(0, 14)), 14)
