"""An environment that runs a task set of the package verifiers in a separate interpreter."""

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple

from rlightning.environments.endpoint import Endpoint
from rlightning.environments.endpoint.server import MAX_SESSIONS
from rlightning.environments.endpoint.session import name_model
from rlightning.environments.endpoint.shared_key import SharedKey
from rlightning.environments.environment import Environment, Places, Policy, TrajectoryLostError
from rlightning.environments.policy import RecordedPolicy, as_recorded
from rlightning.environments.verifiers.episode import Episode, EpisodeAssembly, Trace
from rlightning.environments.verifiers.server import (
    KEY_VARIABLE,
    Announcement,
    EnvironmentServer,
    ServerEndedError,
    ServersClosedError,
)
from rlightning.environments.worker_environment import check_interpreter
from rlightning.errors import ConfigError, EnvironmentFailedError, check_rules, did_you_mean
from rlightning.foreign_text import cut, cut_line
from rlightning.processes.liveness import RestartPolicy
from rlightning.python_values import JsonObject
from rlightning.types.trajectory import AgentTrace, Outcome, Prompt

log = logging.getLogger(__name__)

OLDEST_PYTHON = (3, 11)
"""Oldest Python version that verifiers supports."""
VERSION = "0.4"
"""Version of verifiers whose protocol this module implements."""
MAX_DEATHS = 20
"""Maximum number of servers that end in a row, without a completed episode, before the run fails."""
SESSIONS_PER_EPISODE = 64
"""Sessions of each concurrent episode for which there is room by default: each of its agents has one."""
COLUMN = "task"
"""Column of a prompt set with the number of the row's task, or the task's data."""


class _Servers(NamedTuple):
    """The server processes of one event loop."""

    loop: asyncio.AbstractEventLoop
    servers: list[EnvironmentServer]
    key: SharedKey


