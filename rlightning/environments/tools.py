"""An environment that gives the policy Python functions to call."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.error import HTTPError, URLError

from rlightning.dotted_path import import_object, name_object
from rlightning.environments.environment import Environment, LimitReachedError, Policy
from rlightning.environments.messages import AssistantMessage, Message, ToolCall
from rlightning.environments.python_sandbox import SandboxError
from rlightning.environments.step_object import SNAPSHOT_METHODS, Closing, StepObject, call_function, read_state
from rlightning.environments.tool_schema import convert_numbers, describe_tool, find_mistakes
from rlightning.errors import ConfigError, cause_chain, check_list, check_rules, did_you_mean
from rlightning.foreign_text import cut, cut_line, describe_error
from rlightning.python_values import JsonObject
from rlightning.types.trajectory import Outcome, Prompt, Status

log = logging.getLogger(__name__)

BROKEN = (ConnectionError, socket.gaierror, URLError, MemoryError, SandboxError)
"""Exceptions of tools that are not the policy's fault: the trajectory fails, and counts as not sampled."""
BROKEN_NAMES = (
    *("ConnectError", "ConnectionError", "NetworkError", "RemoteProtocolError", "ProxyError", "ClientPayloadError"),
    *("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout", "IncompleteRead"),
)
"""Suffixes of the names of such exceptions in HTTP libraries: httpx, requests, aiohttp, http.client and others."""
BROKEN_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Operating system errors of a host that has no space, file descriptors or memory left, or a failing disk."""
DEFECTS = (ImportError, NameError, AttributeError)
"""Exceptions that hint at a defect of the tool. The policy reads them like all others; a warning names the tool."""
STATE = ("objects", "observations", "counts")
"""Keys of a trajectory's state in a checkpoint."""


@dataclass
class Tool:
    """A function that the policy may call, or a method of the class ``owner``, and its schema."""

    schema: Message
    function: Callable[..., Any] | None = None
    owner: type | None = None


