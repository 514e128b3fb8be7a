"""The Trainer of one worker: its settings, its rank, and loops that follow the controller's commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.seed import isolate_rng

from rlightning.controller.command_feed import ENDLESS, CommandFeed
from rlightning.controller.hook_relay import HookRelay
from rlightning.errors import ConfigError
from rlightning.lightning_internals import DataFetcher, FitLoop, TrainingEpochLoop, detects_anomaly


class WorkerEpochLoop(TrainingEpochLoop):
    """The loop of an epoch, which takes its steps from the commands of ``feed``."""

    done = False

    def __init__(self, trainer: Trainer, feed: CommandFeed, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.feed = feed

    def advance(self, data_fetcher: DataFetcher) -> None:
        """Wait for a training step's command and run the step; raise StopIteration if the controller ends the epoch."""
        command = self.feed.await_batch()
        if command is None:
            raise StopIteration
        if command.is_last:
            data_fetcher.length = data_fetcher.fetched + 1  # tells Lightning that this batch is the last
        try:
            super().advance(data_fetcher)
        except StopIteration as stop:
            raise ConfigError(
                "on_train_batch_start returned -1, or a step raised StopIteration, which skips the rest of an epoch, "
                "but a controller counts the epochs of its workers. Set trainer.should_stop, or use strategy fsdp2 or "
                "ddp."
            ) from stop

    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        """Send the step's result, after all of its hooks."""
        super().on_advance_end(data_fetcher)
        self.feed.answer_step()


class WorkerFitLoop(FitLoop):
    """The loop of a fit, which takes its epochs from the commands of ``feed`` and replaces the Trainer's own loop."""

    def __init__(self, trainer: Trainer, feed: CommandFeed) -> None:
        replaced = trainer.fit_loop
        super().__init__(trainer, replaced.min_epochs, replaced.max_epochs)
        self.feed = feed
        self.epoch_loop = WorkerEpochLoop(trainer, feed, replaced.min_steps, replaced.max_steps)

    @property
    def done(self) -> bool:
        """Whether the controller has ended the fit."""
        return self.feed.is_over

    def run(self) -> None:
        """Execute the controller's commands until it starts training, then train."""
        self.feed.begin_fit()
        super().run()

    def setup_data(self) -> None:
        """Set the number of batches of an epoch to the number that the controller sent."""
        super().setup_data()
        self.max_batches = self.feed.num_batches

    def on_run_start(self) -> None:
        """Report to the controller that training has started, after all hooks of its start."""
        super().on_run_start()
        self.feed.answer_start()

    def on_advance_start(self) -> None:
        """Wait until the controller starts or resumes an epoch; raise StopIteration when it ends the fit."""
        if not self.feed.begin_epoch():
            raise StopIteration
        super().on_advance_start()
        self.feed.answer_start()


@dataclass(frozen=True)
class WorkerConfig:
    """The settings that all workers of a run share, taken from the controller's Trainer.

    Attributes:
        module: the user's module, before its weights are loaded.
        data: the data module, before ``setup``.
        strategy: the workers' strategy: an object, a name in Lightning's registry, or a class by its path.
        wanted_hooks: names of the RL hooks that callbacks in the controller override.
        settings: additional arguments of the Trainer (:func:`trainer_settings`).
        checkpoint_io: used by strategies that write a checkpoint as one file.
        fast_dev_run: the Trainer's value, for schedules and callbacks that read it; the limits it implies are in
            ``settings``.
        run_key: key with which trainers authenticate to the run's engines; None without engines in Ray actors.
    """

    module: LightningModule
    data: LightningDataModule | None
    strategy: Strategy | str
    callbacks: Sequence[Callback]
    wanted_hooks: frozenset[str]
    accelerator: str
    precision: object
    settings: dict[str, Any]
    root_dir: str
    checkpoint_io: CheckpointIO | None = None
    seed: int | None = None
    fast_dev_run: bool | int = False
    max_store_bytes: int | None = None
    run_key: str | None = None


@dataclass
class RayEnvironment(ClusterEnvironment):
    """Lightning's cluster environment for workers that Ray has started, with one device each."""

    rank: int = 0
    num_workers: int = 1
    main_address: str = ""
    main_port: int = 0
    creates_processes_externally = True

    @staticmethod
    def detect() -> bool:
        """Return False: this environment is only passed explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return self.num_workers

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number of workers is fixed."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is fixed."""

    def local_rank(self) -> int:
        """Return 0, because each worker has a single visible device."""
        return 0

    def node_rank(self) -> int:
        """Return the rank, because to Lightning each worker is a node with one device."""
        return self.rank


class WorkerTrainer(Trainer):
    """The Trainer of one rank; logging, checkpoints and validation are left to the controller."""

    fast_dev_run: bool | int

    def __init__(self, feed: CommandFeed, **settings: Any) -> None:
        super().__init__(**settings)
        self.feed = feed
        self.fit_loop = WorkerFitLoop(self, feed)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps, by ``trainer.max_steps``.

        Raises:
            ConfigError: if ``trainer.max_epochs`` is set too: only the controller knows the length of an epoch.
        """
        if self.max_epochs != -1:
            raise ConfigError(
                f"trainer.estimated_stepping_batches was asked for with max_epochs={self.max_epochs}, but under a "
                "controller a worker does not know how many batches an epoch has before training starts. Set "
                "trainer.max_steps, and trainer.max_epochs=-1."
            )
        return super().estimated_stepping_batches

    def check_sanity(self) -> None:
        """Run the validation before training when the controller commands it."""
        with isolate_rng():
            super()._run_sanity_check()

    def _run_sanity_check(self) -> None:
        """Do nothing: the controller commands the check."""


def make_trainer(
    config: WorkerConfig, environment: RayEnvironment, feed: CommandFeed, relay: HookRelay
) -> WorkerTrainer:
    """Return the Trainer of one worker, whose loops take their steps from the commands of ``feed``."""
    import rlightning.parallel.fsdp  # noqa: F401  so that Lightning knows fsdp2
    from rlightning.parallel.strategy import replace_lightning_ddp

    replace_lightning_ddp()
    plugins: list[ClusterEnvironment | CheckpointIO] = [environment]
    if config.checkpoint_io is not None:
        plugins.append(config.checkpoint_io)
    strategy = config.strategy
    if isinstance(strategy, str) and "." in strategy:
        strategy = resolve_name(strategy)()
    trainer = WorkerTrainer(
        feed,
        accelerator=config.accelerator,
        devices=1,
        num_nodes=environment.num_workers,
        strategy=strategy,
        precision=config.precision,
        plugins=plugins,
        callbacks=[*config.callbacks, relay],
        num_sanity_val_steps=-1,  # validate on as many batches as the controller sends
        check_val_every_n_epoch=ENDLESS,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=config.root_dir,
        **config.settings,
    )
    trainer.fast_dev_run = config.fast_dev_run  # as an argument it would also set limits, which the controller sets
    return trainer


def trainer_settings(trainer: Trainer) -> dict[str, object]:
    """Return a Trainer's numerical settings and limits on steps and epochs, as arguments for the workers' Trainers."""
    deterministic: bool | str = torch.are_deterministic_algorithms_enabled()
    if deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        deterministic = "warn"
    return {
        "deterministic": deterministic or None,
        "benchmark": torch.backends.cudnn.benchmark or None,
        "detect_anomaly": detects_anomaly(trainer),
        "inference_mode": trainer.validate_loop.inference_mode,
        "max_steps": trainer.max_steps,
        "min_steps": trainer.min_steps,
        "max_epochs": trainer.max_epochs,
        "min_epochs": trainer.min_epochs,
    }
