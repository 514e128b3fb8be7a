import pytest

from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.rollout.vllm_engine import vllm_sampling


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1 must be at least 0"),
        ({"min_p": 2.0}, "min_p=2.0 must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ],
)
def test_what_cannot_be_sampled_is_refused(wrong: dict[str, float], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_seeds_of_samples_never_meet() -> None:
    # vLLM gives sample i of a prompt the seed + i.
    starts = [vllm_sampling(Sampling(seed=100), 4, stream)["seed"] for stream in range(3)]
    assert starts == [100, 104, 108]
    assert vllm_sampling(Sampling(), 4, 2)["seed"] is None
    assert 0 <= vllm_sampling(Sampling(seed=1 << 62), 8, 1 << 62)["seed"] < 1 << 63
