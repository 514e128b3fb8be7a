"""The trajectories of one prompt: their recording policies, their deadlines, and the handling of their errors."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from time import monotonic

from rlightning import intervals
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.clock import Clock
from rlightning.environments.environment import LimitReachedError, Policy, TrajectoryLostError
from rlightning.environments.outcomes import check_outcome, outcome_from_plain
from rlightning.environments.policy import GroupRequest, RecordedPolicy, failed_outcome
from rlightning.environments.snapshots import SavedTrajectory
from rlightning.errors import RequestRefusedError, RunError
from rlightning.foreign_text import cut, cut_line, describe_error
from rlightning.rollout import TokenSampler
from rlightning.types.trajectory import Outcome, Trajectory

log = logging.getLogger(__name__)


class RecordedGroup:
    """A :class:`~rlightning.environments.environment.PolicyGroup` that records the trajectories of a prompt.

    Args:
        sampler, chat_format, request, max_length: see :class:`RecordedPolicy`.
        timeout: maximum seconds of a trajectory; None for no limit.
        max_requeues: how often a trajectory that was lost with its worker is repeated at most.
        turn_timeout: maximum seconds of a turn; None for no limit.

    Attributes:
        num_requeues: total number of repetitions of trajectories.
        first_failure: the first error in one line, and its traceback; None without any.
        started_at: start of each running trajectory, by its number, on the monotonic clock.
        trajectories: the finished trajectories; None until :meth:`finish`.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        chat_format: ChatFormat,
        request: GroupRequest,
        max_length: int,
        timeout: float | None,
        max_requeues: int = 0,
        *,
        turn_timeout: float | None = None,
    ) -> None:
        self._sampler, self._chat_format, self._request = sampler, chat_format, request
        self._turn_timeout = turn_timeout
        self._max_length, self._timeout, self._max_requeues = max_length, timeout, max_requeues
        saved = request.saved or [None] * request.num_trajectories
        self._clocks = [Clock(None if one is None else one["timings"]) for one in saved]
        self._policies = [self._make_policy(number) for number in range(request.num_trajectories)]
        self._ended: dict[int, Outcome] = {}
        self._known: dict[int, Outcome] = {}
        """Outcomes, by number, of trajectories that ended in an earlier run and have not been returned yet."""
        self._num_parts = 0
        """Number of calls of :meth:`sample_all` and :meth:`run_each`; each call makes one part of every trajectory."""
        for number, one in enumerate(saved):
            if one is not None:
                self._load(number, one)
        self.num_requeues = 0
        self.first_failure: tuple[str, str] | None = None
        self.started_at: dict[int, float] = {}
        self.trajectories: list[Trajectory] | None = None

    def _make_policy(self, number: int, attempt: int = 0) -> RecordedPolicy:
        clock = self._clocks[number]
        return RecordedPolicy(self._sampler, self._chat_format, self._request, number, self._max_length, attempt, clock)

    def _load(self, number: int, saved: SavedTrajectory) -> None:
        if saved["outcome"] is None:
            self._policies[number].offer(saved)
        else:
            self._policies[number].load(saved)
            outcome = outcome_from_plain(saved["outcome"])
            self._ended[number], self._known[number] = deepcopy(outcome), outcome

    def save(self) -> list[SavedTrajectory | None]:
        """Return each trajectory in plain types for a checkpoint; None for one that cannot be resumed. Thread-safe.

        Returns:
            A running trajectory as of the last state that its environment reported; None if it reported none, so that
            the trajectory is requeued. All are None in the second of several calls of :meth:`run_each`, since saved
            data does not say to which call it belongs.
        """
        found: list[SavedTrajectory | None] = []
        for number, clock in enumerate(self._clocks):
            outcome = self._ended.get(number)
            saved = self._policies[number].save(outcome)
            found.append(saved and {**saved, "timings": clock.timings})
        return found if self._num_parts < 2 else [None] * len(found)

    @property
    def loses_turns(self) -> bool:
        """Whether a checkpoint would lose turns of a running trajectory, because its environment reports no states."""
        under_way = [self._policies[number] for number in list(self.started_at)]
        return any(policy.has_begun and not policy.has_snapshots for policy in under_way)

    async def sample_all(self) -> list[Outcome]:
        """Sample one turn for each trajectory in a single request (:meth:`PolicyGroup.sample_all`)."""
        self._num_parts += 1
        if self._num_parts == 1:  # the loaded state is another environment's
            self._clocks = [Clock() for _ in self._clocks]
            self._policies = [self._make_policy(number) for number in range(len(self._policies))]
        self._known, self._ended = {}, {}
        token_ids, sampling = self._request.prompt.token_ids, self._request.sampling
        samples = await self._sampler.sample(token_ids, sampling, num_samples=len(self._policies), session=None)
        for policy, sample in zip(self._policies, samples, strict=True):
            policy.recorder.record(policy.recorder.reserve(token_ids), [sample])
        return [Outcome() for _ in samples]

    async def run_each(
        self,
        run: Callable[[Policy], Awaitable[Outcome]],
        places: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """Call ``run`` for each trajectory concurrently (:meth:`PolicyGroup.run_each`)."""
        self._num_parts += 1

        async def run_in_place(number: int) -> Outcome:
            known = self._known.pop(number, None)
            if known is not None:
                return known
            self._ended.pop(number, None)  # a second part of the trajectory begins
            async with places or nullcontext():
                self.started_at[number] = monotonic()
                try:
                    with self._clocks[number].timing():
                        outcome = await self._attempt_within_budget(run, number)
                        self._ended[number] = deepcopy(outcome)  # run_group may change its copy
                        return outcome
                finally:
                    del self.started_at[number]

        tasks = [asyncio.ensure_future(run_in_place(number)) for number in range(len(self._policies))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # if one of them has ended the run, the others stop sampling
            running = [task for task in tasks if not task.done()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=intervals.CANCEL_GRACE)

    async def _attempt_within_budget(self, run: Callable[[Policy], Awaitable[Outcome]], number: int) -> Outcome:
        """Make a trajectory; repeat it if its worker was lost. A budget limits losses that it may have caused."""
        num_caused = 0
        while True:
            policy = self._policies[number]
            try:
                return await self._run(run, policy)
            except TrajectoryLostError as error:
                num_caused += error.is_cause
                if num_caused > self._max_requeues:
                    return self.fail(str(error), error.details)
                line = cut_line(str(error))
            self.num_requeues += 1
            log.warning("A trajectory of prompt %d is requeued: %s", self._request.prompt.index, line)
            self._policies[number] = self._make_policy(number, policy.attempt + 1)

    async def _run(self, run: Callable[[Policy], Awaitable[Outcome]], policy: RecordedPolicy) -> Outcome:
        try:
            async with policy.clock.limit(self._timeout) as deadline, _limit_turns(self._turn_timeout, policy) as turn:
                return await _run_and_check(run, policy)
        except LimitReachedError as error:
            return Outcome(status="truncated", error=cut(str(error)))
        except TrajectoryLostError:
            raise
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Raised by the environment's code; it would end the loop, or reach the trainer without a message.
            return self.fail(f"it raised {describe_error(error)}")
        except Exception as error:
            if isinstance(error, RunError) and not isinstance(error, RequestRefusedError):
                raise  # for example an error of the sampler: no trajectory can continue
            if isinstance(error, TimeoutError) and (deadline.expired() or turn.expired()):
                what, limit = ("It", self._timeout) if deadline.expired() else ("A turn", self._turn_timeout)
                made = policy.progress or Outcome()
                return replace(made, status="timeout", error=f"{what} took more than {limit:g} s.")
            return self.fail(error)

    def fail(self, error: Exception | str, details: str = "") -> Outcome:
        """Record an error, and return the outcome of the failed trajectory (:func:`failed_outcome`)."""
        if self.first_failure is None and isinstance(error, Exception):
            self.first_failure = describe_error(error), "".join(traceback.format_exception(error))
        return failed_outcome(self._request.prompt, error, details)

    def finish(self, outcomes: Sequence[Outcome], seconds: float) -> list[Trajectory]:
        """Return the trajectories with their outcomes."""
        errors = (outcome.error or "" for outcome in outcomes if outcome.status == "failed")
        if self.first_failure is None and (error := next(errors, None)) is not None:
            self.first_failure = error.strip().rpartition("\n")[2], error
        trajectories = []
        for policy, clock, outcome in zip(self._policies, self._clocks, outcomes, strict=True):
            trajectory = policy.finish(outcome, seconds)
            trajectory.timings |= clock.timings
            trajectories.append(trajectory)
        self.trajectories = trajectories
        return trajectories


@asynccontextmanager
async def _limit_turns(seconds: float | None, policy: RecordedPolicy) -> AsyncIterator[asyncio.Timeout]:
    """Raise a TimeoutError if a turn of the policy, or the time after the last turn, exceeds ``seconds``."""
    async with policy.clock.limit(seconds) as deadline:

        def begin_turn() -> None:
            if seconds is not None and not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time() + seconds)

        policy.on_turn = begin_turn
        try:
            yield deadline
        finally:
            policy.on_turn = lambda: None


async def _run_and_check(run: Callable[[Policy], Awaitable[Outcome]], policy: RecordedPolicy) -> Outcome:
    """Make a trajectory; raise its sampler's first error, even if the environment caught that error."""
    try:
        outcome = check_outcome(await run(policy))
    except Exception as error:
        if policy.failure is None or policy.failure is error:
            raise
        raise policy.failure from None  # error may have been raised from it
    if policy.failure is not None:
        raise policy.failure
    return outcome