@dataclass
class Counts:
    """Numbers of turns, tool calls and failed calls of a trajectory; malformed calls count as calls and failures."""

    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics of the trajectory."""
        return {name: float(value) for name, value in vars(self).items()}


@dataclass
class _Attempt:
    """The state of one trajectory that its tool calls use: one object of each tool class, and counts."""

    objects: dict[type, StepObject] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)


class Tools(Environment):
    """Lets the policy call Python functions until it writes a turn without calls. The environment gives no reward:
    reward functions score the trajectory.

    A tool is a function with type hints and a docstring, async or not; a function that is not async runs in a thread.
    Or it is a class whose public methods are tools: each trajectory makes its own object, runs methods that are not
    async in one thread, and calls its method ``close`` at the end, if there is one. A class with a parameter ``prompt``
    gets the trajectory's prompt. The methods ``snapshot(self)`` and ``restore(self, state)`` are not tools: they save
    an object in a checkpoint, and restore it.

    The calls of a turn run concurrently. A call that is malformed, names no tool, has wrong arguments, raises an
    exception or exceeds the timeout gets an error message as its result.

    Args:
        tools: functions and classes, or their dotted paths.
        max_turns: maximum turns of the policy, after which a trajectory is truncated.
        max_failures: maximum failed calls; a trajectory with more is truncated.
        tool_timeout: maximum seconds of a call.
        max_result_characters: maximum length of a call's result; the middle of a longer one is left out.
        broken_by: exception classes, or their dotted paths, after which the trajectory counts as failed when a tool
            raises them, as after lost connections, lack of memory and failures of the sandbox;
            ``builtins.TimeoutError`` includes ``tool_timeout``.
    """

    has_tools = True

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]],
        *,
        max_turns: int = 8,
        max_failures: int = 8,
        tool_timeout: float = 60.0,
        max_result_characters: int = 8000,
        broken_by: Sequence[str | type[Exception]] = (),
    ) -> None:
        rules = {
            f"Tools: max_turns={max_turns} must be at least 1": max_turns >= 1,
            f"Tools: max_failures={max_failures} must be at least 0": max_failures >= 0,
            f"Tools: tool_timeout={tool_timeout} must be above 0 seconds": tool_timeout > 0,
            f"Tools: max_result_characters={max_result_characters} must be at least 1": max_result_characters >= 1,
        }
        check_rules(rules)
        for name, given in (("tools", tools), ("broken_by", broken_by)):
            check_list(f"Tools: {name}", given)
        check_rules({"Tools: tools=[] must name at least one function or class": bool(tools)})
        self.tools, self.max_turns, self.max_failures = list(tools), max_turns, max_failures
        self.tool_timeout, self.max_result_characters = tool_timeout, max_result_characters
        self.broken_by = list(broken_by)
        self._closing = Closing()
        self._defective: set[str] = set()

    @cached_property
    def _broken(self) -> tuple[type[Exception], ...]:
        found = []
        for given in self.broken_by:
            what = f"Tools: broken_by={given}"
            kind = import_object(given, what)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise ConfigError(f"{what} is not an exception. Name a class, such as builtins.TimeoutError.")
            found.append(kind)
        return tuple(found)

    @cached_property
    def _has_snapshots(self) -> bool:
        owners = [tool.owner for tool in self._tools.values() if tool.owner is not None]
        return all(is_restorable(owner) for owner in owners)

    def _is_broken(self, error: Exception) -> bool:
        """Return whether an error of a tool, or one of its causes, is an infrastructure failure."""
        for one in cause_chain(error, with_context=True):
            names = [kind.__name__ for kind in type(one).__mro__]
            if isinstance(one, self._broken):
                return True
            status = find_status(one)
            if status is not None and status >= 500:
                return True
            if isinstance(one, HTTPError):  # the server's answer
                continue
            if isinstance(one, BROKEN) or any(name.endswith(BROKEN_NAMES) for name in names):
                return True
            if isinstance(one, OSError) and one.errno in BROKEN_ERRNO:
                return True
        return False

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        found: dict[str, Tool] = {}
        for given in self.tools:
            what = f"Tools: tools={name_object(given)}"
            for tool in find_tools(import_object(given, what), what):
                name = tool.schema["function"]["name"]
                if name in found:
                    raise ConfigError(f"{what}: there is another tool of the name '{name}'. Rename one of the two.")
                found[name] = tool
        return found

    async def check(self) -> None:
        """Raise a ConfigError if a tool cannot be found, or its signature gives no schema."""
        _ = self._tools, self._broken

    async def close(self) -> None:
        """Wait, for a limited time, for tool objects of finished trajectories that are still closing."""
        await self._closing.wait()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory, with its own objects of the tools that are classes."""
        attempt, saved = _Attempt(), await policy.resume() if self._has_snapshots else None
        owners = dict.fromkeys(tool.owner for tool in self._tools.values() if tool.owner is not None)
        try:
            for owner in owners:
                attempt.objects[owner] = StepObject()
                takes_prompt = "prompt" in inspect.signature(owner).parameters
                await attempt.objects[owner].make(owner, {"prompt": prompt} if takes_prompt else {})
            observations: list[Message] = []
            if saved is not None:
                state = read_state(saved, *STATE)
                observations, attempt.counts = state["observations"], Counts(**state["counts"])
                snapshots = read_state(state["objects"], *(owner.__qualname__ for owner in attempt.objects))
                for owner, made in attempt.objects.items():
                    await made.restore(snapshots[owner.__qualname__])
            status = await self._talk(policy, attempt, observations)
        finally:
            await self._closing.close(*attempt.objects.values())
        return Outcome(status=status, metrics=attempt.counts.metrics())

    async def _talk(self, policy: Policy, attempt: _Attempt, observations: list[Message]) -> Status:
        counts = attempt.counts
        while True:
            schemas = None if counts.turns else [tool.schema for tool in self._tools.values()]
            try:
                reply = await policy.chat(*observations, tools=schemas)
            except LimitReachedError as error:
                if not counts.turns:  # nothing was sampled
                    raise ValueError(f"the policy cannot begin: {error}") from None
                return "truncated"
            counts.turns += 1
            message = reply.message
            if not message.tool_calls and not message.errors:
                return "finished"
            counts.tool_calls += len(message.tool_calls) + len(message.errors)
            if counts.turns == self.max_turns:
                return "truncated"
            observations = await self._answer(message, attempt)
            if counts.tool_failures > self.max_failures:
                return "truncated"
            await self._report(policy, attempt, observations)

    async def _report(self, policy: Policy, attempt: _Attempt, observations: list[Message]) -> None:
        state = None
        if self._has_snapshots:
            with suppress(asyncio.TimeoutError):  # a call that timed out is still running: keep the earlier state
                snapshots = {
                    owner.__qualname__: await asyncio.wait_for(made.call("snapshot"), self.tool_timeout)
                    for owner, made in attempt.objects.items()
                }
                state = dict(zip(STATE, (snapshots, observations, vars(attempt.counts)), strict=True))
        await policy.report(Outcome(status="timeout", metrics=attempt.counts.metrics()), state)

    async def _answer(self, message: AssistantMessage, attempt: _Attempt) -> list[Message]:
        """Execute the tool calls of a turn, and return their results as tool messages."""
        answers = await gather([self._call(call, attempt) for call in message.tool_calls])
        observations = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(message.tool_calls, answers, strict=True)
        ]
        attempt.counts.tool_failures += len(message.errors)
        turn, known = attempt.counts.turns, next(iter(self._tools))
        places = message.error_places or [len(observations)] * len(message.errors)
        failed = enumerate(zip(places, message.errors, strict=True))
        for number, (place, error) in reversed(list(failed)):  # an insertion shifts later indices
            call_id = f"fail{turn:03d}{number:02d}"
            content = f"Error: {error}"
            observations.insert(place, {"role": "tool", "tool_call_id": call_id, "name": known, "content": content})
        return observations

    async def _call(self, call: ToolCall, attempt: _Attempt) -> str:
        """Execute one call; return its result, or an error message for the policy."""
        tool = self._tools.get(call.name)
        if tool is None:
            return self._fail(attempt, f"There is no tool {call.name}. {did_you_mean(call.name, self._tools)}")
        arguments = json.loads(call.arguments)
        parameters = tool.schema["function"]["parameters"]
        mistake = find_mistakes(parameters, arguments)
        if mistake is not None:
            return self._fail(attempt, mistake)
        arguments = convert_numbers(parameters, arguments)
        try:
            return await asyncio.wait_for(self._run(tool, call.name, arguments, attempt), self.tool_timeout)
        except asyncio.TimeoutError:  # in Python 3.10 it is not the built-in TimeoutError
            reason = f"{call.name} took more than {self.tool_timeout:g} s."
            if self._is_broken(TimeoutError()):
                raise RuntimeError(reason) from None
            return self._fail(attempt, reason)

    async def _run(self, tool: Tool, name: str, arguments: JsonObject, attempt: _Attempt) -> str:
        try:
            if tool.owner is not None:
                result = await attempt.objects[tool.owner].call(name, **arguments)
            else:
                assert tool.function is not None
                result = await call_function(tool.function, arguments)
        except Exception as error:
            if self._is_broken(error):
                raise
            if isinstance(error, DEFECTS) and name not in self._defective:
                self._defective.add(name)
                log.warning("The tool %s raised %s, which the policy reads.", name, cut_line(describe_error(error)))
            return self._fail(attempt, describe_error(error))  # the policy reads the error
        return cut(write_result(result), self.max_result_characters)

    def _fail(self, attempt: _Attempt, reason: str) -> str:
        attempt.counts.tool_failures += 1
        return cut(f"Error: {reason}", self.max_result_characters)


