"""Classes that cannot be environments, and what cannot be read of those that can: one line each."""

import asyncio
import re
from typing import Any

import pytest
import step_cases
from attempts import play
from step_cases import Game

from rlightning.environments import StepEnvironment
from rlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        ("Game", {}, "environment=Game is no dotted path. Write module.name, such as my_package.Game."),
        ("no_package.Game", {}, "environment=no_package.Game cannot be imported by "),
        (
            "step_cases.Gamer",
            {},
            "environment=step_cases.Gamer: 'step_cases' has no class or function 'Gamer'. Did you mean 'Game'",
        ),
        ("step_cases.number", {}, "environment=step_cases.number is neither a class nor a function"),
        ("step_cases.OnlyReset", {}, "environment=step_cases.OnlyReset: OnlyReset has no method 'step'. Define reset"),
        (step_cases.OnlyReset, {}, "environment=OnlyReset: OnlyReset has no method 'step'. Define reset(prompt) and "),
        ("step_cases.Game", {"frist": 1}, "environment=step_cases.Game: got an unexpected keyword argument 'frist'."),
    ],
)
def test_class_that_cannot_be_used_is_one_line(environment: Any, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^StepEnvironment: {re.escape(line)}") as raised:
        asyncio.run(StepEnvironment(environment, arguments).check())
    assert "\n" not in raised.value.line


def test_no_game_and_no_turns_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^StepEnvironment: environment=.*nothing: NoneType has no method 'reset'\."):
        play(StepEnvironment("step_cases.make_nothing"))
    with pytest.raises(ConfigError, match=r"^StepEnvironment: max_turns=0 must be at least 1\.$"):
        StepEnvironment(Game, max_turns=0)


TEXTS = "and has to return a text, or messages of texts such as {'role': 'user', 'content': 'Go on.'}"


@pytest.mark.parametrize(
    ("first", "returned", "line"),
    [
        (7, None, f"reset() returned the observation 7, {TEXTS}"),
        ([], None, f"reset() returned the observation [], {TEXTS}"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "reset() returned the observation [{'role': 'user'"),
        ([{"role": "assistant", "content": "hi"}], None, "reset() returned the observation [{'role': 'assistant'"),
        (("go", 3), None, "reset() returned the info 3, and has to return a dict or None."),
        (
            None,
            "+",
            "step() returned '+', and has to return (observation, reward, done, info) or (observation, reward,",
        ),
        (None, (1, 2, 3), "step() returned (1, 2, 3), and has to return (observation, reward, done, info) or ("),
        (None, (None, 1.0, False, {}), f"step() returned the observation None, {TEXTS}"),
        (None, ("+", "1", False, {}), "step() returned the reward '1', and has to return a number or None."),
        (None, ("+", float("nan"), True, {}), "step() returned the reward nan, and has to return a finite number or"),
        (None, ("+", 1.0, False, True), "step() returned the info True, and has to return a dict or None."),
    ],
)
def test_unreadable_returns_fail_the_trajectory_in_one_line(first: Any, returned: Any, line: str) -> None:
    class Odd(Game):
        def step(self, message: Any) -> Any:
            return returned

    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(line)}") as raised:
        play(StepEnvironment(Odd, {"first": first}))
    assert "\n" not in str(raised.value)
    assert step_cases.made[-1].num_closed == 1
