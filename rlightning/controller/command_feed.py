"""Passes the controller's commands to the loops of a worker's Trainer, and their batches to its loaders.

Between two batches no collective is running, and all hooks of the step have been called. Commands other than steps are
executed there, in the thread of the run, on all ranks in the same order::

    Trainer.fit  -->  await_batch  -->  Save, Load, Call, Evaluate ...  -->  Train(batch)  -->  training_step ...
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch import LightningDataModule

from rlightning.controller.commands import (
    BetweenBatches,
    Command,
    CommandQueue,
    End,
    EndEpoch,
    EndEvaluation,
    Evaluate,
    EvaluateBatch,
    PromptRequest,
    StartEpoch,
    StartTraining,
    Train,
)

C = TypeVar("C", bound=Command[object])
ENDLESS = 1 << 30
"""Number of batches that a loader reports: Lightning fetches a batch in advance from a loader without a length."""


class CommandFeed:
    """Provides a worker's fit with batches, and executes the commands that arrive between them.

    Args:
        queue: the worker's commands.
        execute: executes a command between two batches, and returns its result.
        evaluate: runs a validation within the fit, with batches from this feed, and returns the metrics.
        step_result: returns the result of a training step, or of an epoch's end; called after all hooks.
        report_stop: records ``trainer.should_stop`` if it is set; called before each answer that the controller's loops
            wait for.
    """

    def __init__(
        self,
        queue: CommandQueue,
        *,
        execute: Callable[[BetweenBatches], object],
        evaluate: Callable[[Evaluate], object],
        step_result: Callable[[], object],
        report_stop: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.num_loaders = 1
        self.num_batches = float("inf")
        self.is_over = False
        self.outputs: object = None
        """Outputs of the last step of a prediction; unused in a validation or a test."""
        self._execute, self._evaluate = execute, evaluate
        self._step_result, self._report_stop = step_result, report_stop
        self._is_evaluating = False
        self._batch: object = None

    def begin_fit(self) -> None:
        """Wait for the command that starts training, and execute other commands until it arrives."""
        self.is_over = False
        self.num_batches = self._serve_until(StartTraining).num_batches

    def begin_epoch(self) -> bool:
        """Execute commands until an epoch starts or continues, and return True; return False if the fit ends."""
        self._rest_between_epochs()
        command = self.queue.peek()
        if isinstance(command, StartEpoch | End):
            self.queue.take()
        if isinstance(command, StartEpoch):
            self.num_batches = command.num_batches
        self.is_over = isinstance(command, End)
        return not self.is_over

    def answer_start(self) -> None:
        """Report to the controller that training or an epoch has started; called after all hooks."""
        self._report_stop()
        self.queue.answer(None)

    def await_batch(self) -> Train | None:
        """Execute commands until the next training step, and return its command; None at the end of the epoch."""
        while not isinstance(command := self.queue.take(), Train | EndEpoch):
            self._serve(command)
        if isinstance(command, EndEpoch):
            return None
        self._batch = command.batch
        return command

    def end_epoch(self) -> None:
        """Send the epoch's result to the controller, then execute commands until the next epoch or the fit's end."""
        self.answer_step()
        self._rest_between_epochs()

    def training_batches(self) -> Iterator[object]:
        """Yield this rank's share of each step's batch."""
        while True:
            batch, self._batch = self._batch, None
            yield batch

    def answer_step(self) -> None:
        """Send the training step's result to the controller."""
        self._report_stop()
        self.queue.answer(self._step_result())

    def await_evaluation(self) -> None:
        """Execute commands until a validation, test or prediction starts."""
        self.begin_evaluation(self._serve_until(Evaluate))

    def begin_evaluation(self, command: Evaluate) -> None:
        """Report to the controller that an evaluation has started, and let :meth:`evaluation_batches` begin."""
        self.num_loaders, self._is_evaluating = command.num_loaders, True
        self.queue.answer(None)

    def evaluation_batches(self, loader: int) -> Iterator[object]:
        """Yield this rank's share of each batch of evaluation set ``loader``, and send the result to the controller."""
        while self._is_evaluating:
            command = self.queue.peek()
            if isinstance(command, EvaluateBatch) and command.loader != loader:
                return
            self.queue.take()
            if isinstance(command, EvaluateBatch):
                yield command.batch
                outputs, self.outputs = self.outputs, None
                self.queue.answer(outputs)
            elif isinstance(command, EndEvaluation):
                self._is_evaluating = False
            else:
                self._serve(command)

    def _serve_until(self, kind: type[C]) -> C:
        while not isinstance(command := self.queue.take(), kind):
            self._serve(command)
        return command

    def _rest_between_epochs(self) -> None:
        while not isinstance(self.queue.peek(), StartEpoch | Train | EndEpoch | End):
            self._serve(self.queue.take())

    def _serve(self, command: Command[object]) -> None:
        if isinstance(command, Evaluate):
            self.begin_evaluation(command)
            metrics = self._evaluate(command)  # returns after taking the command that ends the evaluation
            self._report_stop()
            self.queue.answer(metrics)
            return
        assert isinstance(command, BetweenBatches), f"{type(command).__name__} came at the wrong time"
        self.queue.answer(self._execute(command))


class FeedLoader:
    """A data loader whose batches arrive as commands; a command, not the loader, ends an epoch or a set."""

    def __init__(self, batches: Callable[[], Iterator[object]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[object]:
        return self._batches()

    def state_dict(self) -> dict[str, object]:
        """Return an empty state, since the controller keeps the position. Without this method Lightning would warn."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing: the controller keeps the position."""


class WorkerData(LightningDataModule):
    """Replaces the user's data module in a worker: batches arrive as commands, other attributes are the user's.

    ``configured`` is the user's data module, which is not set up in a worker.
    """

    def __init__(self, configured: LightningDataModule | None, feed: CommandFeed) -> None:
        super().__init__()
        self.configured = configured
        self.feed = feed

    def __getattr__(self, name: str) -> object:
        if name in ("configured", "feed"):  # not yet set while the object is being constructed
            raise AttributeError(name)
        return getattr(self.configured, name)

    def take(self, num_prompts: int) -> object:
        """Request training prompts for this rank, and wait for them. Every rank must request the same number."""
        self.feed.queue.record(PromptRequest(num_prompts))
        return self.feed.queue.await_prompts()

    def transfer_batch_to_device(self, batch: object, device: torch.device, dataloader_idx: int) -> object:
        """Move a batch to the device as the user's data module does."""
        assert self.configured is not None
        return self.configured.transfer_batch_to_device(batch, device, dataloader_idx)

    def train_dataloader(self) -> FeedLoader:
        """Return the loader of training batches."""
        return FeedLoader(self.feed.training_batches)

    def val_dataloader(self) -> list[FeedLoader]:
        """Return a loader for each set of the evaluation; outside of a fit, wait for the evaluation's start first."""
        if self.trainer is not None and self.trainer.state.fn != "fit":
            self.feed.await_evaluation()
        return [FeedLoader(partial(self.feed.evaluation_batches, number)) for number in range(self.feed.num_loaders)]

    test_dataloader = predict_dataloader = val_dataloader