def find_status(error: BaseException) -> int | None:
    """Return the HTTP status of a server's answer that an HTTP library raised as an exception; None if it is none."""
    places = (error, getattr(error, "response", None))
    values = (getattr(place, name, None) for place in places for name in ("code", "status", "status_code"))
    return next((value for value in values if type(value) is int and 100 <= value < 600), None)


def find_tools(given: object, what: str) -> Iterator[Tool]:
    """Yield a Tool for a function, or for each public method of a class; raises a ConfigError if that is impossible."""
    if not isinstance(given, type):
        if not inspect.isroutine(given):
            raise ConfigError(f"{what} is a {type(given).__name__}, and no function or class. Name a function.")
        yield Tool(describe_tool(given, what), function=given)
        return
    parameters = inspect.signature(given).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [name for name in required if name != "prompt"]
    if needed:
        raise ConfigError(f"{what}: the class needs the argument '{needed[0]}'. It may take 'prompt', and no other.")
    members = dict(inspect.getmembers(given, inspect.isroutine))
    names = dict.fromkeys(name for kind in reversed(given.__mro__[:-1]) for name in vars(kind))
    own = ("close", *SNAPSHOT_METHODS) if is_restorable(given) else ("close",)
    methods = [members[name] for name in names if name in members and not name.startswith("_") and name not in own]
    if not methods:
        raise ConfigError(f"{what}: the class has no public methods, which would be its tools. Add one.")
    for method in methods:
        yield Tool(describe_tool(method, what), owner=given)


def is_restorable(kind: type) -> bool:
    """Return whether a class has ``snapshot`` and ``restore`` for checkpoints, which are then not tools."""
    members = dict(inspect.getmembers(kind, inspect.isroutine))
    methods = [members[name] for name in SNAPSHOT_METHODS if name in members]
    return [list(inspect.signature(method).parameters)[1:] for method in methods] == [[], ["state"]]


def write_result(result: object) -> str:
    """Convert the result of a tool to text for the policy: a string is unchanged, any other value becomes JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # for example mappings with keys that are not strings
        return str(result)


async def gather(calls: Sequence[Awaitable[str]]) -> list[str]:
    """Await calls concurrently, and return their results; if one raises an exception, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
