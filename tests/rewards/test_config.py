"""Finding reward functions, binding their arguments, and every mistake in that."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction
from rlightning.rewards.config import bind_rewards

GIVEN = {"prompt": "p", "completion": "c", "full_text": "pc", "num_tokens": 3, "is_truncated": False}


def grade(completion: str, answer: str, *, scale: float = 1.0, hint: str = "") -> float:
    return scale


def grade_all(completion: str, **columns: Any) -> float:
    return len(columns)


class Judge:
    """A callable object."""

    async def __call__(self, completion: str) -> float:
        return 1.0


def test_a_function_gets_what_its_signature_asks_for() -> None:
    reward, everything = bind_rewards([RewardFunction(grade, arguments={"scale": 2.0}), grade_all])
    row = {"prompt": "raw", "answer": "4", "level": 1}
    assert reward.select(GIVEN, row) == {"completion": "c", "answer": "4", "scale": 2.0}
    assert everything.select(GIVEN, row) == {**GIVEN, "answer": "4", "level": 1}
    (mapped,) = bind_rewards([RewardFunction(grade, columns={"answer": "solution", "hint": "level"})])
    assert mapped.select(GIVEN, {"solution": "5", **row}) == {"completion": "c", "answer": "5", "hint": 1}


def test_names_and_kinds() -> None:
    rewards = bind_rewards(
        [
            "rlightning.rewards.exact_match",
            RewardFunction(partial(grade, scale=3.0), name="mine"),
            Judge(),
            lambda completion: 1.0,
        ]
    )
    assert [reward.name for reward in rewards] == ["exact_match", "mine", "Judge", "reward"]
    assert [reward.is_async for reward in rewards] == [False, False, True, False]
    assert [reward.pickled is None for reward in rewards] == [False, False, True, True]


def test_check_names_the_nearest_column() -> None:
    (reward,) = bind_rewards([grade])
    reward.check(["prompt", "answer"], "train.jsonl")
    with pytest.raises(ConfigError) as caught:
        reward.check(["prompt", "anwser"], "train.jsonl")
    assert str(caught.value) == (
        "Reward 'grade' needs the column 'answer', which 'train.jsonl' does not have. Did you mean 'anwser'?"
    )


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["exact_match"], r"'exact_match' is no dotted path\. Write module\.function"),
        (["rlightning.rewards.exact_mach"], r"has no reward function 'exact_mach'\. Did you mean 'exact_match'\?"),
        (["rlightning.rewrds.exact_match"], r"cannot be imported: No module named 'rlightning\.rewrds'"),
        (["os.curdir"], r"The reward 'os\.curdir' is a str, not a function"),
        ([grade, grade], "Two reward functions have the name 'grade'"),
        ([RewardFunction(grade, name="mean")], r"cannot have the name 'mean': reward/mean is another metric"),
        (
            [RewardFunction(grade, arguments={"scal": 1})],
            r"Reward 'grade' has no argument 'scal'\. Did you mean 'scale'\?",
        ),
        ([RewardFunction(grade, arguments={"prompt": "x"})], "'prompt' is given to it for each sample"),
        ([RewardFunction(grade, columns={"anser": "x"})], r"has no argument 'anser'\. Did you mean 'answer'\?"),
        ([RewardFunction(grade, timeout=0)], "timeout=0 must be a number of seconds above 0"),
        ([RewardFunction(grade, weight=float("nan"))], "weight=nan must be a finite number"),
    ],
)
def test_mistakes_are_one_line(rewards: Sequence[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        bind_rewards(rewards)
    assert "\n" not in str(caught.value)
