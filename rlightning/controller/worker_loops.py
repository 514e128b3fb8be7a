"""Lightning's loops in a worker: they go on, and end, when the controller's do.

::

    controller                                worker
    restore        -- Load ---------------->
    sanity check   -- Evaluate ... -------->  begin_fit      WorkerTrainer.check_sanity
    on_train_start -- StartTraining ------->                 on_train_start
    epoch          -- StartEpoch ---------->  begin_epoch    on_train_epoch_start
      step         -- Train --------------->    await_batch    batch hooks, training_step
                   -- EndEpoch ------------>    await_batch  on_train_epoch_end
    on_train_end   -- End ----------------->  begin_epoch    on_train_end

Between these a fit is at rest, and :class:`~rlightning.controller.command_feed.OrderFeed` obeys all other orders.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from rlightning.controller.command_feed import OrderFeed
from rlightning.errors import ConfigError


class WorkerEpochLoop(_TrainingEpochLoop):
    """The steps of an epoch, as they are ordered.

    Args:
        trainer: the worker's.
        feed: where orders come from.
        min_steps: the run's, for whoever asks.
        max_steps: the run's, for whoever asks.
    """

    done = False

    def __init__(self, trainer: Trainer, feed: OrderFeed, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.feed = feed

    def advance(self, data_fetcher: Any) -> None:
        """One step."""
        order = self.feed.await_batch()
        if order is None:
            raise StopIteration
        if order.is_last:
            data_fetcher.length = data_fetcher.fetched + 1  # from which Lightning knows it
        try:
            super().advance(data_fetcher)
        except StopIteration as stop:
            raise ConfigError(
                "on_train_batch_start returned -1, or a step raised StopIteration, which skips the rest of an epoch, "
                "but a controller counts the epochs of its workers. Set trainer.should_stop, or use strategy fsdp2 or "
                "ddp."
            ) from stop

    def on_advance_end(self, data_fetcher: Any) -> None:
        """The step is over, with all of its hooks."""
        super().on_advance_end(data_fetcher)
        self.feed.answer_step()


class WorkerFitLoop(_FitLoop):
    """The epochs of a fit, as they are ordered.

    Args:
        trainer: the worker's, whose own loop this replaces.
        feed: where orders come from.
    """

    def __init__(self, trainer: Trainer, feed: OrderFeed) -> None:
        replaced = trainer.fit_loop
        super().__init__(trainer, replaced.min_epochs, replaced.max_epochs)
        self.feed = feed
        self.epoch_loop = WorkerEpochLoop(trainer, feed, replaced.min_steps, replaced.max_steps)

    @property
    def done(self) -> bool:
        """It is for the controller to say."""
        return self.feed.is_over

    def run(self) -> None:
        """Obey what comes before training, and train."""
        self.feed.begin_fit()
        super().run()

    def setup_data(self) -> None:
        """An epoch has as many batches as the controller's."""
        super().setup_data()
        self.max_batches = self.feed.num_batches

    def on_run_start(self) -> None:
        """Called when training starts."""
        super().on_run_start()
        self.feed.answer_start()

    def on_advance_start(self) -> None:
        """Called when an epoch starts, or goes on from a checkpoint."""
        if not self.feed.begin_epoch():
            raise StopIteration
        super().on_advance_start()
        self.feed.answer_start()
