"""An environment from an agent that knows nothing of being trained: a function, or a program, with a client's API."""

import asyncio
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from numbers import Real
from typing import Any
from urllib.parse import urlsplit

from rlightning import intervals
from rlightning.environments.agent_command import AgentCommand, RewardSource
from rlightning.environments.dotted_path import import_object
from rlightning.environments.endpoint import Endpoint, Session
from rlightning.environments.environment import Environment, Policy, PolicyGroup
from rlightning.environments.step_object import SerialThread, await_user_code
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value
from rlightning.types.trajectory import Outcome, Prompt

GIVEN = ("client", "base_url", "api_key", "model", "prompt", "messages")
"""Parameters of an agent that this environment gives it."""
RULE = "Define async def agent(client, prompt), or agent(base_url, api_key, prompt)."


class AgentProgram(Environment):
    """Runs an agent for each trajectory, and records what it samples from the policy through an API.

    The agent is a function, async or not, whose parameters say what it gets: ``client``, an ``openai.AsyncOpenAI`` (or
    ``openai.OpenAI``, if the function is not async), or ``base_url`` and ``api_key`` for any other client; ``model``,
    its name for requests; ``prompt``, a :class:`~rlightning.types.Prompt`, and ``messages``, the prompt as a chat. It
    returns its reward, None where reward functions alone decide, or an :class:`~rlightning.types.Outcome`. Or it is a
    command: a program with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` (and Anthropic's) in its environment.

    An agent that raises, and a program that fails, counts as not sampled, as does any failure of the policy's sampler,
    whatever the agent makes of it.

    Args:
        agent: the function, or its dotted path.
        arguments: further ones of it.
        command: program and arguments, in place of a function. ``{name}`` stands for the prompt's column of that name.
        folder: whose files are copied into the folder that the program of each trajectory runs in.
        variables: of the program's environment, beside the trainer's own.
        reward: what the program's reward is: the number, or JSON with ``reward``, in the last line that it prints;
            1 for exit code 0 and 0 for exit code 10; or none, where reward functions alone decide.
        timeout: seconds that an agent may take, after which its trajectory counts as not sampled; None:
            ``rollout.trajectory_timeout`` alone, an hour unless it is set.
        max_trajectories: at once; others wait, and their time does not count yet.
        endpoint: arguments of :class:`~rlightning.environments.endpoint.Endpoint`, such as ``{ignored: [top_p]}``.
    """

    runs_in_workers = False

    def __init__(
        self,
        agent: str | Callable[..., Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        command: Sequence[str] | None = None,
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        reward: RewardSource = "last_line",
        timeout: float | None = None,
        max_trajectories: int = 512,
        endpoint: Mapping[str, Any] | None = None,
    ) -> None:
        check_rules(
            {
                "AgentProgram needs one of agent (a function) and command (a program)": bool(agent) != bool(command),
                f"AgentProgram: timeout={timeout} must be above 0 seconds": timeout is None or timeout > 0,
                f"AgentProgram: max_trajectories={max_trajectories} must be at least 1": max_trajectories >= 1,
            }
        )
        self.agent, self.arguments, self.timeout = agent, dict(arguments or {}), timeout
        self.command = AgentCommand(command, folder, variables or {}, reward) if command else None
        try:
            self.endpoint = Endpoint(**(endpoint or {}))
        except TypeError as error:
            raise ConfigError(f"AgentProgram: endpoint={cut_value(endpoint)}: {cut_line(error)}.") from error
        self.max_trajectories = max_trajectories
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def _name(self) -> str:
        path = self.agent
        return f"AgentProgram: agent={path if isinstance(path, str) else getattr(path, '__name__', path)}"

    @cached_property
    def _function(self) -> Callable[..., Any]:
        found = import_object(self.agent, self._name) if isinstance(self.agent, str) else self.agent
        if not callable(found):
            raise ConfigError(f"{self._name} is no function. {RULE}")
        return found

    async def check(self) -> None:
        """Raise a ConfigError if the agent cannot be found or called; start to listen."""
        if self.command is not None:
            self.command.check()
        else:
            named = self._select_arguments(dict.fromkeys(GIVEN))
            if not {"client", "base_url"} & named.keys():
                raise ConfigError(f"{self._name} has neither a parameter 'client' nor 'base_url'. {RULE}")
            try:
                inspect.signature(self._function).bind(**named)
            except TypeError as error:
                raise ConfigError(
                    f"{self._name}: {cut_line(error)}. {RULE} Further ones come from arguments."
                ) from error
            if "client" in named:
                _import_openai()
        await self.endpoint.start()

    async def close(self) -> None:
        """End the endpoint."""
        await self.endpoint.close()

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Make the trajectories of one prompt, each as soon as it has a place."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self.max_trajectories)
        return await group.run_each(partial(self.run, prompt), self._places[1])

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory.

        Raises:
            LimitReachedError: the agent failed where a sequence had no more room.
            RunError: no trajectory can go on.
        """
        async with self.endpoint.open(policy) as session:
            try:
                async with asyncio.timeout(self.timeout) as deadline:
                    outcome = await self._run_agent(prompt, session)
            except TimeoutError:
                if not deadline.expired():
                    raise
                outcome = Outcome(status="timeout", error=f"The agent took more than {self.timeout:g} s.")
        recorder = session.policy.recorder
        if outcome.status != "timeout" and not recorder.branches:
            raise ValueError("the agent ended without a turn of the policy's")
        counts = {"turns": recorder.num_sampled, "branches": len(recorder.branches)}
        outcome.metrics = {
            **{name: float(count) for name, count in counts.items()},
            "abandoned_requests": float(session.num_abandoned),
            **outcome.metrics,
        }
        return outcome

    async def _run_agent(self, prompt: Prompt, session: Session) -> Outcome:
        """Return what the agent makes; a failure of the session ends the agent."""
        running = asyncio.ensure_future(await_user_code(self._call(prompt, session)))
        try:
            waiting: list[asyncio.Future[Any]] = [running, session.failure]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                raise session.failure.result()
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=intervals.CANCEL_GRACE)

    async def _call(self, prompt: Prompt, session: Session) -> Outcome:
        access = {"base_url": f"{self.endpoint.url}/v1", "api_key": session.key, "model": session.model}
        if self.command is not None:
            messages = None
            with suppress(ConfigError):  # of a prompt that is no chat
                messages = session.policy.chat_format.prompt_messages(prompt)
            return await self.command.run(prompt, messages, _to_variables(self.endpoint.url, session))
        given: dict[str, Any] = {**access, "prompt": prompt}
        if "messages" in self._parameters:
            given["messages"] = session.policy.chat_format.prompt_messages(prompt)
        named = self._select_arguments(given)
        is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  # of an object, whether it is async
        )
        if "client" not in self._parameters:
            return read_outcome(await self._call_function(named, is_async))
        openai = _import_openai()
        # Proxies of the environment's would not reach this process.
        if is_async:
            http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=None)
            async with openai.AsyncOpenAI(
                base_url=access["base_url"], api_key=session.key, http_client=http, timeout=None
            ) as client:
                return read_outcome(await self._call_function({**named, "client": client}, is_async))
        http = openai.DefaultHttpxClient(trust_env=False, verify=False, timeout=None)
        with openai.OpenAI(base_url=access["base_url"], api_key=session.key, http_client=http, timeout=None) as client:
            return read_outcome(await self._call_function({**named, "client": client}, is_async))

    async def _call_function(self, named: dict[str, Any], is_async: bool) -> Any:
        if is_async:
            return await self._function(**named)
        thread = SerialThread()
        try:
            returned = await thread.run(lambda: self._function(**named))
            return await returned if isinstance(returned, Awaitable) else returned
        finally:
            thread.end()

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._function).parameters

    def _select_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._parameters.values())
        own = {name: value for name, value in given.items() if name in self._parameters or takes_all}
        return {**own, **self.arguments}


def read_outcome(returned: Any) -> Outcome:
    """Return what an agent returned as an outcome.

    Raises:
        TypeError: it is neither a number, None nor an outcome.
        ValueError: the number is not finite.
    """
    if isinstance(returned, Outcome):
        return returned
    if returned is None:
        return Outcome()
    if not isinstance(returned, Real):
        raise TypeError(f"the agent returned {cut_value(returned)}, and has to return a number, None or an Outcome")
    if not math.isfinite(returned):
        raise ValueError(f"the agent returned the reward {returned}, and has to return a finite number")
    return Outcome(reward=float(returned))


def _to_variables(url: str, session: Session) -> dict[str, str]:
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), urlsplit(url).hostname)))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_MODEL": session.model,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            "AgentProgram: an agent with a parameter 'client' needs openai, which is not installed: pip install "
            "'rlightning[agents]'."
        ) from error
    return openai
