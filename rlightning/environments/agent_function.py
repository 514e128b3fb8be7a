"""An agent that is a function, which calls the policy by a client of an LLM API."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from rlightning.callables import is_async, is_coroutine_function
from rlightning.dotted_path import import_object, name_object
from rlightning.environments.environment import Environment, LimitReachedError, Policy, is_limit
from rlightning.environments.step_object import call_function
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line, cut_value, describe_error
from rlightning.types.trajectory import Outcome, Prompt

if TYPE_CHECKING:
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

    from rlightning.environments.messages import Message
    from rlightning.environments.worker import RemotePolicy

HTTPClient: TypeAlias = "DefaultAsyncHttpxClient | DefaultHttpxClient"
GIVEN = ("client", "base_url", "api_key", "model", "prompt", "messages")
"""Names of an agent's parameters to which the environment passes arguments."""
RULE = "Define async def agent(client, prompt), or agent(base_url, api_key, prompt)."
MAX_IDLE_CLIENTS = 512
"""Maximum number of idle clients that are kept with their connections for later trajectories."""
MAX_IDLE_CONNECTIONS = 2
"""Maximum number of idle connections of a client; agents with parallel requests could exceed the endpoint's limit."""
KEEP_ALIVE_SECONDS = 100.0
"""Seconds that a client keeps an idle connection; fewer than the endpoint, so that no request uses a closed one."""


class Access(NamedTuple):
    """How an agent reaches the policy of its trajectory: the URL of an OpenAI API, a key, and the model's name.

    ``messages`` is the prompt as a chat; None if the agent has no such parameter.
    """

    base_url: str
    api_key: str
    model: str
    messages: list[Message] | None


class AgentFunction(Environment):
    """Environment that calls ``agent``, a function or its dotted path, for each trajectory, with further ``arguments``.

    The function runs in the trainer's process or in a worker; the endpoint is always in the trainer's process.
    """

    def __init__(self, agent: str | Callable[..., object], arguments: Mapping[str, object] | None = None) -> None:
        self.agent, self.arguments = agent, dict(arguments or {})
        self._clients = _IdleClients()

    @property
    def name(self) -> str:
        """The agent's name in error messages."""
        return f"AgentProgram: agent={name_object(self.agent)}"

    @cached_property
    def function(self) -> Callable[..., object]:
        """The user's agent function; raises a ConfigError if its dotted path does not exist."""
        found = import_object(self.agent, self.name)
        if not callable(found):
            raise ConfigError(f"{self.name} is no function. {RULE}")
        return found

    @property
    def wants_messages(self) -> bool:
        """Whether the agent's function has a parameter ``messages``."""
        return "messages" in self._parameters

    async def check(self) -> None:
        """Raise a ConfigError if the agent cannot be found or called."""
        named = self._select_arguments(dict.fromkeys(GIVEN))
        if not {"client", "base_url"} & named.keys():
            raise ConfigError(f"{self.name} has neither a parameter 'client' nor 'base_url'. {RULE}")
        try:
            inspect.signature(self.function).bind(**named)
        except TypeError as error:
            raise ConfigError(f"{self.name}: {cut_line(error)}. {RULE} Further ones come from arguments.") from error
        if "client" in named:
            _import_openai()

    async def close(self) -> None:
        """Close the idle connections of the agents' OpenAI clients, which trajectories reuse."""
        await self._clients.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run the agent for one trajectory in this worker process, and return its outcome.

        Raises:
            LimitReachedError: the agent failed because its sequence has its maximum length.
        """
        trainer = cast("RemotePolicy", policy)
        access = Access(*await trainer.open_session(wants_messages=self.wants_messages))
        try:
            return await self.call(prompt, access)
        except LimitReachedError:
            raise
        except Exception as error:
            if is_limit(error) and await trainer.has_reached_limit():
                raise LimitReachedError(f"The agent ended there: {describe_error(error)}") from error
            raise

    async def call(self, prompt: Prompt, access: Access) -> Outcome:
        """Call the agent's function for one trajectory, and return its result as an :class:`Outcome`."""
        given = {**access._asdict(), "prompt": prompt}
        if not self.wants_messages:
            del given["messages"]
        named = self._select_arguments(given)
        if "client" not in self._parameters:
            return read_outcome(await call_function(self.function, named))
        runs_async = is_async(self.function)
        # A function that calls asyncio.run() has an event loop of its own, in which connections of another do not work.
        is_reused = not runs_async or is_coroutine_function(self.function)
        async with self._clients.borrow(access, is_async=runs_async, is_reused=is_reused) as client:
            return read_outcome(await call_function(self.function, {**named, "client": client}))

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def _select_arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._parameters.values())
        own = {name: value for name, value in given.items() if name in self._parameters or takes_all}
        return {**own, **self.arguments}


class _IdleClients:
    """A pool of idle HTTP clients, which keep their connections open; each serves one trajectory at a time.

    A single client for all trajectories would search all connections at each request.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: dict[bool, list[HTTPClient]] = {True: [], False: []}

    @asynccontextmanager
    async def borrow(self, access: Access, *, is_async: bool, is_reused: bool) -> AsyncIterator[object]:
        """Yield an OpenAI client for one trajectory; its connections are closed if the trajectory raised an error, or
        unless ``is_reused``.
        """
        openai = _import_openai()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._idle = loop, {True: [], False: []}
        idle = self._idle[is_async] if is_reused else []
        http = idle.pop() if idle else _open_http(openai, is_async=is_async)
        kind = openai.AsyncOpenAI if is_async else openai.OpenAI
        try:
            yield kind(base_url=access.base_url, api_key=access.api_key, http_client=http, timeout=None)
        except BaseException:
            await _close_http(http)
            raise
        if http.is_closed:
            return
        if not is_reused:
            with suppress(RuntimeError):  # the loop of its connections has ended
                await _close_http(http)
        elif len(idle) < MAX_IDLE_CLIENTS:
            idle.append(http)
        else:
            await _close_http(http)

    async def close(self) -> None:
        """Close the idle clients of the running event loop."""
        idle, self._idle = self._idle, {True: [], False: []}
        if self._loop is asyncio.get_running_loop():
            for http in [*idle[True], *idle[False]]:
                await _close_http(http)


def _open_http(openai: ModuleType, *, is_async: bool) -> HTTPClient:
    kind = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_keepalive_connections=MAX_IDLE_CONNECTIONS, keepalive_expiry=KEEP_ALIVE_SECONDS
    )
    # Proxies from environment variables would not reach the trainer's process.
    http: HTTPClient = kind(trust_env=False, verify=False, timeout=None, limits=limits)
    return http


async def _close_http(http: HTTPClient) -> None:
    if hasattr(http, "aclose"):
        await http.aclose()
    else:
        http.close()


def read_outcome(returned: object) -> Outcome:
    """Convert an agent's result (a finite number, None or an outcome) to an outcome."""
    if isinstance(returned, Outcome):
        return returned
    if returned is None:
        return Outcome()
    if not isinstance(returned, Real):
        raise TypeError(f"the agent returned {cut_value(returned)}, and has to return a number, None or an Outcome")
    if not math.isfinite(returned):
        raise ValueError(f"the agent returned the reward {returned}, and has to return a finite number")
    return Outcome(reward=float(returned))


def _import_openai() -> ModuleType:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            "AgentProgram: an agent with a parameter 'client' needs openai, which is not installed: pip install "
            "'rlightning[agents]'."
        ) from error
    return openai