class Verifiers(Environment):
    """Runs a task set of the package verifiers 0.4, unchanged, in server processes of a separate interpreter.

    Each episode is a trajectory. Sampled tokens are recorded in the trainer's process; rewards, errors and metrics come
    from verifiers. Agents that are not trainable are sampled from the policy too, but not trained on. An episode with
    an error or a timeout counts as not sampled, even if verifiers reports it as ok. A resumed run repeats the episodes
    that were running at the checkpoint.

    A prompt's index in its data set chooses the task, or its column ``task``: a number, or the task's data.

    Args:
        taskset: id of the task set, or its configuration with ``id``.
        python: path of the interpreter in which verifiers is installed.
        environment: id of verifiers' environment, such as ``user-sim``; None for the task set's own.
        roles: configuration of the environment's agents by their names, such as ``{agent: {harness: {id: bash},
            max_turns: 8}}``. They run as processes of this host by default; see their ``runtime``.
        agents: names of the trained agents; None for all trainable ones.
        credit: how several agents are rewarded: "agent" by the rewards of an agent's own traces, compared with those of
            the same agent in the prompt's other episodes; "episode" all by the mean of their rewards.
        renderer: name of the renderer, such as ``qwen3``, or its configuration; None for the one that verifiers finds
            by the model's name (for a folder, one without tools).
        renderer_model_name: model whose tokenizer the renderer uses; None for the policy.
        num_tasks: number of tasks that are used, from the beginning of the task set.
        num_workers: number of processes.
        max_trajectories: maximum number of concurrent episodes of a process; the time for which others wait does not
            count.
        timeout: maximum seconds of an episode, after which it counts as not sampled; None for
            ``rollout.trajectory_timeout`` alone, by default an hour.
        hang_timeout: seconds without an answer after which a process counts as hanging.
        variables: additional environment variables of the processes.
        endpoint: arguments of :class:`~rlightning.environments.endpoint.Endpoint`.
    """

    runs_in_workers = False

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        *,
        python: str,
        environment: str | None = None,
        roles: Mapping[str, Any] | None = None,
        agents: Sequence[str] | None = None,
        credit: Literal["agent", "episode"] = "agent",
        renderer: str | Mapping[str, Any] | None = None,
        renderer_model_name: str | None = None,
        num_tasks: int = 1000,
        num_workers: int = 1,
        max_trajectories: int = 64,
        timeout: float | None = None,
        hang_timeout: float = 60.0,
        variables: Mapping[str, str] | None = None,
        endpoint: Mapping[str, Any] | None = None,
    ) -> None:
        check_rules(
            {
                f"Verifiers: credit={credit} must be agent or episode": credit in ("agent", "episode"),
                f"Verifiers: num_tasks={num_tasks} must be at least 1": num_tasks >= 1,
                f"Verifiers: num_workers={num_workers} must be at least 1": num_workers >= 1,
                f"Verifiers: max_trajectories={max_trajectories} must be at least 1": max_trajectories >= 1,
                f"Verifiers: timeout={timeout} must be above 0 seconds": timeout is None or timeout > 0,
                f"Verifiers: hang_timeout={hang_timeout} must be above 0 seconds": hang_timeout > 0,
            }
        )
        self.config: JsonObject = {"taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset)}
        self.config |= {} if environment is None else {"id": environment}
        self.config |= roles or {}
        self.python, self.agents, self.credit = os.path.expanduser(python), agents, credit
        self.renderer = {"name": renderer} if isinstance(renderer, str) else renderer
        self.renderer_model_name = renderer_model_name
        self.num_tasks, self.num_workers = num_tasks, num_workers
        self.timeout, self.hang_timeout, self.variables = timeout, hang_timeout, dict(variables or {})
        try:
            room = max(MAX_SESSIONS, SESSIONS_PER_EPISODE * num_workers * max_trajectories)
            bounds = {"max_connections": room, "max_sessions": room}
            self.endpoint = Endpoint(**(bounds | dict(endpoint or {})))
        except TypeError as error:
            raise ConfigError(f"Verifiers: endpoint={endpoint}: {cut_line(error)}.") from error
        self.truncates = self.endpoint.truncates
        self._roles = list(roles or {})
        self._tasks: list[JsonObject] = []
        self.places = Places(num_workers * max_trajectories)
        self._servers: _Servers | None = None
        self._deaths = RestartPolicy(MAX_DEATHS)

    async def check(self) -> None:
        """Start a server, and have it list its tasks; raises a ConfigError if the settings cannot be used."""
        try:
            import zmq  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "Verifiers needs pyzmq, which is not installed: pip install 'rlightning[agents]'."
            ) from error
        await asyncio.to_thread(check_verifiers, self.python)
        await self.endpoint.start()
        await self._start(self._get_servers().servers[0])

    async def close(self) -> None:
        """End the servers and the endpoint; later trajectories start new ones."""
        found, self._servers = self._servers, None
        if found is not None:
            await asyncio.gather(*(server.close() for server in found.servers))
        await self.endpoint.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory; raises an EnvironmentFailedError if servers end repeatedly."""
        recorded = as_recorded(policy)
        found = self._get_servers()
        await self.endpoint.start()
        server = min(found.servers, key=lambda one: one.num_assigned)
        server.num_assigned += 1
        try:
            return await self._run_at(server, found.key, prompt, recorded)
        finally:
            server.num_assigned -= 1

    async def _run_at(
        self, server: EnvironmentServer, key: SharedKey, prompt: Prompt, policy: RecordedPolicy
    ) -> Outcome:
        with policy.clock.stopped():
            await self._start(server)
        parts: dict[str, RecordedPolicy] = {}

        async def run_and_read() -> Outcome:
            episode = await self._run_episode(server, key, prompt, policy, parts)
            self._deaths.reset()
            return self._read(episode, policy, parts)

        try:
            return await policy.clock.run(run_and_read(), self.timeout, "The episode")
        except ServersClosedError as error:
            return Outcome(status="aborted", error=str(error))
        except ServerEndedError as error:
            line, *details = map(str, error.args)
            raise TrajectoryLostError(line, cut("\n".join([line, *details]))) from error
        finally:
            if not policy.recorder.branches:  # the rollout failed: record what it sampled for `completions/`
                for part in parts.values():
                    policy.join(part)

    async def _run_episode(
        self,
        server: EnvironmentServer,
        key: SharedKey,
        prompt: Prompt,
        policy: RecordedPolicy,
        parts: dict[str, RecordedPolicy],
    ) -> Episode:
        """Run an episode of a task; store the policy of each trace in ``parts``, by the trace's id."""
        assembly = EpisodeAssembly()
        async with AsyncExitStack() as opened:
            events = await opened.enter_async_context(server.running(self._make_request(prompt, policy)))
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                kind, message = event
                if kind == "reply":
                    return assembly.finish(message)
                name = message["trace"]
                if assembly.apply(message):
                    parts[name] = policy.split()
                    session = await opened.enter_async_context(self.endpoint.open(parts[name]))
                    session.failure.add_done_callback(lambda failure: events.put_nowait(failure.result()))
                    key.add(name, session)
                    opened.callback(key.remove, name)

    def _make_request(self, prompt: Prompt, policy: RecordedPolicy) -> JsonObject:
        name = str(policy.chat_format.tokenizer.name_or_path)
        own = os.path.abspath(name) if os.path.isdir(name) else name
        client: JsonObject = {
            "type": "train",
            "base_url": f"{self.endpoint.url}/v1",
            "api_key_var": KEY_VARIABLE,
            "renderer_model_name": self.renderer_model_name or own,
        }
        if self.renderer is not None:
            client["renderer"] = self.renderer
        # Sampling settings that are left out are the run's.
        return {"task_data": self._find_task(prompt), "client": client, "model": name_model(policy), "sampling": {}}

    def _find_task(self, prompt: Prompt) -> Mapping[str, object]:
        named = prompt.columns.get(COLUMN, prompt.index)
        if isinstance(named, Mapping):
            return named
        if isinstance(named, bool) or not isinstance(named, int):
            raise ConfigError(f"Prompt {prompt.index} has {COLUMN}={named!r}, and has to have a task's number or data.")
        number = len(self._tasks)
        if COLUMN not in prompt.columns:
            return self._tasks[named % number]
        if not 0 <= named < number:
            raise ConfigError(
                f"Prompt {prompt.index} has {COLUMN}={named}, and {number} tasks were listed. Name one from 0 to "
                f"{number - 1}, or raise environment.num_tasks={self.num_tasks}."
            )
        return self._tasks[named]

    def _read(self, episode: Episode, policy: RecordedPolicy, parts: Mapping[str, RecordedPolicy]) -> Outcome:
        """Record an episode's trained traces in ``policy``, and return its outcome.

        Raises a ValueError if verifiers' tokens differ from the recorded ones, or the rewards are invalid.
        """
        if episode.has_timed_out:
            return Outcome(status="timeout", error="A deadline of verifiers' has passed.")
        failure = episode.find_failure()
        if failure is not None:
            raise RuntimeError(f"verifiers' episode failed: {failure}")
        trained: list[tuple[Trace, list[int]]] = []
        for trace in episode.traces:
            part = parts[trace.id]
            turns = trace.match(part.recorder.turns)
            if self._is_trained(trace):
                first = len(policy.recorder.samples)
                policy.join(part, turns)
                trained.append((trace, list(range(first, len(policy.recorder.samples)))))
        if not policy.recorder.branches:
            raise ValueError("the episode ended without a turn of an agent that is trained")
        rewards = [trace.sum_rewards() for trace, _ in trained]
        given = [reward for reward in rewards if reward is not None]
        mean = sum(given) / len(given) if given else None
        is_cut = any(trace.is_cut or parts[trace.id].is_cut for trace, _ in trained)
        return Outcome(
            reward=mean,
            traces=None if mean is None or self.credit == "episode" else _to_agent_traces(trained, rewards, mean),
            status="truncated" if is_cut else "finished",
            metrics=policy.recorder.metrics() | _collect_metrics(episode),
        )

    def _is_trained(self, trace: Trace) -> bool:
        return trace.agent.trainable and (self.agents is None or trace.agent.name in self.agents)

    def _get_servers(self) -> _Servers:
        loop = asyncio.get_running_loop()
        if self._servers is None or self._servers.loop is not loop:
            key = self.endpoint.share_key()
            variables = {**self.variables, KEY_VARIABLE: key.key}
            launch = self.python, self.config, variables, self.hang_timeout
            self._servers = _Servers(loop, [EnvironmentServer(*launch) for _ in range(self.num_workers)], key)
        return self._servers

    async def _start(self, server: EnvironmentServer) -> None:
        """Start a server unless it is running."""
        async with server.starting:
            if server.is_up:
                return
            if server.has_run and not self._deaths.take():
                raise EnvironmentFailedError(
                    f"Verifiers' servers ended {MAX_DEATHS} times in a row, without an episode that came to its end. "
                    "Find out why, or raise environment.hang_timeout.",
                )
            announced = await server.start(0 if self._tasks else self.num_tasks)
            if not self._tasks:
                self._check_announced(announced)
                self._tasks = announced.tasks

    def _check_announced(self, announced: Announcement) -> None:
        for name in (*self._roles, *(self.agents or ())):
            if name not in announced.roles:
                raise ConfigError(
                    f"Verifiers: the environment has no agent '{name}'. {did_you_mean(name, announced.roles)}"
                )
        if not announced.tasks:
            raise ConfigError(f"Verifiers: taskset={self.config['taskset']['id']} has no task.")
        if not announced.has_uv:
            log.warning(
                "Verifiers' own harnesses need the program uv, and there is none: %s -m pip install uv.", self.python
            )


