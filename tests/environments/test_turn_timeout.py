"""The deadline of one turn, on a clock that the environment sets."""

import asyncio
from array import array
from typing import Any

import pytest
from attempts import attempt

from rlightning.callbacks import TransformersRollout
from rlightning.environments import Environment, Policy
from rlightning.errors import ConfigError
from rlightning.types import Outcome, Prompt, Sample, Trajectory

PROMPT = Prompt(0, "", [1], {})
LIMIT = 1000.0


class Clock:
    """The event loop's, which tests advance."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.seconds, time = 0.0, loop.time
        loop.time = lambda: time() + self.seconds  # type: ignore[method-assign]


class Sampler:
    """Samples one token at once; a history of ``held`` tokens is never answered."""

    tokenizer = None

    def __init__(self, held: int = 0) -> None:
        self.held = held

    async def sample(self, token_ids: Any, *arguments: Any, **settings: Any) -> list[Sample]:
        if len(token_ids) == self.held:
            await asyncio.Event().wait()
        return [Sample(array("q", [2]), array("f", [0.0]), array("i", [0]), "2", "stop")]


class Turns(Environment):
    """Some turns, each of which takes 0.6 of the limit; then it ends, or stalls for longer than that."""

    def __init__(self, num_turns: int = 4, *, stalls: bool = False, asks: str = "whole") -> None:
        self.num_turns, self.stalls, self.asks = num_turns, stalls, asks

    async def run(self, prompt: Prompt, policy: Any) -> Outcome:
        clock, history, asked = Clock(), [1], policy.split() if self.asks == "part" else policy
        for turn in range(self.num_turns):
            clock.seconds += 0.6 * LIMIT
            await asyncio.sleep(0)
            history += (await asked.sample(history)).token_ids
            await policy.report(Outcome(reward=float(turn)))
        if self.stalls:
            clock.seconds += 1.1 * LIMIT
            await asyncio.Event().wait()
        return Outcome(reward=1.0)


def run_once(environment: Environment, sampler: Sampler, timeout: float | None = None) -> Trajectory:
    (trajectory,) = attempt(environment, sampler, PROMPT, timeout=timeout, turn_timeout=LIMIT)
    return trajectory


@pytest.mark.parametrize("asks", ["whole", "part"])
def test_turns_may_take_longer_than_the_limit_together(asks: str) -> None:
    one = run_once(Turns(asks=asks), Sampler())
    assert (one.status, one.reward) == ("finished", 1.0)


def test_turn_beyond_its_limit_keeps_its_rewards() -> None:
    one = run_once(Turns(stalls=True), Sampler())
    assert (one.status, one.reward, one.error) == ("timeout", 3.0, "A turn took more than 1000 s.")
    assert one.num_sampled == 4


def test_silent_engine_ends_the_turn() -> None:
    class Impatient(Turns):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            clock = Clock()
            await policy.sample([1])
            asyncio.get_running_loop().call_soon(setattr, clock, "seconds", 1.1 * LIMIT)
            await policy.sample([1, 2])
            return Outcome(reward=1.0)

    one = run_once(Impatient(), Sampler(held=2))
    assert (one.status, one.reward, one.num_sampled) == ("timeout", None, 1)


def test_trajectorys_own_limit_is_named_if_first() -> None:
    one = run_once(Turns(), Sampler(), timeout=1.5 * LIMIT)
    assert (one.status, one.error) == ("timeout", "It took more than 1500 s.")


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.turn_timeout=0 must be above 0 seconds"):
        TransformersRollout(turn_timeout=0)
