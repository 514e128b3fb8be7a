import math

import pytest

from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.rollout.engine import vllm_sampling
from rlightning.rollout.requests import group_sampling
from rlightning.types import Prompt

PROMPT = Prompt(0, "", [1], {})

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