def check_verifiers(python: str) -> None:
    """Raise a ConfigError if an interpreter cannot run verifiers."""
    install = f"'verifiers=={VERSION}.*'"
    version = check_interpreter(python, oldest=OLDEST_PYTHON, needs="verifiers", install=f"{install} uv")
    if not re.match(rf"{re.escape(VERSION)}\b", version):
        raise ConfigError(
            f"environment.python={python} has verifiers {version}, and this speaks with {VERSION}. Install that: "
            f"{python} -m pip install {install}."
        )


def _to_agent_traces(
    trained: Sequence[tuple[Trace, list[int]]], rewards: Sequence[float | None], default: float
) -> list[AgentTrace]:
    """Convert traces to agent traces with turns and rewards; ``default`` is the reward of a trace without one."""
    return [
        AgentTrace(trace.agent.name, default if reward is None else reward, turns)
        for (trace, turns), reward in zip(trained, rewards, strict=True)
    ]


def _collect_metrics(episode: Episode) -> dict[str, float]:
    """Return the metrics and rewards of an episode, prefixed with the agent's name if there are several agents."""
    found: dict[str, float] = {}
    is_single = len(episode.traces) == 1
    for trace in episode.traces:
        head = "" if is_single else f"{trace.agent.name}/"
        found |= {f"{head}{name}": value for name, value in trace.metrics.items() if value is not None}
        found |= {f"{head}{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    return found
