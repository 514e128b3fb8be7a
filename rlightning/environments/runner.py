"""Runs environments on an event loop in its own thread: it takes prompts, and returns groups of trajectories."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from rlightning import intervals
from rlightning.data.formatting import USUAL, PromptFormat
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.environment import Environment
from rlightning.environments.outcomes import check_outcome
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.environments.single_turn import SingleTurn
from rlightning.environments.snapshots import SavedTrajectory
from rlightning.environments.step_object import await_user_code
from rlightning.errors import ConfigError, RunError, did_you_mean
from rlightning.rollout import TokenSampler
from rlightning.rpc.client import LoopThread
from rlightning.rpc.peer import DeadlineExceededError
from rlightning.types.trajectory import Outcome, Prompt, Trajectory

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""Maximum seconds for an environment to close."""
REPORT_INTERVAL = 60.0
"""Seconds before a running trajectory is first logged as slow, and between two such lines."""
COLUMN = "environment"
"""Column of a prompt set that names each row's environment, if a run has several."""


ScoreGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""A coroutine function that calls reward functions on the trajectories of a prompt, and sets ``reward_results``."""


class HasEnvironmentNames(Protocol):
    """A data module whose configuration may name the environment of its rows; the names are checked before a run."""

    @property
    def environment_names(self) -> dict[str, str]:
        """The names of environments that the data module's configuration gives to rows, by configuration key."""


