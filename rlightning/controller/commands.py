"""The commands that a controller sends to its workers, and the queue in which a worker executes each of them once.

::

    controller                              worker: calls arrive in several threads, the fit runs in another
    submit(7, Train(prompts))  ---------->  CommandQueue.submit                     take -> Train(prompts)
    collect(7, seen=0)         ---------->  CommandQueue.collect   <-- HookCall -- record
                               <----------
    collect(7, seen=1)         ---------->  CommandQueue.collect   <-- Completed -- answer
    forget(7)                  ---------->  CommandQueue.forget

Each command has a larger number than the one before. A command that is sent again, because it may have been lost, is
not executed again: its entries are read from the beginning, and after :meth:`CommandQueue.forget` it is refused.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

from rlightning.controller.epoch_metrics import EpochMetric
from rlightning.errors import ConfigError, RunError
from rlightning.protocols import StateDict


class WorkerError(RuntimeError):
    """Raised in the controller for an exception in a worker; the message has the rank and the traceback."""


class ForeseenWorkerError(RunError, WorkerError):
    """Raised in the controller if a worker raised one of this package's errors, other than a ConfigError.

    The message is the error's own in one line; the details are the traceback.
    """


class WorkerDiedError(RunError, RuntimeError):
    """A worker's process has ended."""


class ClusterLostError(WorkerDiedError):
    """The Ray cluster has ended, so that no workers can be started in it."""


# Commands

R = TypeVar("R", covariant=True)


class Command(Generic[R]):
    """Base of the commands that a controller sends to a worker; ``R`` is the type of the result."""


@dataclass(frozen=True)
class StartTraining(Command[None]):
    """Run ``on_train_start``; ``num_batches`` is the length of an epoch, which may be infinite."""

    num_batches: float


@dataclass(frozen=True)
class StartEpoch(Command[None]):
    """Run ``on_train_epoch_start``; ``num_batches`` may change if loaders are recreated for each epoch."""

    num_batches: float


@dataclass(frozen=True)
class Train(Command["StepResult"]):
    """Run a training step on this rank's share of a batch."""

    batch: object
    is_last: bool = False


@dataclass(frozen=True)
class EndEpoch(Command["StepResult"]):
    """Run ``on_train_epoch_end``; the result has the metrics that this hook logged."""


@dataclass(frozen=True)
class Evaluate(Command[None]):
    """Start a validation, a test or a prediction over ``num_loaders`` sets; batches follow as other commands."""

    num_loaders: int
    is_sanity_check: bool = False


@dataclass(frozen=True)
class EvaluateBatch(Command[object]):
    """Evaluate this rank's share of a batch of set ``loader``; return predictions, or None in a validation or test."""

    batch: object
    loader: int


@dataclass(frozen=True)
class EndEvaluation(Command[dict[str, float]]):
    """End the evaluation; the result has its metrics by name."""


@dataclass(frozen=True)
class Load(Command[StateDict]):
    """Load a checkpoint; the result is its contents except weights and optimizer state."""

    path: str
    weights_only: bool | None


@dataclass(frozen=True)
class Save(Command[None]):
    """Write a checkpoint that includes the controller's part, ``checkpoint``."""

    checkpoint: StateDict
    path: str
    storage_options: object


@dataclass(frozen=True)
class Call(Command[object]):
    """Call a method of the module; the result is the method's."""

    method: str
    arguments: tuple[object, ...] = ()
    named: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class End(Command[None]):
    """End the fit."""


BetweenBatches = Load | Save | Call
"""Commands that may be executed whenever no step is running."""


# Entries, the answers of workers


@dataclass(frozen=True)
class StepResult:
    """What a worker returns for a training step or an epoch's end: logged metrics, and the number of steps."""

    metrics: dict[str, float]
    in_logger: frozenset[str]
    in_progress_bar: frozenset[str]
    epoch_metrics: list[EpochMetric]
    global_step: int


@dataclass(frozen=True)
class HookCall:
    """An RL hook that a worker's training step has called, with the worker's counts of steps and weight versions."""

    hook: str
    arguments: tuple[object, ...]
    global_step: int
    weight_version: int


@dataclass(frozen=True)
class PromptRequest:
    """A request of a worker's step for ``num_prompts`` prompts of the training set for each rank."""

    num_prompts: int


@dataclass(frozen=True)
class StopRequest:
    """Reports that a callback or the module in a worker has set ``trainer.should_stop``."""


@dataclass(frozen=True)
class Completed:
    """Last response of a worker to a command that it has executed, with the command's result."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """Last response to a command of a worker whose fit has ended with an exception.

    Attributes:
        rank: the worker's global rank.
        summary: type and message, in one line.
        traceback: as Python prints it.
        exit_code: exit code of a foreseen error, for which the summary suffices; None for any other error.
        is_first: whether this rank was the first to fail.
    """

    rank: int
    summary: str
    traceback: str
    exit_code: int | None
    is_first: bool


Entry = HookCall | PromptRequest | StopRequest | Completed | Failed


class CommandQueue:
    """A worker's queue of commands, with the entries that respond to each: hooks, requests, and the result.

    The controller's calls add commands and read entries, in several threads; the fit executes the commands.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Command[object]]] = deque()
        self._entries: dict[int, list[Entry]] = {}
        self._current: int | None = None
        self._last = -1
        self._failure: Failed | None = None
        self._prompts: deque[object] = deque()
        self._num_supplies = 0

    # Called by the controller

    def submit(self, number: int, command: Command[object]) -> None:
        """Queue a command, unless it was queued before; raises a RuntimeError if its entries were already deleted."""
        with self._changed:
            if number in self._entries:
                return
            if number <= self._last:
                raise RuntimeError(f"command {number} has been executed, and its answer was fetched")
            self._last = number
            self._entries[number] = []
            self._waiting.append((number, command))
            self._changed.notify_all()

    def collect(self, number: int, seen: int) -> list[Entry]:
        """Wait until more than ``seen`` entries respond to a command, and return those after the first ``seen``.

        A command's last entry is :class:`Completed` or :class:`Failed`.
        """
        with self._changed:
            entries = self._entries[number]
            self._changed.wait_for(lambda: len(entries) > seen or self._failure is not None)
            return entries[seen:] or [self.await_failure()]

    def forget(self, number: int) -> None:
        """Delete the responses to a command, after the controller has read its result."""
        with self._changed:
            self._entries.pop(number, None)

    def supply(self, number: int, prompts: object) -> None:
        """Pass to the fit the prompts for its request ``number``, counted from 0; do nothing if it was done before."""
        with self._changed:
            if number == self._num_supplies:
                self._num_supplies += 1
                self._prompts.append(prompts)
                self._changed.notify_all()

    def await_failure(self) -> Failed:
        """Wait for the fit to end with an exception, and return the failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None)
            assert self._failure is not None
            return self._failure

    # Called by the fit

    def peek(self) -> Command[object]:
        """Wait for the next command and return it without removing it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting[0][1]

    def take(self) -> Command[object]:
        """Wait for the next command and remove it; it is the current command until it is answered."""
        self.peek()
        with self._changed:
            self._current, command = self._waiting.popleft()
            return command

    def record(self, entry: Entry) -> None:
        """Append an entry, such as a called hook, to the current command; without a current command, drop it."""
        with self._changed:
            if self._current in self._entries:
                self._entries[self._current].append(entry)
                self._changed.notify_all()

    def answer(self, result: object) -> None:
        """End the current command with a last entry ``Completed(result)``, which :meth:`collect` returns."""
        self.record(Completed(result))
        self._current = None

    def fail(self, failure: Failed) -> None:
        """End all commands, including future ones, with this failure."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def await_prompts(self) -> object:
        """Wait for the prompts that :meth:`supply` provides, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._prompts)
            return self._prompts.popleft()


def raise_failure(failure: Failed) -> NoReturn:
    """Raise the exception of a worker in the controller: a ConfigError, ForeseenWorkerError or WorkerError."""
    if failure.exit_code == ConfigError.exit_code:
        raise ConfigError(failure.summary)
    if failure.exit_code is not None:
        raise ForeseenWorkerError(f"worker {failure.rank}: {failure.summary}", failure.traceback)
    raise WorkerError(f"worker {failure.rank} failed: {failure.summary}\n\n{failure.traceback}")
