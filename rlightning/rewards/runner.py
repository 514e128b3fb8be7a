"""Calls the reward functions on a batch; a failure affects only its own sample."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from rlightning.errors import ConfigError, check_rules
from rlightning.processes.cpu_cores import num_cores
from rlightning.rewards.calls import RewardResult, failure
from rlightning.rewards.config import GIVEN, TURNS, Reward, bind_rewards
from rlightning.rewards.event_loop import MAX_CONCURRENT
from rlightning.rewards.pool import RewardPool
from rlightning.rewards.references import choose_evenly, report_unrewarded
from rlightning.rewards.repeats import REPEAT_SECONDS, REPEATED_CALLS, Repeat, describe_noise, describe_repeat
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.tally import FailureCount, RewardScores, Tally

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

MAX_DEFAULT_WORKERS = 8
CHECK_SECONDS = 1.5
"""Maximum seconds for checking reference answers, after the first of them."""


_POOL_LOCK = threading.Lock()
"""Held while a pool is opened, replaced or called: groups are scored in another thread than a step's trajectories."""


def _renew_lock() -> None:
    """Replace the lock in a forked process, which may have been forked while another thread held it."""
    global _POOL_LOCK
    _POOL_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class LateRepeat(NamedTuple):
    """The repeated calls of a function that have not all returned.

    Attributes:
        name: name of the reward function.
        repeat: the results so far.
        begun: when the calls were made, by ``perf_counter``.
        calls: the calls.
    """

    name: str
    repeat: Repeat
    begun: float
    calls: "list[Future[RewardResult]]"


