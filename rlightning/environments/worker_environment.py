"""An environment that runs in worker processes, perhaps in another interpreter; the policy stays in the trainer."""

import asyncio
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from rlightning import intervals
from rlightning.environments.clock import Clock
from rlightning.environments.environment import Environment, Places, Policy, TrajectoryLostError
from rlightning.environments.messages import Fields, Message
from rlightning.environments.outcomes import outcome_from_plain
from rlightning.environments.policy import RecordedPolicy, failed_outcome
from rlightning.environments.worker import reraise_remote
from rlightning.errors import ConfigError, EnvironmentFailedError, RunError, check_rules
from rlightning.foreign_text import cut, cut_line
from rlightning.processes.managed_process import python_command
from rlightning.rewards.sources import INSTALLED
from rlightning.rpc import ConnectionLostError, ProcessStartError, RemoteError
from rlightning.rpc.connection import encode
from rlightning.rpc.peer import Method
from rlightning.rpc.worker_limits import WorkerLimits
from rlightning.rpc.worker_pool import WorkerHungError, WorkerLostError, WorkerPool
from rlightning.types.trajectory import Outcome, Prompt, Sample

Made = TypeVar("Made")

OLDEST_PYTHON = (3, 10)
"""Oldest Python version that a worker supports."""
PROBE = """\
import sys; print('%d.%d' % sys.version_info[:2])
import {0}; print(getattr({0}, '__version__', 'of an unknown version'))"""
PROBE_TIMEOUT = 60.0
"""Maximum seconds for an interpreter to start, even from a slow disk."""
UNSENDABLE = (TypeError, ValueError, OverflowError)
"""Errors for data that cannot be sent to a worker."""


