"""Numbers of random streams, and requests that no engine could answer as they are asked."""

import pytest

from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.rollout.engine import vllm_sampling
from rlightning.rollout.requests import RandomStreams, check_requests, check_stop_tokens
from rlightning.types import Prompt

PROMPTS = [Prompt(index, "", [1, 2, 3], {}) for index in (0, 1, 15, 16, 1 << 24)]


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
