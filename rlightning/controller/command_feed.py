"""What a worker's Trainer is fed: the controller's orders, for its loops, and the batches in them, for its loaders.

Between two batches a run is at rest: no collective is under way, all hooks of the step have been fired. This is where
all other orders are obeyed, in the thread of the run, on all ranks in the same order::

    Trainer.fit  -->  await_batch  -->  Save, Load, Call, Evaluate ...  -->  Train(batch)  -->  training_step ...
"""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningDataModule

from rlightning.controller.commands import (
    Call,
    End,
    EndEpoch,
    EndEvaluation,
    Evaluate,
    EvaluateBatch,
    Inbox,
    Load,
    Order,
    PromptsWanted,
    Save,
    StartEpoch,
    StartTraining,
    Train,
)

ENDLESS = 1 << 30
"""Batches that a loader claims to have: Lightning fetches one ahead of time from a loader without a length."""


class OrderFeed:
    """The batches of a worker's fit, and what happens between them.

    Args:
        inbox: of the worker.
        obey: does what an order says that is for the time between two batches, and returns the answer.
        evaluate: runs a validation of the fit, which takes its batches from here, and returns the metrics.
        step_result: what a training step, or the end of an epoch, has come to, asked after all of its hooks.
        tell_of_stop: notes that training should stop, if it should; called before each answer that the controller's
            loops wait for.

    Attributes:
        num_batches: of the epoch.
        is_over: whether the fit is.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        obey: Callable[[Load | Save | Call], Any],
        evaluate: Callable[[Evaluate], Any],
        step_result: Callable[[], Any],
        tell_of_stop: Callable[[], None],
    ) -> None:
        self.inbox = inbox
        self.num_loaders = 1
        self.num_batches = float("inf")
        self.is_over = False
        self.outputs: Any = None
        """Of the last step of a prediction; those of a validation or a test are for nobody."""
        self._obey, self._evaluate = obey, evaluate
        self._step_result, self._tell_of_stop = step_result, tell_of_stop
        self._is_evaluating = False
        self._batch: Any = None

    def begin_fit(self) -> None:
        """Execute the commands that come before training, up to its start."""
        self.is_over = False
        self.num_batches = self._serve_until(StartTraining).num_batches

    def begin_epoch(self) -> bool:
        """Obey orders until an epoch begins; it may be one that a checkpoint was written in. False at the fit's end."""
        self._rest_between_epochs()
        order = self.inbox.peek()
        if isinstance(order, StartEpoch | End):
            self.inbox.take()
        if isinstance(order, StartEpoch):
            self.num_batches = order.num_batches
        self.is_over = isinstance(order, End)
        return not self.is_over

    def answer_start(self) -> None:
        """Tell that training, or an epoch, has started, with all of the hooks of that."""
        self._tell_of_stop()
        self.inbox.answer(None)

    def await_batch(self) -> Train | None:
        """Obey orders until the next step, or until the epoch is over."""
        order: Train | EndEpoch = self._serve_until(Train, EndEpoch)
        if isinstance(order, EndEpoch):
            return None
        self._batch = order.batch
        return order

    def end_epoch(self) -> None:
        """Tell that all other hooks have been called, and obey what the controller's last callbacks order."""
        self.answer_step()
        self._rest_between_epochs()

    def take_batch(self) -> Any:
        """This rank's share of the step's batch, once."""
        batch, self._batch = self._batch, None
        return batch

    def answer_step(self) -> None:
        """Tell that a step is over, and what it has come to."""
        self._tell_of_stop()
        self.inbox.answer(self._step_result())

    def await_evaluation(self) -> int:
        """Wait for the beginning of a validation, a test, or a prediction; the number of its sets."""
        self.begin_evaluation(self._serve_until(Evaluate))
        return self.num_loaders

    def begin_evaluation(self, order: Evaluate) -> None:
        """From here on batches are those of an evaluation."""
        self.num_loaders, self._is_evaluating = order.num_loaders, True
        self.inbox.answer(None)

    def evaluation_batches(self, loader: int) -> Iterator[Any]:
        """This rank's shares of one set's batches. The end of the evaluation is left for its caller to answer."""
        while self._is_evaluating:
            order = self.inbox.peek()
            if isinstance(order, EvaluateBatch) and order.loader != loader:
                return
            self.inbox.take()
            if isinstance(order, EvaluateBatch):
                yield order.batch
                outputs, self.outputs = self.outputs, None
                self.inbox.answer(outputs)
            elif isinstance(order, EndEvaluation):
                self._is_evaluating = False
            else:
                self._serve(order)

    def _serve_until(self, *kinds: type[Any]) -> Any:
        while not isinstance(order := self.inbox.take(), kinds):
            self._serve(order)
        return order

    def _rest_between_epochs(self) -> None:
        while not isinstance(self.inbox.peek(), StartEpoch | Train | EndEpoch | End):
            self._serve(self.inbox.take())

    def _serve(self, order: Order) -> None:
        if isinstance(order, Evaluate):
            self.begin_evaluation(order)
            metrics = self._evaluate(order)  # which has taken the order to end it
            self._tell_of_stop()
            self.inbox.answer(metrics)
            return
        assert isinstance(order, Load | Save | Call), f"{type(order).__name__} came at the wrong time"
        self.inbox.answer(self._obey(order))


class TrainLoader:
    """The batches of all epochs; the loops know when one is over."""

    def __init__(self, feed: OrderFeed) -> None:
        self.feed = feed

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.feed.take_batch()

    def state_dict(self) -> dict[str, Any]:
        """Nothing, the position is the controller's; without this method Lightning warns of an inexact resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class EvaluationLoader:
    """One set of an evaluation."""

    def __init__(self, feed: OrderFeed, number: int) -> None:
        self.feed = feed
        self.number = number

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        return self.feed.evaluation_batches(self.number)


class WorkerData(LightningDataModule):
    """Stands for the user's data module in a worker: batches come by order, all else is as it was configured.

    Args:
        configured: the user's, which is never set up here.
        feed: where batches come from.
    """

    def __init__(self, configured: Any, feed: OrderFeed) -> None:
        super().__init__()
        self.configured = configured
        self.feed = feed

    def __getattr__(self, name: str) -> Any:
        if name in ("configured", "feed"):  # not there yet, while this is made
            raise AttributeError(name)
        return getattr(self.configured, name)

    def take(self, num_prompts: int) -> Any:
        """Further training prompts for this rank; every rank must take as many."""
        self.feed.inbox.note(PromptsWanted(num_prompts))
        return self.feed.inbox.await_supply()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """As the user's data module does it."""
        return self.configured.transfer_batch_to_device(batch, device, dataloader_idx)

    def train_dataloader(self) -> TrainLoader:
        """The orders to train."""
        return TrainLoader(self.feed)

    def val_dataloader(self) -> list[EvaluationLoader]:
        """The orders to evaluate, a loader a set."""
        if self.trainer is not None and self.trainer.state.fn != "fit":
            self.feed.await_evaluation()
        return [EvaluationLoader(self.feed, number) for number in range(self.feed.num_loaders)]

    test_dataloader = predict_dataloader = val_dataloader
