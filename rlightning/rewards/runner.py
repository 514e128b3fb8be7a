"""Calls the reward functions on a batch, and keeps a failure to the sample that it befell."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rlightning.errors import ConfigError
from rlightning.rewards.calls import Call, Outcome
from rlightning.rewards.config import GIVEN, TURNS, Reward, bind_rewards
from rlightning.rewards.pools import Pools
from rlightning.rewards.references import choose_evenly, report_unrewarded
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.tally import FailureCount, RewardScores, Tally

if TYPE_CHECKING:
    from rlightning.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

MAX_DEFAULT_WORKERS = 8
CHECK_SECONDS = 1.5
"""In which reference answers are graded, after the first of them."""


class _Begun(NamedTuple):
    """A trajectory whose calls have been begun.

    Attributes:
        turns: the trajectory's, by which it is known again in a batch.
        number: the calls'.
    """

    turns: tuple[Any, ...]
    number: int


class RewardRunner:
    """Runs reward functions: sync ones in worker processes, async ones on the event loop of one, all with a timeout.

    Functions that cannot be pickled (lambdas, closures, those of ``__main__``) run in this process instead, in threads
    and on a loop: nothing protects it from them, which is logged. Processes start with the first calls. :meth:`begin`
    lets calls run while the caller has something else to do.

    Args:
        rewards: each a dotted path, a function, or a :class:`RewardFunction`; one of them needs no list.
        max_failed_share: the run ends when a larger share of the samples of a :meth:`score` has failed, or of those
            that are counted together (:meth:`counting`).
        max_unrewarded_references: a prompt set is refused when a larger share of its reference answers is not rewarded
            by the checker of answers that it is graded with.
        num_workers: processes, and threads; None: as many as this process has cores, and at most eight.
    """

    def __init__(
        self,
        rewards: Sequence[Reward] | Reward,
        *,
        max_failed_share: float = 0.1,
        max_unrewarded_references: float = 0.02,
        num_workers: int | None = None,
    ) -> None:
        if not 0 <= max_failed_share <= 1:
            raise ConfigError(f"max_failed_share={max_failed_share} is no share. Use a number from 0 to 1.")
        if not 0 <= max_unrewarded_references <= 1:
            rule = "is no share. Use a number from 0 to 1."
            raise ConfigError(f"max_unrewarded_references={max_unrewarded_references} {rule}")
        if num_workers is not None and num_workers < 1:
            raise ConfigError(f"num_workers={num_workers} must be at least 1.")
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
                    "Reward '%s' changes %s. Each worker process has a copy of its own, which the others do not know "
                    "and which is lost with the process. Compute rewards from the arguments alone, or make it an async "
                    "def: these run in one process.",
                    function.name,
                    function.state,
                )
        self.sources = KeptSources(module for function in self.functions for module in function.modules)
        self.num_workers = num_workers or min(MAX_DEFAULT_WORKERS, _num_cores())
        self._opened: Pools | None = None  # when there are calls
        self._begun: dict[int, _Begun] = {}  # by the turns' id()
        self._num_samples = 0
        self._reported: set[str] = set()
        self._failures: FailureCount | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: the functions, and no processes or calls."""
        return self.__dict__ | {"_opened": None, "_begun": {}}

    def check(self, columns: Sequence[str], source: str) -> None:
        """Refuse a prompt set that lacks a column which a function cannot do without.

        Args:
            columns: what every row of the set has.
            source: the set's name, for the error.
        """
        for function in self.functions:
            function.check(columns, source)

    def read_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of a prompt set that the functions read, by their signatures.

        Args:
            columns: of the set; a function with ``**columns`` reads all of them.
        """
        read: set[str] = set()
        for function in self.functions:
            read |= {*function.columns.values(), *(columns if function.takes_all else ())}
        return sorted(read.difference(GIVEN))

    def check_answers(self, prompts: "Sequence[Prompt]", where: Callable[[int], str]) -> None:
        """Grade reference answers against themselves, by each function that is marked as a checker of answers.

        At most 2,000 prompts of the set, and as many of them as :data:`CHECK_SECONDS` allow.

        Args:
            prompts: of one set, with its columns.
            where: gives the file and line of a row, for the error.

        Raises:
            ConfigError: more than ``max_unrewarded_references`` of them are not rewarded.
        """
        for index, function in enumerate(self.functions):
            if function.answer_check is None or not prompts:
                continue
            column = function.columns[function.answer_check.parameter]
            chosen = {self._num_samples + i: prompt for i, prompt in enumerate(choose_evenly(prompts))}
            self._num_samples += len(chosen)
            calls = []
            for number, prompt in chosen.items():
                text = function.answer_check.make_completion(prompt.columns.get(column))
                given = {"prompt": prompt.text, "completion": text, "num_tokens": 0, "is_truncated": False}
                given[TURNS] = [{"role": "assistant", "content": text}]
                calls.append(Call(index, number, function.select(given, prompt.columns)))
            try:
                outcomes = self._run_for(calls, CHECK_SECONDS)
            finally:
                self.close()
            report_unrewarded(function.name, column, chosen, outcomes, where, self.max_unrewarded_references)

    @contextmanager
    def counting(self, failures: FailureCount) -> Iterator[None]:
        """Within, count the failures of every :meth:`score` in ``failures``, with those that it has."""
        before, self._failures = self._failures, failures
        try:
            yield
        finally:
            self._failures = before

    def begin(self, trajectories: "Sequence[Trajectory]") -> None:
        """Start to score trajectories and return at once; the next :meth:`score` waits for those it is asked for.

        The others are forgotten then. Sync functions that run in this process wait for :meth:`score` themselves: they
        would take the interpreter from the thread that collects completions.

        Args:
            trajectories: some of those that will be scored together; :meth:`score` must get their very ``turns``.
        """
        elsewhere = [f for f, function in enumerate(self.functions) if function.is_async or function.pickled]
        calls = []
        for trajectory in trajectories:
            self._begun[id(trajectory.turns)] = _Begun(trajectory.turns, self._num_samples)
            calls += self._calls(elsewhere, trajectory, self._num_samples)
            self._num_samples += 1
        self._pools.submit(calls)

    def score(self, trajectories: "Sequence[Trajectory]") -> RewardScores:
        """Call every function on every trajectory, unless that was begun already.

        Args:
            trajectories: M of them.

        Raises:
            RewardError: too many samples have failed; at once, without waiting for the others.
        """
        if not self.functions:
            raise ConfigError("There is no reward function. Give at least one by model.rewards.")
        self.sources.report_changes()
        everywhere = range(len(self.functions))
        here = [f for f in everywhere if not (self.functions[f].is_async or self.functions[f].pickled)]
        samples: dict[int, int] = {}  # places in the batch, by the calls' numbers
        calls = []
        for sample, trajectory in enumerate(trajectories):
            begun = self._begun.get(id(trajectory.turns))
            if begun is not None and begun.number not in samples:
                samples[begun.number] = sample
                calls += self._calls(here, trajectory, begun.number)
            else:
                samples[self._num_samples] = sample
                calls += self._calls(everywhere, trajectory, self._num_samples)
                self._num_samples += 1
        self._pools.withdraw({begun.number for begun in self._begun.values()} - samples.keys())
        self._begun.clear()
        failures = self._failures or FailureCount(len(trajectories), self.max_failed_share)
        tally = Tally(self.functions, len(trajectories), failures, self._reported)
        try:
            self._pools.submit(calls)
            self._collect(samples, tally)
            return tally.total()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker processes, and drop what was begun; later calls start them again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._begun.clear()

    @property
    def _pools(self) -> Pools:
        if self._opened is None:
            self._opened = Pools(self.functions, self.sources, self.num_workers)
        return self._opened

    def _calls(self, functions: Sequence[int], trajectory: "Trajectory", number: int) -> list[Call]:
        given, columns = _given(trajectory), trajectory.prompt.columns
        return [Call(f, number, self.functions[f].select(given, columns)) for f in functions]

    def _run_for(self, calls: Sequence[Call], seconds: float) -> dict[int, Outcome]:
        """The outcomes, by the calls' samples, that come within some seconds after the first."""
        outcomes: dict[int, Outcome] = {}
        deadline: float | None = None
        self._pools.submit(calls)
        while len(outcomes) < len(calls) and (deadline is None or time.monotonic() < deadline):
            answer = self._pools.get()
            if answer is not None:
                deadline = deadline or time.monotonic() + seconds
                outcomes[answer.call.sample] = answer.outcome
        return outcomes

    def _collect(self, samples: "dict[int, int]", tally: Tally) -> None:
        """Wait for the answer to every function's call on every sample.

        Args:
            samples: places in the batch, by the calls' numbers.
            tally: gets them.
        """
        missing = {(f, number) for f in range(len(self.functions)) for number in samples}
        while missing:
            answer = self._pools.get()
            if answer is None:
                continue
            call, outcome = answer
            if (call.function, call.sample) in missing:  # else of a sample that has been withdrawn
                missing.remove((call.function, call.sample))
                tally.add(call._replace(sample=samples[call.sample]), outcome)


def _given(trajectory: "Trajectory") -> dict[str, Any]:
    prompt, text = trajectory.prompt.text, trajectory.final_text
    return {
        "prompt": prompt,
        "completion": text,
        "full_text": prompt + text,
        "num_tokens": trajectory.num_sampled,
        "is_truncated": trajectory.is_truncated,
        TURNS: [turn.message for turn in trajectory.turns],
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