class RewardRunner:
    """Runs reward functions with timeouts: sync ones in worker processes, async ones on the event loop of a process.

    Functions that cannot be pickled (lambdas, closures, those of ``__main__``) run in threads and on an event loop of
    this process, which they may block; a warning says so. Worker processes start with the first calls. :meth:`begin`
    starts calls and returns before they are done, and :meth:`score_group` awaits them on another thread's event loop.

    Args:
        rewards: a list of dotted paths, functions or :class:`RewardFunction`, or a single one.
        max_failed_share: maximum share of samples that may fail, in a call of :meth:`score` or within :meth:`counting`,
            before the run ends.
        max_unrewarded_references: maximum share of a prompt set's reference answers that get no reward from their
            answer checker; a set with a larger share is rejected.
        num_workers: number of processes, and of threads; None for the number of cores, at most eight.

    Attributes:
        num_ranks: number of ranks whose trajectories are scored here, which multiplies the number of processes, as far
            as there are cores. Set before the first call.
        group_failures: counts the failures of :meth:`score_group`, up to its limit; None for no limit.
    """

    def __init__(
        self,
        rewards: Sequence[Reward] | Reward,
        *,
        max_failed_share: float = 0.1,
        max_unrewarded_references: float = 0.02,
        num_workers: int | None = None,
    ) -> None:
        share = "is no share. Use a number from 0 to 1"
        rules = {
            f"max_failed_share={max_failed_share} {share}": 0 <= max_failed_share <= 1,
            f"max_unrewarded_references={max_unrewarded_references} {share}": 0 <= max_unrewarded_references <= 1,
            f"num_workers={num_workers} must be at least 1": num_workers is None or num_workers >= 1,
        }
        check_rules(rules)
        self.max_failed_share = max_failed_share
        self.max_unrewarded_references = max_unrewarded_references
        self.functions = bind_rewards(rewards)
        for function in self.functions:
            if function.pickled is None:
                logger.warning(
                    "Reward '%s' runs in this process, unprotected, as it cannot be sent to another: a lambda, a "
                    "closure, or of the script itself. If it never returns or ends the process, so may the run. Put it "
                    "into a module for a process of its own.",
                    function.name,
                )
            if function.state is not None:
                logger.warning(
                    "Reward '%s' changes %s. Each worker process has its own copy, which other processes do not get, "
                    "and which is lost with the process. Compute rewards from the arguments alone, or make it an async "
                    "def: these run in one process of each rank.",
                    function.name,
                    function.state,
                )
        self.sources = KeptSources(module for function in self.functions for module in function.modules)
        self.num_workers = num_workers or min(MAX_DEFAULT_WORKERS, num_cores())
        self._opened: tuple[int, RewardPool] | None = None  # this process's loop, once there are calls
        # The calls by function, by the id() of a trajectory's turns, which the trajectory keeps alive.
        self._submitted: dict[int, tuple[Trajectory, dict[int, Future[RewardResult]]]] = {}
        self._late_repeats: list[LateRepeat] = []
        self._reported: set[str] = set()
        self._failures: FailureCount | None = None
        self.group_failures: FailureCount | None = None
        self.num_ranks, self._num_scoring = 1, 0

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy: the functions, without processes and running calls."""
        return self.__dict__ | {"_opened": None, "_submitted": {}, "_late_repeats": [], "_num_scoring": 0}

    def check(self, columns: Sequence[str], source: str) -> None:
        """Raise a ConfigError if a prompt set lacks a column that a reward function requires."""
        for function in self.functions:
            function.check(columns, source)

    def read_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of a prompt set that the functions read, by their signatures.

        Args:
            columns: all columns of the set; a function with ``**columns`` reads all of them.
        """
        read: set[str] = set()
        for function in self.functions:
            read |= {*function.columns.values(), *(columns if function.takes_all else ())}
        return sorted(read.difference(GIVEN))

    def check_answers(self, prompts: "Sequence[Prompt]", where: Callable[[int], str]) -> None:
        """Score the reference answers of prompts as completions, with each answer checker.

        At most 2,000 prompts of the set are checked, within about :data:`CHECK_SECONDS`. ``where`` returns the file and
        line of a row, for the error.

        Raises:
            ConfigError: a larger share than ``max_unrewarded_references`` gets no reward.
        """
        from rlightning.types import Sample, Trajectory

        for index, function in enumerate(self.functions):
            check = function.answer_check
            if check is None or not prompts:
                continue
            column = function.columns[check.parameter]
            chosen = dict(enumerate(choose_evenly(prompts)))
            calls: dict[Future[RewardResult], int] = {}
            try:
                for number, prompt in chosen.items():
                    sample = Sample([], [], [], check.make_completion(prompt.columns.get(column)), "stop")
                    calls[self._submit(index, Trajectory.single_turn(prompt, sample))] = number
                wait(calls, return_when=FIRST_COMPLETED)
                outcomes = {calls[call]: call.result() for call in wait(calls, timeout=CHECK_SECONDS).done}
            finally:
                self.close()
            report_unrewarded(function.name, column, chosen, outcomes, where, self.max_unrewarded_references)

    @contextmanager
    def counting(self, failures: FailureCount) -> Iterator[None]:
        """Context manager in which :meth:`score` counts failures in ``failures``, whose limit applies to all calls."""
        before, self._failures = self._failures, failures
        try:
            yield
        finally:
            self._failures = before

    def begin(self, trajectories: "Sequence[Trajectory]") -> None:
        """Submit the reward calls of trajectories and return at once; the next :meth:`score` call uses their results.

        :meth:`score` drops the results of trajectories that are not passed to it. Sync functions that run in this
        process are called only by :meth:`score`, since they would slow the thread that collects completions.

        Args:
            trajectories: some of the trajectories that will be scored together; recognized by their ``turns`` objects.
        """
        for trajectory in trajectories:
            missing = [f for f in self._background if self.functions[f].name not in trajectory.reward_results]
            self._submitted[id(trajectory.turns)] = trajectory, {f: self._submit(f, trajectory) for f in missing}

    async def score_group(self, trajectories: "Sequence[Trajectory]") -> None:
        """Call the functions on trajectories, and set ``reward_results``, which a later :meth:`score` uses, perhaps in
        another process; functions that :meth:`begin` does not call are left out. Runs on any event loop.

        Raises:
            RewardError: more have failed than ``group_failures`` allows.
        """
        calls = {(m, f): self._submit(f, one) for m, one in enumerate(trajectories) for f in self._background}
        self._num_scoring += 1
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, calls.values()), return_exceptions=True)
        finally:
            self._num_scoring -= 1
        errors: dict[int, tuple[str, str]] = {}
        for (m, f), result in zip(calls, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                continue  # the pool was closed: score() repeats the call
            if isinstance(result, BaseException):
                raise result
            trajectories[m].reward_results[self.functions[f].name] = result.value, result.error
            if result.error is not None:
                errors.setdefault(m, (self.functions[f].name, result.error))
        if self.group_failures is not None:
            self.group_failures.num_scored += len(trajectories)
            for m, (name, error) in errors.items():
                self.group_failures.add(name, m, error)

    @property
    def _background(self) -> list[int]:
        """Indices of the functions that do not slow this process's threads: async ones, and those of other
        processes.
        """
        return [f for f, function in enumerate(self.functions) if function.is_async or function.pickled]

    def score(self, trajectories: "Sequence[Trajectory]") -> RewardScores:
        """Score every trajectory with every function; calls that were already submitted are not repeated.

        Raises:
            RewardError: too many samples have failed; raised without waiting for the remaining ones.
        """
        if not self.functions:
            raise ConfigError("There is no reward function. Give at least one by model.rewards.")
        self.sources.report_changes()
        self._report_late_repeats()
        calls: dict[Future[RewardResult], tuple[int, int]] = {}  # function and trajectory
        known: dict[tuple[int, int], RewardResult] = {}
        for place, trajectory in enumerate(trajectories):
            _, begun = self._submitted.pop(id(trajectory.turns), (None, {}))
            for function, bound in enumerate(self.functions):
                if (result := trajectory.reward_results.pop(bound.name, None)) is not None:
                    known[function, place] = RewardResult(*result)
                else:
                    calls[begun.get(function) or self._submit(function, trajectory)] = function, place
        self._cancel_submitted()
        failures = self._failures or FailureCount(len(trajectories), self.max_failed_share)
        tally = Tally(self.functions, len(trajectories), failures, self._reported)
        try:
            for where, result in known.items():
                tally.add(*where, result)
            for outcome in as_completed(calls):
                tally.add(*calls[outcome], outcome.result())
            return tally.total()
        except BaseException:
            self.close()
            raise

    def check_repeats(
        self,
        trajectories: "Sequence[Trajectory]",
        scores: "Mapping[str, Tensor]",
        deadline: float,
        ranks: Sequence[Mapping[str, Sequence[float]]] = (),
    ) -> None:
        """Score a few trajectories again by each function, and warn if results differ, are all equal, or take too long.

        This takes at most :data:`~rlightning.rewards.repeats.REPEAT_SECONDS`: functions are called one after another,
        each with its share of the time. Late calls of async functions go on, and are compared by a later :meth:`score`
        or by :meth:`close`; those of sync functions are cancelled, unless they may be late because groups are being
        scored meanwhile. Functions of weight 0 are left out, and sync functions after a late one, whose calls still
        occupy the processes.

        Args:
            scores: the scores [M] of :meth:`score`, by the function's name.
            deadline: seconds for which other ranks wait for a step's rewards.
            ranks: for each rank its results by the function's name; empty for a single rank.
        """
        asked = [f for f, function in enumerate(self.functions) if function.weight and function.name in scores]
        is_busy = False
        for f in asked:
            function, values = self.functions[f], scores[self.functions[f].name].tolist()
            chosen = trajectories[:REPEATED_CALLS]
            repeat, is_final = Repeat(values[: len(chosen)], [None] * len(chosen), 0.0), True
            is_scoring = self._num_scoring > 0
            if function.is_async or not is_busy:
                begun, calls = perf_counter(), self._ask_again(f, chosen, REPEAT_SECONDS / len(asked))
                repeat = repeat._replace(again=read_results(calls), seconds=perf_counter() - begun)
                may_go_on = function.is_async or is_scoring or self._num_scoring > 0
                is_final = not may_go_on or all(map(Future.done, calls))
                if is_final:
                    is_busy |= not all(map(Future.done, calls))
                    cancel_calls(calls)
                else:
                    self._late_repeats.append(LateRepeat(function.name, repeat, begun, calls))
            num_parallel = MAX_CONCURRENT * self._num_loops if function.is_async else self._num_processes
            line = describe_repeat(
                function.name,
                repeat,
                values,
                num_parallel=num_parallel,
                deadline=deadline,
                everywhere=[value for results in ranks for value in results.get(function.name, ())],
                is_final=is_final,
            )
            if line is not None:
                logger.warning("%s", line)

    def _ask_again(
        self, function: int, trajectories: "Sequence[Trajectory]", timeout: float
    ) -> "list[Future[RewardResult]]":
        """Repeat some calls, past a cache if the function has one, and wait for them until the timeout."""
        past_cache = getattr(self.functions[function].function, "repeat_argument", None)
        extra = {} if past_cache is None else {past_cache: True}
        calls = [self._submit(function, trajectory, extra) for trajectory in trajectories]
        wait(calls, timeout=timeout)
        return calls

    def _report_late_repeats(self, *, is_over: bool = False) -> None:
        """Warn about the noise that late repeated calls show, once they have all returned, or ``is_over``."""
        over = [late for late in self._late_repeats if is_over or all(map(Future.done, late.calls))]
        self._late_repeats = [late for late in self._late_repeats if late not in over]
        for late in over:
            repeat = late.repeat._replace(again=read_results(late.calls), seconds=perf_counter() - late.begun)
            cancel_calls(late.calls)
            line = describe_noise(late.name, repeat)
            if line is not None:
                logger.warning("%s", line)

    def close(self) -> None:
        """End the worker processes, and cancel submitted calls; later calls start new processes."""
        self._report_late_repeats(is_over=True)
        self._cancel_submitted()
        with _POOL_LOCK:
            opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def _cancel_submitted(self) -> None:
        for _, calls in self._submitted.values():
            cancel_calls(calls.values())
        self._submitted.clear()

    @property
    def _num_processes(self) -> int:
        """Number of processes for sync functions."""
        return min(self.num_workers * self.num_ranks, max(self.num_workers, num_cores()))

    @property
    def _num_loops(self) -> int:
        """Number of processes for async functions."""
        return min(self.num_ranks, num_cores())

    @property
    def _pool(self) -> RewardPool:
        if self._opened is None or self._opened[0] != os.getpid():  # a forked process must not use its parent's calls
            pool = RewardPool(self.functions, self.sources, self._num_processes, num_loops=self._num_loops)
            self._opened = os.getpid(), pool
        return self._opened[1]

    def _submit(
        self, function: int, trajectory: "Trajectory", extra: Mapping[str, object] | None = None
    ) -> "Future[RewardResult]":
        arguments = self.functions[function].select(_given(trajectory), trajectory.prompt.columns)
        with _POOL_LOCK:  # another thread may be closing the pool
            return self._pool.submit(function, arguments | dict(extra or {}))


def read_results(calls: "Sequence[Future[RewardResult]]") -> list[RewardResult | None]:
    """Return the results of calls; None for those that have not returned, or were cancelled."""
    return [_read_result(call) if call.done() and not call.cancelled() else None for call in calls]


def _read_result(call: "Future[RewardResult]") -> RewardResult:
    """Return the result of a call that has ended; an exception, such as of a worker pool, becomes a failed result."""
    error = call.exception()
    return call.result() if error is None else failure(error)


def cancel_calls(calls: "Iterable[Future[RewardResult]]") -> None:
    """Cancel those of the calls that have not returned."""
    for call in calls:
        call.cancel()


def _given(trajectory: "Trajectory") -> dict[str, object]:
    prompt, text = trajectory.prompt.text, trajectory.final_text
    return {
        "prompt": prompt,
        "completion": text,
        "full_text": prompt + text,
        "num_tokens": trajectory.num_sampled,
        "is_truncated": trajectory.is_truncated,
        TURNS: [turn.message for turn in trajectory.turns],
    }
