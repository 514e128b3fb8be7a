"""What a controller asks of its workers, and the inbox of one worker in which each order is obeyed once.

::

    controller                              worker: orders come in one thread,      the fit runs in another
    submit(7, Train(prompts))  ---------->  Inbox.submit                            Inbox.take -> Train(prompts)
    collect(7, seen=0)         ---------->  Inbox.collect   <--- Fired(...) ------  Inbox.note
                               <----------
    collect(7, seen=1)         ---------->  Inbox.collect   <--- Answered(...) ---  Inbox.answer
    forget(7)                  ---------->  Inbox.forget

Numbers grow. An order that is sent again, because nobody knows whether it arrived, is not obeyed again: its record is
read from its beginning, and after :meth:`Inbox.forget` it is refused.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlightning.controller.epoch_metrics import EpochMetric
from rlightning.errors import ConfigError, RunError


class WorkerError(RuntimeError):
    """A worker raised: the message has its rank and its traceback."""


class ForeseenWorkerError(RunError, WorkerError):
    """A worker raised an error of ours: the message is its line, the details are the worker's traceback."""


class WorkerDiedError(RunError, RuntimeError):
    """A worker's process is gone.

    Attributes:
        ranks: of those that are gone.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ClusterLostError(WorkerDiedError):
    """The cluster is gone, and workers cannot be started again in it."""


# What a controller asks


@dataclass(frozen=True)
class StartTraining:
    """The time of ``on_train_start``; an epoch has ``num_batches``, which may be infinite."""

    num_batches: float


@dataclass(frozen=True)
class StartEpoch:
    """The time of ``on_train_epoch_start``; the epoch has ``num_batches``, which differ where loaders are made anew."""

    num_batches: float


@dataclass(frozen=True)
class Train:
    """A training step on this rank's share of a batch, the epoch's last or not; answered by a :class:`StepResult`."""

    batch: Any
    is_last: bool = False


@dataclass(frozen=True)
class EndEpoch:
    """The time of ``on_train_epoch_end``; answered by a :class:`StepResult` of what was logged in it."""


@dataclass(frozen=True)
class Evaluate:
    """The beginning of a validation, a test or a prediction over ``num_loaders`` sets."""

    num_loaders: int
    is_sanity_check: bool = False


@dataclass(frozen=True)
class EvaluateBatch:
    """A step on this rank's share of a batch of set ``loader``; answered by what a prediction's returned."""

    batch: Any
    loader: int


@dataclass(frozen=True)
class EndEvaluation:
    """Answered by the metrics of the whole evaluation, by name."""


@dataclass(frozen=True)
class Load:
    """Go on from a checkpoint; answered by all of it but weights and the optimizers' state."""

    path: str
    weights_only: bool | None


@dataclass(frozen=True)
class Save:
    """Write a checkpoint, of which ``checkpoint`` has the controller's part."""

    checkpoint: dict[str, Any]
    path: str
    storage_options: Any


@dataclass(frozen=True)
class Call:
    """Call a method of the module; answered by what it returns."""

    method: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The fit is over."""


Order = (
    StartTraining | StartEpoch | Train | EndEpoch | Evaluate | EvaluateBatch | EndEvaluation | Load | Save | Call | End
)


# What comes back


@dataclass(frozen=True)
class StepResult:
    """After a training step, or an epoch's end: what was logged, also for the epoch, and the trainer's count of steps.

    Attributes:
        metrics: by name.
        in_logger: those that were logged with ``logger=True``.
        in_progress_bar: those that were logged with ``prog_bar=True``.
        epoch_metrics: what the step has added to them.
        global_step: after it.
    """

    metrics: dict[str, float]
    in_logger: frozenset[str]
    in_progress_bar: frozenset[str]
    epoch_metrics: list[EpochMetric]
    global_step: int


@dataclass(frozen=True)
class Fired:
    """An RL hook that a worker's training step has fired, with the worker's counts at that moment."""

    hook: str
    arguments: tuple[Any, ...]
    global_step: int
    weight_version: int


@dataclass(frozen=True)
class PromptsWanted:
    """The step needs further prompts, so many for each rank."""

    num_prompts: int


@dataclass(frozen=True)
class StopWanted:
    """A callback or the module in a worker has set ``trainer.should_stop``."""


@dataclass(frozen=True)
class Answered:
    """The order has been obeyed."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """The worker's run has ended by an exception.

    Attributes:
        rank: of the worker.
        summary: type and message, in one line.
        traceback: as Python prints it.
        exit_code: of a foreseen error, of which the summary alone says all; None of any other.
        is_first: whether no other rank had failed before.
    """

    rank: int
    summary: str
    traceback: str
    exit_code: int | None
    is_first: bool


Entry = Fired | PromptsWanted | StopWanted | Answered | Failed


class Inbox:
    """The orders of one worker; filled and read by the threads of the controller's calls, obeyed by that of the fit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Order]] = deque()
        self._records: dict[int, list[Entry]] = {}
        self._current: int | None = None
        self._last = -1
        self._failure: Failed | None = None
        self._supplies: deque[Any] = deque()
        self._num_supplies = 0

    # The controller's side

    def submit(self, number: int, order: Order) -> None:
        """Accept an order, unless it has come before.

        Raises:
            RuntimeError: if it has been obeyed and its record is forgotten.
        """
        with self._changed:
            if number in self._records:
                return
            if number <= self._last:
                raise RuntimeError(f"order {number} has been obeyed, and its answer was fetched")
            self._last = number
            self._records[number] = []
            self._waiting.append((number, order))
            self._changed.notify_all()

    def collect(self, number: int, seen: int) -> list[Entry]:
        """What has happened since ``seen`` entries of the order's record; waits until something has.

        The last one of a record is :class:`Answered` or :class:`Failed`.
        """
        with self._changed:
            record = self._records[number]
            self._changed.wait_for(lambda: len(record) > seen or self._failure is not None)
            return record[seen:] or [self._failure]  # type: ignore[list-item]

    def forget(self, number: int) -> None:
        """Let go of an order's record, and of the results in it."""
        with self._changed:
            self._records.pop(number, None)

    def supply(self, number: int, things: Any) -> None:
        """Give the fit what it has asked for by its ``number``-th note of that kind; a second time it is ignored."""
        with self._changed:
            if number == self._num_supplies:
                self._num_supplies += 1
                self._supplies.append(things)
                self._changed.notify_all()

    def await_failure(self) -> Failed:
        """How the fit has ended, once it has by an exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None)
            assert self._failure is not None
            return self._failure

    # The fit's side

    def peek(self) -> Order:
        """The next order, which stays the next one; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting[0][1]

    def take(self) -> Order:
        """The next order, which is the current one until it is answered."""
        self.peek()
        with self._changed:
            self._current, order = self._waiting.popleft()
            return order

    def note(self, entry: Entry) -> None:
        """Add to the record of the current order; without one nobody is told."""
        with self._changed:
            if self._current in self._records:
                self._records[self._current].append(entry)
                self._changed.notify_all()

    def answer(self, result: Any) -> None:
        """End the current order."""
        self.note(Answered(result))
        self._current = None

    def fail(self, failure: Failed) -> None:
        """Answer all orders, those to come too, by ``failure``."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def await_supply(self) -> Any:
        """What :meth:`supply` brought."""
        with self._changed:
            self._changed.wait_for(lambda: self._supplies)
            return self._supplies.popleft()


def raise_failure(failure: Failed) -> None:
    """Raise in the controller what happened in a worker."""
    if failure.exit_code == ConfigError.exit_code:
        raise ConfigError(failure.summary)
    if failure.exit_code is not None:
        raise ForeseenWorkerError(f"worker {failure.rank}: {failure.summary}", failure.traceback)
    raise WorkerError(f"worker {failure.rank} failed: {failure.summary}\n\n{failure.traceback}")
