"""An environment made of an agent, a function or a program, that calls the policy by a client of an LLM API."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlightning import intervals
from rlightning.environments.agent_command import AgentCommand, RewardSource
from rlightning.environments.agent_function import MAX_IDLE_CONNECTIONS, Access, AgentFunction
from rlightning.environments.agent_workers import AgentWorkers, start_workers
from rlightning.environments.endpoint import Endpoint, Session
from rlightning.environments.endpoint.server import MAX_CONNECTIONS, MAX_REQUESTS, MAX_SESSIONS
from rlightning.environments.environment import Environment, Places, Policy
from rlightning.environments.policy import as_recorded
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value
from rlightning.types.trajectory import Outcome, Prompt

UNFINISHED = ("timeout", "failed", "aborted")
"""Statuses of trajectories that may have no turns."""


class AgentProgram(Environment):
    """Runs an agent for each trajectory, and records what the agent samples from the policy through an API.

    The agent is a function, async or not, which gets the arguments that its parameters name: ``client``, an
    ``openai.AsyncOpenAI`` (``openai.OpenAI`` if the function is not async); ``base_url`` and ``api_key`` for any other
    client; ``model``, the policy's name in requests; ``prompt``, a :class:`~rlightning.types.Prompt`; ``messages``, the
    prompt as a chat. It returns its reward, None if only reward functions score it, or an
    :class:`~rlightning.types.Outcome`. Or the agent is a command: a program with ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY`` (and Anthropic's) in its environment.

    A function given by its dotted path runs in worker processes if there are enough cores, so that its client takes no
    time of the trainer's event loop. Other agents, and prompts that cannot be sent to workers, run in the trainer's
    process; this is an error if ``num_workers`` or ``workers`` is set.

    A trajectory counts as not sampled if its agent raises an exception, its program fails, or the sampler fails, even
    if the agent catches the sampler's error. A resumed run repeats the trajectories that were running at the
    checkpoint.

    Args:
        agent: the function, or its dotted path.
        arguments: additional arguments of the function.
        command: program and arguments, in place of a function. ``{name}`` stands for the prompt's column of that name.
        folder: files copied into the working folder of each trajectory's program.
        variables: additional environment variables of the program.
        reward: source of the program's reward: "last_line", a number or JSON with ``reward`` in the last printed line;
            "exit_code", 1 for exit code 0 and 0 for exit code 10; or "none" if only reward functions score it.
        timeout: maximum seconds of an agent, after which its trajectory counts as not sampled; None:
            ``rollout.trajectory_timeout`` alone, by default an hour.
        max_trajectories: maximum number of concurrent trajectories; the time of waiting ones does not count.
        num_workers: number of worker processes for functions; 0 for the trainer's process; None for one less than the
            number of cores, at most eight, and 0 with fewer than four cores.
        workers: additional arguments of the workers' :class:`~rlightning.environments.WorkerEnvironment`, such as
            ``{python: my-venv/bin/python}``. ``hang_timeout`` is 600 seconds.
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
        num_workers: int | None = None,
        workers: Mapping[str, Any] | None = None,
        endpoint: Mapping[str, Any] | None = None,
    ) -> None:
        check_rules(
            {
                "AgentProgram needs one of agent (a function) and command (a program)": bool(agent) != bool(command),
                f"AgentProgram: timeout={timeout} must be above 0 seconds": timeout is None or timeout > 0,
                f"AgentProgram: max_trajectories={max_trajectories} must be at least 1": max_trajectories >= 1,
                f"AgentProgram: num_workers={num_workers} must be at least 0": num_workers is None or num_workers >= 0,
                "AgentProgram: num_workers and workers are of an agent, and a command is a process of its own": (
                    agent is not None or not (num_workers or workers)
                ),
            }
        )
        self.agent, self.arguments, self.timeout = agent, dict(arguments or {}), timeout
        self._function = AgentFunction(agent or "", arguments)
        self._workers: AgentWorkers | None = None
        if agent is not None:
            self._workers = start_workers(self._function, num_workers, max_trajectories, workers or {})
        self.command = AgentCommand(command, folder, variables or {}, reward) if command else None
        try:
            bounds = {  # a trajectory fails beyond max_connections: by default all can have all of their requests
                "max_connections": max(MAX_CONNECTIONS, MAX_REQUESTS * max_trajectories),
                "max_sessions": max(MAX_SESSIONS, max_trajectories),
            }
            self.endpoint = Endpoint(**(bounds | dict(endpoint or {})))
        except TypeError as error:
            raise ConfigError(f"AgentProgram: endpoint={cut_value(endpoint)}: {cut_line(error)}.") from error
        self.truncates = self.endpoint.truncates
        num_kept, num_idle = MAX_IDLE_CONNECTIONS * max_trajectories, self.endpoint.max_idle_connections
        kept = f"fewer than the {num_idle} idle ones that endpoint.max_connections={self.endpoint.max_connections}"
        rule = f"the {num_kept} connections that max_trajectories={max_trajectories} may keep must be {kept} allows"
        sessions = f"endpoint.max_sessions={self.endpoint.max_sessions} must be at least max_trajectories"
        check_rules(
            {
                f"AgentProgram: {rule}": agent is None or num_kept < num_idle,
                f"AgentProgram: {sessions}={max_trajectories}": max_trajectories <= self.endpoint.max_sessions,
            }
        )
        self.places = Places(max_trajectories)

    async def check(self) -> None:
        """Raise a ConfigError if the agent cannot be found or called; otherwise start the endpoint."""
        if self.command is not None:
            self.command.check()
        else:
            await (self._workers or self._function).check()
        await self.endpoint.start()

    async def close(self) -> None:
        """End the agent's worker processes and the endpoint."""
        if self._workers is not None:
            await self._workers.close()
        await self._function.close()
        await self.endpoint.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run the agent for one trajectory and return its outcome.

        Raises:
            LimitReachedError: the agent failed because a sequence has its maximum length.
        """
        async with self.endpoint.open(as_recorded(policy)) as session:
            outcome = await session.policy.clock.run(self._run_agent(prompt, session), self.timeout, "The agent")
        recorder = session.policy.recorder
        if outcome.status not in UNFINISHED and not recorder.branches:
            raise ValueError("the agent ended without a turn of the policy's")
        counts = recorder.metrics() | {
            "abandoned_requests": float(session.num_abandoned),
            "refused_requests": float(session.num_refused),
        }
        outcome.metrics = counts | outcome.metrics
        return outcome

    async def _run_agent(self, prompt: Prompt, session: Session) -> Outcome:
        """Run the agent, and return its outcome; an error in the endpoint's session cancels the agent."""
        running = asyncio.ensure_future(self._call(prompt, session))
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
        if self.command is not None:
            messages = None
            with suppress(ConfigError):  # the prompt is not a chat
                messages = session.policy.chat_format.prompt_messages(prompt)
            return await self.command.run(prompt, messages, _to_variables(self.endpoint.url, session))
        if self._workers is not None and self._workers.takes(prompt):
            return await self._workers.call(prompt, session, partial(self._access, prompt, session))
        access = self._access(prompt, session, wants_messages=self._function.wants_messages)
        return await self._function.call(prompt, access)

    def _access(self, prompt: Prompt, session: Session, *, wants_messages: bool) -> Access:
        messages = session.policy.chat_format.prompt_messages(prompt) if wants_messages else None
        return Access(f"{self.endpoint.url}/v1", session.key, session.model, messages)


def _to_variables(url: str, session: Session) -> dict[str, str]:
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), urlsplit(url).hostname)))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_MODEL": session.model,
        # The OpenAI Agents SDK would send its traces, and the session's key with them, to OpenAI.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }
