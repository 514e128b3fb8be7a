"""An environment made of a class with gymnasium's methods ``reset`` and ``step``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

from rlightning.dotted_path import import_object, name_object
from rlightning.environments.environment import Environment, LimitReachedError, Policy
from rlightning.environments.messages import Message
from rlightning.environments.step_object import Closing, StepObject, read_state
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value
from rlightning.python_values import JsonObject
from rlightning.types.trajectory import Outcome, Prompt, Status

METHODS = ("reset", "step")
"""Methods that the user's object must have; ``close`` is optional."""
STATE = ("object", "observations", "rewards", "metrics")
"""Keys of a trajectory's state in a checkpoint."""
RULE = "Define reset(prompt) and step(message), or gymnasium's."


class StepEnvironment(Environment):
    """Runs a user's object with the methods ``reset`` and ``step``, which may be async, as an environment. Each
    trajectory makes and closes its own object.

    - ``reset(prompt)`` returns None, and the policy's first turn answers the prompt; or messages (a text is a user
      message) that replace the prompt; or a tuple of either with gymnasium's ``info``.
    - ``step(message)`` returns ``(observation, reward, done, info)``, or gymnasium's five values; the observation is a
      text, a message or a list of messages. Numbers in ``info`` become metrics of the trajectory.
    - A ``reset`` with a parameter ``options`` is gymnasium's: it gets the prompt's index as ``seed`` and the columns as
      ``options``, and ``step`` gets only the text of the policy's turn.
    - ``snapshot()``, which is optional, returns plain data, and ``restore(state)`` sets another object to it after its
      ``reset``: a trajectory that was running at a checkpoint continues after its last turn.

    The trajectory's reward is the sum of its turns' rewards; None if none of them is a number. Methods that are not
    async run in a thread, one for each trajectory.

    Args:
        environment: the class or a function that returns an object, or the dotted path of either.
        arguments: keyword arguments of the class or function.
        max_turns: maximum turns of the policy, after which a trajectory is truncated.
    """

    def __init__(
        self,
        environment: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        max_turns: int = 8,
    ) -> None:
        check_rules({f"StepEnvironment: max_turns={max_turns} must be at least 1": max_turns >= 1})
        self.environment, self.arguments, self.max_turns = environment, dict(arguments or {}), max_turns
        self._closing = Closing()

    @property
    def _name(self) -> str:
        return f"StepEnvironment: environment={name_object(self.environment)}"

    @cached_property
    def _make(self) -> Callable[..., object]:
        make = import_object(self.environment, self._name)
        if not callable(make):
            raise ConfigError(f"{self._name} is neither a class nor a function that returns an object. {RULE}")
        if isinstance(make, type):
            check_methods(make, self._name)
        return make

    async def check(self) -> None:
        """Raise a ConfigError if the class cannot be found, lacks a method, or does not accept the arguments."""
        try:
            inspect.signature(self._make).bind(**self.arguments)
        except TypeError as error:
            raise ConfigError(f"{self._name}: {cut_line(error)}. Change its arguments.") from error

    async def close(self) -> None:
        """Wait until the objects of finished trajectories are closed, for a few seconds at most."""
        await self._closing.wait()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one trajectory of a prompt in a new environment object, which is closed even if an error is raised."""
        game = StepObject()
        try:
            await game.make(self._make, self.arguments)
            check_methods(game.made, self._name)
            return await self._play(game, prompt, policy)
        finally:
            await self._closing.close(game)

    async def _play(self, game: StepObject, prompt: Prompt, policy: Policy) -> Outcome:
        is_gymnasium = "options" in inspect.signature(game.made.reset).parameters
        if is_gymnasium:
            returned = await game.call("reset", seed=prompt.index, options=dict(prompt.columns))
        else:
            returned = await game.call("reset", prompt)
        first, info = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        observations = [] if first is None else read_messages(first, "reset")
        metrics = read_metrics(info, "reset")
        rewards: list[float | None] = []
        saved = await policy.resume() if game.has_snapshots else None
        if saved is not None:
            parts = read_state(saved, *STATE)
            observations, rewards, metrics = parts["observations"], parts["rewards"], parts["metrics"]
            await game.restore(parts["object"])
        status: Status | None = None
        while status is None:
            try:
                text = (await policy.chat(*observations)).text
            except LimitReachedError as error:
                if not rewards:  # nothing was sampled
                    raise ValueError(f"the policy cannot begin: {error}") from None
                status = "truncated"
                break
            await policy.report(make_outcome([*rewards, None], "timeout", metrics))
            message = {"role": "assistant", "content": text}
            step = read_step(await game.call("step", text if is_gymnasium else message))
            rewards.append(step.reward)
            metrics |= step.metrics
            status = step.status or ("truncated" if len(rewards) == self.max_turns else None)
            observations = [] if status else read_messages(step.observation, "step")
            state = None if status else await save(game, observations, rewards, metrics)
            await policy.report(make_outcome(rewards, "timeout", metrics), state)
        return make_outcome(rewards, status, metrics)


async def save(game: StepObject, *parts: object) -> JsonObject | None:
    """Return a trajectory's state for a checkpoint; None if the user's object has no ``snapshot`` and ``restore``."""
    return dict(zip(STATE, [await game.call("snapshot"), *parts], strict=True)) if game.has_snapshots else None


class Step(NamedTuple):
    """The parsed result of ``step``: ``metrics`` are the numbers in ``info``; ``status`` is None until the end."""

    observation: object
    reward: float | None
    status: Status | None
    metrics: dict[str, float]


def make_outcome(rewards: Sequence[float | None], status: Status, metrics: Mapping[str, float]) -> Outcome:
    """Return a trajectory's outcome; its reward is the sum of the turns' rewards."""
    has_rewards = any(reward is not None for reward in rewards)
    turn_rewards = [reward or 0.0 for reward in rewards] if has_rewards else None
    reward = math.fsum(turn_rewards) if turn_rewards else None
    return Outcome(reward, turn_rewards, status, {"turns": float(len(rewards)), **metrics})


def check_methods(found: object, name: str) -> None:
    """Raise a ConfigError if a user's class or object lacks ``reset`` or ``step``."""
    for method in METHODS:
        if not callable(getattr(found, method, None)):
            kind = found if isinstance(found, type) else type(found)
            raise ConfigError(f"{name}: {kind.__name__} has no method '{method}'. {RULE}")