class EnvironmentRunner:
    """Runs environments for prompts on an event loop in its own thread. Methods may be called from any thread.

    Args:
        sampler: samples the policy's turns.
        tokenizer: the policy's tokenizer.
        prompt_format: format of the prompts; its arguments for the chat template apply to later turns too.
        environments: one environment, or several by the names in the prompts' column ``environment``; None for
            SingleTurn.
        max_length: maximum tokens of a sequence.
        timeout: maximum seconds of a trajectory; None for no limit.
        turn_timeout: maximum seconds of a turn; None for no limit.
        max_requeues: how often a trajectory whose worker process ended or hung is repeated at most.

    Attributes:
        loop: the event loop.
        num_requeues: number of repeated trajectories since it was set to 0.
        first_failure: first error since it was set to None: one line, and its traceback.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        tokenizer: Any,
        environments: Environment | Mapping[str, Environment] | None = None,
        *,
        max_length: int,
        timeout: float | None = None,
        turn_timeout: float | None = None,
        prompt_format: PromptFormat = USUAL,
        max_requeues: int = 0,
    ) -> None:
        self._sampler, self._chat_format = sampler, ChatFormat(tokenizer, prompt_format=prompt_format)
        self._environments = SingleTurn() if environments is None else environments
        self._max_length, self._timeout, self._turn_timeout = max_length, timeout, turn_timeout
        self._max_requeues = max_requeues
        self.num_requeues = 0
        self.first_failure: tuple[str, str] | None = None
        self.loop = LoopThread("environments")
        self._running: dict[asyncio.Task[object], tuple[int, RecordedGroup]] = {}
        self._abandoned: WeakSet[asyncio.Task[object]] = WeakSet()
        self._submitted: WeakKeyDictionary[Future[list[Trajectory]], RecordedGroup] = WeakKeyDictionary()
        self._has_reported_loss = False
        self._next_report = 0.0
        self._is_closed = False

    def submit(self, request: GroupRequest, score: ScoreGroup | None = None) -> "Future[list[Trajectory]]":
        """Start the trajectories of a prompt, and return a future of them without waiting; cancelling the future
        cancels them. If there is a function ``score``, it is called on them before the future returns.

        The future returns the trajectories when all have ended, or raises a RunError that concerns all trajectories.
        """
        environment = find_environment(self._environments, request.prompt)
        group = RecordedGroup(
            self._sampler,
            self._chat_format,
            request,
            self._max_length,
            self._timeout,
            self._max_requeues,
            turn_timeout=self._turn_timeout,
        )
        future = self.loop.submit(self._attempt(request, environment, group, score))
        self._submitted[future] = group
        return future

    def save(self, future: "Future[list[Trajectory]]") -> list[SavedTrajectory | None] | None:
        """Return a prompt's trajectories for a checkpoint (:meth:`RecordedGroup.save`); None if none can be resumed."""
        group = self._submitted[future]
        saved = group.save()
        if not self._has_reported_loss and group.loses_turns:
            self._has_reported_loss = True
            log.info(
                "Checkpoints do not keep the turns of some trajectories that are under way: their environment has no "
                "snapshot() and restore(state), and a resumed run begins them again."
            )
        return saved if any(saved) else None

    def trajectories(self, future: "Future[list[Trajectory]]") -> list[Trajectory] | None:
        """Return the trajectories of a submitted prompt, perhaps without scores; None until all have ended."""
        return self._submitted[future].trajectories

    def cancel(self, futures: "Collection[Future[list[Trajectory]]]") -> None:
        """Cancel the trajectories of prompts, and wait a few seconds at most until they have no more requests at the
        sampler.
        """
        if self._is_closed or not futures:
            return
        for future in futures:
            future.cancel()
        with suppress(DeadlineExceededError):  # the loop may be blocked by user code
            self.loop.run(self._wait_for_cancelled(), timeout=2 * intervals.CANCEL_GRACE)

    def report_oldest(self) -> None:
        """Log the longest-running trajectory if it is slow; at most one line in :data:`REPORT_INTERVAL`."""
        now = monotonic()
        if now < self._next_report:
            return
        running = [
            (started_at, index, number)
            for index, group in list(self._running.values())
            for number, started_at in list(group.started_at.items())
        ]
        started_at, index, number = min(running, default=(now, 0, 0))
        self._next_report = started_at + REPORT_INTERVAL  # those that start later are due later
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL
            limit = "without a limit" if self._timeout is None else f"of at most {self._timeout:g} s"
            log.info(
                "Waiting for %d trajectories; trajectory %d of prompt %d has run for %.0f s, %s.",
                *(len(running), number, index, now - started_at, limit),
            )

    def check(self) -> None:
        """Raise a ConfigError if an environment cannot run here; call it before a run starts."""
        for environment in self._all_environments():
            kind = type(environment)
            own = {"run", "run_group"} & vars(environment).keys()
            if not own and kind.run is Environment.run and kind.run_group is Environment.run_group:
                raise ConfigError(
                    f"environment: {kind.__name__} defines neither run(prompt, policy) nor run_group(prompt, group), "
                    "so that it makes no trajectories. Define the first of them."
                )
            self.loop.run(environment.check())
            if environment.has_tools:
                self._chat_format.check_tools()
        if any(not isinstance(environment, SingleTurn) for environment in self._all_environments()):
            log.info(self._chat_format.describe())

    def close(self) -> None:
        """Cancel all trajectories, close the environments, and end the thread. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            for environment in self._all_environments():
                try:
                    self.loop.run(environment.close(), timeout=CLOSE_TIMEOUT)
                except Exception:  # user code, or a loop that user code blocks
                    log.exception("An environment could not be closed.")
            self.loop.close()

    def _all_environments(self) -> list[Environment]:
        environments = self._environments
        return [environments] if isinstance(environments, Environment) else list(environments.values())

    async def _wait_for_cancelled(self) -> None:
        await asyncio.sleep(0)  # lets tasks start that were just submitted
        await asyncio.sleep(0)
        cancelled = [task for task in self._running if task.cancelling() and task not in self._abandoned]
        if cancelled:
            _, pending = await asyncio.wait(cancelled, timeout=intervals.CANCEL_GRACE)
            self._abandoned.update(pending)  # their environments ignored the cancellation

    async def _attempt(
        self, request: GroupRequest, environment: Environment, group: RecordedGroup, score: ScoreGroup | None
    ) -> list[Trajectory]:
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request.prompt.index, group
        task.add_done_callback(self._running.pop)
        started_at = monotonic()
        try:
            returned = await await_user_code(environment.run_group(request.prompt, group))
            outcomes = read_outcomes(returned, request.num_trajectories)
        except RunError:
            raise  # no trajectory can continue
        except Exception as error:  # user code
            outcomes = [group.fail(error)] * request.num_trajectories
        trajectories = group.finish(outcomes, monotonic() - started_at)
        self.num_requeues += group.num_requeues
        self.first_failure = self.first_failure or group.first_failure
        if score is not None:
            await score(trajectories)
        return trajectories


def read_outcomes(returned: object, num_trajectories: int) -> list[Outcome]:
    """Return what ``run_group`` returned as validated outcomes; raise an error unless it is one outcome for each
    trajectory.
    """
    if not isinstance(returned, Sequence) or len(returned) != num_trajectories:
        found = f"{len(returned)} outcomes" if isinstance(returned, Sequence) else type(returned).__name__
        raise TypeError(f"run_group() returned {found}, and has to return an Outcome for each of {num_trajectories}.")
    return [check_outcome(one, "run_group()") for one in returned]


def check_environment_names(
    environments: Environment | Mapping[str, Environment] | None, named: Mapping[str, str]
) -> None:
    """Raise a ConfigError if ``named`` (names by configuration key) has a name that no environment of the run has."""
    for key, name in named.items():
        if not isinstance(environments, Mapping):
            raise ConfigError(f"{key}={name} has no effect: the run has no environments by name. Remove it.")
        if name not in environments:
            raise ConfigError(f"{key}={name} is no environment of the run. {did_you_mean(name, environments)}")


def find_environment(environments: Environment | Mapping[str, Environment], prompt: Prompt) -> Environment:
    """Return the environment that a prompt names, or the run's only one; raises a ConfigError for an unknown name."""
    if isinstance(environments, Environment):
        return environments
    name = prompt.columns.get(COLUMN)
    environment = environments.get(str(name))
    if environment is None:
        raise ConfigError(
            f"Prompt {prompt.index} has {COLUMN}={name!r}, which is none of the run's: {', '.join(environments)}. "
            "Name one of them in each row."
        )
    return environment
