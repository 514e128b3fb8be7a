"""Finding reward functions, binding their arguments, and every mistake in that."""

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import stateful

from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction, RewardRunner
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


def retry(function: Any) -> Any:
    """A decorator as users write it: what it makes is no coroutine function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@retry
async def judge(completion: str) -> float:
    return 1.0


class Grader:
    """A reward in each form that a class allows."""

    best = 0.0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.calls, self.seen = scale, 0, set[str]()

    def __call__(self, completion: str) -> float:
        return self.scale

    def method(self, completion: str) -> float:
        return self.scale

    def counting(self, completion: str) -> float:
        self._count()
        return self.calls

    def remembering(self, completion: str) -> float:
        self.seen.add(completion)
        return len(self.seen)

    def _count(self) -> None:
        self.calls += 1

    def counting_in_class(self, completion: str) -> float:
        type(self).best += 1
        return self.best

    def setting(self, completion: str) -> float:
        setattr(self, "scale", 2.0)  # noqa: B010
        return self.scale

    @staticmethod
    def static(completion: str) -> float:
        return 1.0

    @classmethod
    def of_class(cls, completion: str) -> float:
        return cls.best

    @classmethod
    def keeping_best(cls, completion: str) -> float:
        cls.best = max(cls.best, len(completion))
        return cls.best


grader = Grader()
seen: dict[str, int] = {}
total = 0.0


def count_in_module(completion: str) -> float:
    global total
    total += 1
    return total


def call_what_remembers(completion: str) -> float:
    return remember(completion)


def remember(completion: str) -> float:
    seen[completion] = seen.get(completion, 0) + 1
    return seen[completion]


def default_list(completion: str, seen: list[str] = []) -> float:  # noqa: B006
    seen.append(completion)
    return len(seen)


def rebound_default(completion: str, seen: list[str] = []) -> float:  # noqa: B006
    seen = [*seen, completion]
    seen.append(completion)
    return len(seen)


numbers = itertools.count()


def next_of_module(completion: str) -> float:
    return next(numbers)


def next_of_its_own(completion: str) -> float:
    characters = iter(completion)
    return float(next(characters, "") == next((c for c in "x"), ""))


def write_globals(completion: str) -> float:
    globals()["total"] = 1.0
    return total


def count_calls(function: Any) -> Any:
    """A decorator with a counter."""
    num_calls = 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return function(*args, **kwargs)

    return call


@count_calls
def counted(completion: str) -> float:
    return 1.0


@retry
def retried_counter(completion: str) -> float:
    return count_in_module(completion)


def count_elsewhere(completion: str) -> float:
    return stateful.count()


def use_object_elsewhere(completion: str) -> float:
    return stateful.counter.count()


def count_inside(completion: str) -> float:
    number = 0

    def add() -> None:
        nonlocal number
        number += 1

    add()
    return number


async def count_async(completion: str) -> float:
    return count_in_module(completion)


def compute_locally(completion: str) -> float:
    words = completion.split()
    words.append("end")
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return max(counts.values())


def generate(completion: str) -> Any:
    yield 1.0


def by_position(completion: str, /) -> float:
    return 1.0


def test_a_function_gets_what_its_signature_asks_for() -> None:
    reward, everything = bind_rewards([RewardFunction(grade, arguments={"scale": 2.0}), grade_all])
    row = {"prompt": "raw", "answer": "4", "level": 1}
    assert reward.select(GIVEN, row) == {"completion": "c", "answer": "4", "scale": 2.0}
    assert everything.select(GIVEN, row) == {**GIVEN, "answer": "4", "level": 1}
    (mapped,) = bind_rewards([RewardFunction(grade, columns={"answer": "solution", "hint": "level"})])
    assert mapped.select(GIVEN, {"solution": "5", **row}) == {"completion": "c", "answer": "5", "hint": 1}


def test_functions_have_their_names_and_kinds() -> None:
    rewards = bind_rewards(
        [
            "rlightning.rewards.exact_match",
            RewardFunction(partial(grade, scale=3.0), name="mine"),
            Judge(),
            lambda completion: 1.0,
            judge,
            RewardFunction(functools.cache(judge), name="cached"),
            RewardFunction(partial(Judge()), name="partial"),
            RewardFunction(retry(partial(retry(Judge().__call__))), name="nested"),
        ]
    )
    names = ["exact_match", "mine", "Judge", "reward", "judge", "cached", "partial", "nested"]
    assert [reward.name for reward in rewards] == names
    assert [reward.is_async for reward in rewards] == [False, False, True, False, True, True, True, True]
    assert [reward.pickled is None for reward in rewards] == [False, False, False, True, False, True, False, True]


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
        (
            ["exact_match"],
            r"'exact_match' is no dotted path\. Write module\.name, such as rlightning\.rewards\.exact_match\.$",
        ),
        ([".rewards.exact_match"], r"'\.rewards\.exact_match' is no dotted path\. Write module\.name"),
        (["rlightning.rewards.exact_mach"], r"has no class or function 'exact_mach'\. Did you mean 'exact_match'\?"),
        (["rlightning.rewrds.exact_match"], r"'rlightning' has no module or class 'rewrds'\. Did you mean 'rewards'\?"),
        (
            ["no_package.f"],
            r"The reward 'no_package\.f' cannot be imported by .*: No module named 'no_package'\. Install",
        ),
        (["os.curdir"], r"The reward 'os\.curdir' is a str, not a function"),
        ([grade, grade], "Two reward functions have the name 'grade'"),
        (
            [lambda completion: 0.0, lambda completion: 1.0],
            r"Two reward functions have the name 'reward'\. Give each its own: RewardFunction\(f, name='\.\.\.'\)",
        ),
        ([RewardFunction(grade, name="mean")], r"cannot have the name 'mean': reward/mean is another metric"),
        (
            [RewardFunction(grade, arguments={"scal": 1})],
            r"Reward 'grade' has no argument 'scal'\. Did you mean 'scale'\?",
        ),
        ([RewardFunction(grade, arguments={"prompt": "x"})], "'prompt' is given to it for each sample"),
        ([RewardFunction(grade, columns={"anser": "x"})], r"has no argument 'anser'\. Did you mean 'answer'\?"),
        ([RewardFunction(grade, timeout=0)], "timeout=0 must be a number of seconds above 0"),
        ([RewardFunction(grade, weight=float("nan"))], "weight=nan must be a finite number"),
        (
            ["test_config.Grader"],
            r"'test_config\.Grader' is a class: .* as in judge = Grader\(\), and name that one\.$",
        ),
        ([partial(Grader, scale=2.0)], "'Grader' is a class"),
        (
            ["test_config.Grader.method"],
            r"'test_config\.Grader\.method' is a method of the class Grader without an object\. .* name judge\.method;",
        ),
        ([Grader.method], "'method' is a method of the class Grader without an object"),
        (["test_config.Grader.statik"], r"'Grader' has no class or function 'statik'\. Did you mean 'static'\?"),
        (["test_config.Gradr.static"], r"'test_config' has no module or class 'Gradr'\. Did you mean 'Grader'\?"),
        ([generate], "'generate' is a generator"),
        ([by_position], r"'by_position' takes 'completion' by position, and gets all arguments by name\. Remove"),
    ],
)
def test_mistakes_are_one_line(rewards: Sequence[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        bind_rewards(rewards)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["Grader.static", "Grader.of_class", "grader", "grader.method"])
def test_functions_of_classes_and_objects_have_dotted_paths(path: str) -> None:
    (reward,) = bind_rewards([RewardFunction(f"test_config.{path}")])
    assert reward.function(completion="x") == {"Grader.of_class": 0.0}.get(path, 1.0)
    assert reward.pickled is not None and reward.modules >= {"test_config"}
    assert reward.state is None, "nothing changes"


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (grader.counting, "self.calls"),
        (grader.remembering, "self.seen"),
        (Grader.keeping_best, "cls.best"),
        (count_in_module, "total"),
        (call_what_remembers, "seen"),
        (partial(count_in_module), "total"),
        (grader.counting_in_class, "type(self).best"),
        (grader.setting, "self.scale"),
        (default_list, "seen"),
        (rebound_default, None),
        (next_of_module, "numbers"),
        (next_of_its_own, None),
        (write_globals, "globals()"),
        (counted, "num_calls"),
        (retried_counter, "total"),
        (functools.partial(functools.partial(retried_counter)), "total"),
        (count_elsewhere, "number"),
        (use_object_elsewhere, "self.number"),
        (count_inside, None),
        (count_async, None),  # runs in one process
        (compute_locally, None),
    ],
)
def test_state_that_each_worker_has_is_explained(
    function: Any, state: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    RewardRunner([RewardFunction(function, name="mine")])
    expected = [] if state is None else [f"Reward 'mine' changes {state}. Each worker process has its own copy"]
    assert [record.getMessage().partition(", which")[0] for record in caplog.records] == expected