def read_step(returned: object) -> Step:
    """Convert what a user's ``step`` returned, four values or gymnasium's five, to a Step; raise a TypeError or
    ValueError if it has another form, or the reward is neither finite nor None.
    """
    if not isinstance(returned, tuple) or len(returned) not in (4, 5):
        raise TypeError(
            f"step() returned {cut_value(returned)}, and has to return (observation, reward, done, info) or "
            "(observation, reward, terminated, truncated, info)."
        )
    observation, reward, is_done, *is_truncated, info = returned
    reward = reward.item() if hasattr(reward, "item") and getattr(reward, "size", 1) == 1 else reward  # of numpy
    if reward is not None and not isinstance(reward, Real):
        raise TypeError(f"step() returned the reward {cut_value(reward)}, and has to return a number or None.")
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"step() returned the reward {reward}, and has to return a finite number or None.")
    status: Status | None = "finished" if is_done else "truncated" if any(is_truncated) else None
    return Step(observation, None if reward is None else float(reward), status, read_metrics(info, "step"))


def read_messages(observation: object, method: str) -> list[Message]:
    """Convert an observation (a text, a message, a list of messages) to messages; raises a TypeError otherwise."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if (
        isinstance(messages, list)
        and messages
        and all(map(_is_message, messages))
        and messages[-1]["role"] != "assistant"
    ):
        return [dict(message) for message in messages]
    raise TypeError(
        f"{method}() returned the observation {cut_value(observation)}, and has to return a text, or messages of texts "
        "such as {'role': 'user', 'content': 'Go on.'}, the last one not the assistant's."
    )


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        return False
    return all(isinstance(text, str) for item in message.items() for text in item)


def read_metrics(info: object, method: str) -> dict[str, float]:
    """Return the numeric entries of an ``info``; raises a TypeError if it is neither a mapping nor None."""
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{method}() returned the info {cut_value(info)}, and has to return a dict or None.")
    return {str(name): float(value) for name, value in (info or {}).items() if isinstance(value, Real)}