class WorkerEnvironment(Environment):
    """Runs another environment in worker processes, which may crash, hang, and have other packages installed.

    Each process runs many trajectories on one event loop. A process that ends or hangs is replaced, and its
    trajectories are repeated within a budget (``rollout.max_requeues``), or count as not sampled. Processes start with
    the first trajectories, or with :meth:`check`.

    Args:
        environment: dotted path of the environment's class, which only the workers import.
        arguments: arguments of the class, in plain types.
        num_workers: number of processes.
        max_trajectories: maximum number of concurrent trajectories of a process; the time for which others wait does
            not count.
        python: path of the workers' interpreter, such as that of another virtual environment: Python 3.10 or later with
            msgpack; None for this process's.
        hang_timeout: maximum seconds for which code may block a process's event loop.
        max_memory_mb: maximum resident memory of a process, which is killed above it; None for no limit.
        max_output_mb: maximum output of a process in a minute, which is killed above it; None for no limit.

    Attributes:
        name: the environment's name in errors.
        key: the environment's configuration key and value, in errors.
        prefix: prefix of the configuration keys of the environment's settings.
    """

    prefix = "environment"

    def __init__(
        self,
        environment: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        max_trajectories: int = 128,
        python: str | None = None,
        hang_timeout: float = 60.0,
        max_memory_mb: float | None = None,
        max_output_mb: float | None = 64.0,
    ) -> None:
        rules = {
            f"environment.num_workers={num_workers} must be at least 1": num_workers >= 1,
            f"environment.max_trajectories={max_trajectories} must be at least 1": max_trajectories >= 1,
            f"{self.prefix}.hang_timeout={hang_timeout} must be above 0 seconds": hang_timeout > 0,
            f"{self.prefix}.max_memory_mb={max_memory_mb} must be above 0": max_memory_mb is None or max_memory_mb > 0,
            f"{self.prefix}.max_output_mb={max_output_mb} must be above 0": max_output_mb is None or max_output_mb > 0,
        }
        check_rules(rules)
        try:
            encode(dict(arguments or {}))
        except UNSENDABLE as error:
            raise ConfigError(
                f"environment.arguments cannot be sent to a worker: {cut_line(error)} Use texts, numbers, and lists or "
                "mappings of these."
            ) from error
        self.environment, self.arguments = environment, dict(arguments or {})
        self.name, self.key = environment, f"environment.environment={environment}"
        self.num_workers, self.max_trajectories = num_workers, max_trajectories
        self.python = None if python is None else os.path.expanduser(python)
        self.hang_timeout, self.limits = hang_timeout, WorkerLimits(max_memory_mb, max_output_mb)
        self.places = Places(num_workers * max_trajectories)
        self._pool: tuple[asyncio.AbstractEventLoop, WorkerPool] | None = None

    async def check(self) -> None:
        """Start the workers, and wait until one of them is ready; raises a ConfigError if they cannot be used."""
        try:
            await self._get_pool().check()
        except (ProcessStartError, OSError) as error:
            raise self._describe_start(error) from error

    async def close(self) -> None:
        """Have the workers close their environments, and end the processes; later trajectories start new ones."""
        found, self._pool = self._pool, None
        if found is not None:
            await found[1].close()

    async def run(self, prompt: Prompt, policy: Policy, methods: Mapping[str, Method] | None = None) -> Outcome:
        """Make one trajectory in the least loaded worker; deadlines start when the worker takes it.

        Raises:
            LimitReachedError: the sequence has its maximum length.
            RunError: an error that concerns all trajectories.
            TrajectoryLostError: the trajectory's worker ended or hung.
        """
        pool = self._get_pool()
        errors: list[RunError] = []
        served = {**serve_policy(policy, errors), **(methods or {})}
        clock = policy.clock if isinstance(policy, RecordedPolicy) else Clock()
        try:
            with reraise_remote(), ExitStack() as waiting:
                waiting.enter_context(clock.stopped())
                call = pool.call([*prompt], hang_timeout=self.hang_timeout, methods=served, on_start=waiting.close)
                outcome = outcome_from_plain(await call)
        except ConnectionLostError:
            outcome = Outcome(status="aborted", error="its workers were closed")
        except RemoteError as error:  # raised by the environment's code
            if error.type_name == TrajectoryLostError.__name__:
                raise TrajectoryLostError(error.message, error.traceback, is_cause=False) from error
            outcome = failed_outcome(prompt, str(error), error.traceback)
        except WorkerLostError as error:
            line, details = self._describe_end(pool, error)
            raise TrajectoryLostError(line, details, is_cause=not error.caused_by_other) from error
        except (ProcessStartError, OSError) as error:
            raise self._describe_start(error) from error
        except UNSENDABLE as error:
            raise ConfigError(
                f"Prompt {prompt.index} cannot be sent to a worker of {self.name}: {cut_line(error)} Its "
                "columns have to be texts, numbers, and lists or mappings of these."
            ) from error
        if errors:
            raise errors[0]
        return outcome

    def _get_pool(self) -> WorkerPool:
        """Return the running event loop's pool of workers; raises a ConfigError if the interpreter cannot be used."""
        loop = asyncio.get_running_loop()
        if self._pool is None or self._pool[0] is not loop:
            if self.python is not None:
                check_interpreter(self.python)
            pool = WorkerPool(
                python_command("rlightning.environments.worker", interpreter=self.python),
                name="An environment worker",
                num_workers=self.num_workers,
                max_calls=self.max_trajectories,
                setup=[self.environment, self.arguments, own_search_path()],
                finish_timeout=3 * intervals.CANCEL_GRACE,
                may_repeat=False,
                limits=self.limits,
            )
            self._pool = loop, pool
        return self._pool[1]

    def _describe_end(self, pool: WorkerPool, error: WorkerLostError) -> tuple[str, str]:
        """Return how a trajectory's worker exited: as one line, and with the stacks of the worker's threads.

        Raises an EnvironmentFailedError if too many have ended in a row.
        """
        is_hung = isinstance(error, WorkerHungError)
        how = f"did not respond for {self.hang_timeout:g} s" if is_hung else f"ended ({error})"
        line = f"its worker process {how}"
        details = f"{cut(error.stacks)}\n{line}".strip()
        if pool.deaths.num_restarts >= pool.deaths.max_restarts:
            raise EnvironmentFailedError(
                f"Workers of {self.name} ended {pool.deaths.num_restarts} times in a row, without a trajectory "
                f"that came to its end; the last one {how}. Find out why, or raise {self.prefix}.hang_timeout.",
                details,
            )
        return line, details

    def _describe_start(self, error: ProcessStartError | OSError) -> ConfigError:
        """Return the error of a worker that did not start: its environment's own error if there is one."""
        cause = error.__cause__
        if isinstance(cause, RemoteError):
            is_mistake = cause.type_name == ConfigError.__name__
            line = cause.message if is_mistake else f"{self.key}: {cut_line(cause)}."
            return ConfigError(line, cut(cause.traceback))
        line, _, log = str(error).partition("\n")
        return ConfigError(f"{self.key}: {cut_line(line)}.", cut(log))


def serve_policy(policy: Policy, errors: list[RunError]) -> dict[str, Method]:
    """Return the RPC methods by which a worker samples from the policy of its trajectory.

    An error that concerns all trajectories is added to ``errors``, and raised in the worker too.
    """

    async def get(request: Awaitable[Made]) -> Made:
        try:
            return await request
        except RunError as error:
            errors.append(error)
            raise

    async def chat(tools: list[Message] | None, *observations: Message) -> Fields:
        reply = await get(policy.chat(*observations, tools=tools))
        return [_to_plain(reply), reply.message]

    async def ask(temperature: float, max_new_tokens: int | None, *messages: Message) -> Fields:
        reply = await get(policy.ask(*messages, temperature=temperature, max_new_tokens=max_new_tokens))
        return [_to_plain(reply), reply.message]

    async def sample(token_ids: list[int]) -> Fields:
        return _to_plain(await get(policy.sample(token_ids)))

    async def report(outcome: Fields, state: object) -> None:
        await policy.report(outcome_from_plain(outcome), state)

    return {"chat": chat, "ask": ask, "sample": sample, "report": report, "resume": policy.resume}


def _to_plain(sample: Sample) -> Fields:
    arrays = (sample.token_ids, sample.logprobs, sample.weight_versions)
    return [*(array.tobytes() for array in arrays), sample.text, sample.finish_reason]


def check_interpreter(
    python: str, *, oldest: tuple[int, int] = OLDEST_PYTHON, needs: str = "msgpack", install: str = "msgpack"
) -> str:
    """Raise a ConfigError if an interpreter cannot run workers; return the version of the module that they need.

    Args:
        python: path of the interpreter.
        oldest: minimum Python version.
        needs: module that the interpreter must be able to import.
        install: arguments of ``pip install`` for the module.
    """
    what = f"environment.python={python}"
    command = [python, "-c", PROBE.format(needs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it took more than {PROBE_TIMEOUT:g} s"
        raise ConfigError(
            f"{what} cannot be started: {reason}. Give the path of an interpreter, such as my-venv/bin/python."
        ) from error
    found = re.match(r"(\d+)\.(\d+)\n", done.stdout)
    if found is None:
        raise ConfigError(f"{what} is no Python. Give the path of an interpreter, such as my-venv/bin/python.")
    if tuple(map(int, found.groups())) < oldest:
        rule = f"workers need {oldest[0]}.{oldest[1]} or later"
        raise ConfigError(f"{what} is Python {found[0].strip()}; {rule}. Give a newer one.")
    if done.returncode:
        raise ConfigError(f"{what} has no {needs}, which workers need. Install it: {python} -m pip install {install}.")
    return done.stdout[found.end() :].strip()


def own_search_path() -> list[str]:
    """Return the folders with the user's own modules on this process's import path, for the workers."""
    installed = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    paths = [Path(entry).absolute() for entry in sys.path]
    own = (path for path in paths if path.is_dir() and not INSTALLED.intersection(path.parts))
    return [str(path) for path in own if installed.isdisjoint(map(str, (path, *path.parents)))]
