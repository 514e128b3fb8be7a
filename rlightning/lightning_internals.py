"""Private names of Lightning that have no public equivalent; tests/test_library_internals.py checks each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_device_properties
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS as Metrics  # noqa: N811
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as Results
from lightning.pytorch.utilities.seed import isolate_rng
from torch.distributed.device_mesh import DeviceMesh

__all__ = [  # what is imported here under another name
    "CheckpointConnector",
    "DataFetcher",
    "FitLoop",
    "Launcher",
    "Metrics",
    "Results",
    "SubprocessLauncher",
    "TrainingEpochLoop",
    "update_device_properties",
]


def is_amid_step(fit_loop: FitLoop) -> bool:
    """Whether a training step has begun and has not ended."""
    progress = fit_loop.epoch_loop.batch_progress.current
    assert isinstance(progress, ProcessedTracker)
    return progress.ready > progress.processed


def given_data(trainer: Trainer, command: str) -> object:
    """Return the data loaders or the data module that a Trainer's command (such as "fit") uses; None if it was given
    neither.
    """
    loops: dict[str, FitLoop | EvaluationLoop | PredictionLoop] = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    given: object = loops[command]._data_source.instance
    return None if isinstance(given, LightningModule) else given


def is_of_tuner(callback: Callback) -> bool:
    """Return whether a method of Lightning's ``Tuner`` has added the callback, and not the user."""
    return isinstance(callback, LearningRateFinder | BatchSizeFinder) and callback._early_exit


def replace_signal_handling(
    trainer: Trainer, *, handler: Callable[[int, FrameType | None], None], before_batch: Callable[[], None]
) -> None:
    """Make a Trainer call ``handler`` at SIGTERM, and call ``before_batch`` before each batch in place of its own check
    whether any rank has received SIGTERM.
    """
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign, assignment]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]


def set_received_sigterm(trainer: Trainer) -> None:
    """Have the Trainer stop before its next batch, as after SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def replace_prepare_data(trainer: Trainer, prepare: Callable[[], None]) -> None:
    """Make the Trainer call ``prepare`` in place of the ``prepare_data`` hooks."""
    trainer._data_connector.prepare_data = prepare  # type: ignore[method-assign]


def restore_module_modes(trainer: Trainer, module: LightningModule) -> None:
    """Set the submodules to train or eval mode as before the current evaluation; does nothing outside of one."""
    loop = trainer._active_loop
    is_evaluating = trainer.sanity_checking or trainer.evaluating or trainer.predicting
    if is_evaluating and isinstance(loop, EvaluationLoop | PredictionLoop):
        loop._module_mode.restore(module)


def last_saved(trainer: Trainer) -> tuple[int, str]:
    """Return step and path of the last checkpoint that the Trainer's callbacks saved; path "" if there is none."""
    saved = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    found = [(callback._last_global_step_saved, str(callback._last_checkpoint_saved)) for callback in saved]
    return max((entry for entry in found if entry[1]), key=lambda entry: entry[0], default=(0, ""))


def results_of(module: LightningModule) -> Results | None:
    """Return the metrics logged in the current loop; None outside of a loop."""
    return None if module._trainer is None else module._trainer._results


def epoch_results(trainer: Trainer) -> Results:
    """Return the metrics logged in the training epoch."""
    return trainer.fit_loop.epoch_loop._results


def logged_metrics(trainer: Trainer) -> Metrics:
    """Return the metrics of the last step, for the callbacks, the logger and the progress bar."""
    return trainer._logger_connector.metrics


def checkpoint_connector(trainer: Trainer) -> CheckpointConnector:
    """Return the part of a Trainer that reads and writes checkpoints."""
    return trainer._checkpoint_connector


def loaded_checkpoint(connector: CheckpointConnector) -> dict[str, Any]:
    """Return the checkpoint that is being loaded."""
    return connector._loaded_checkpoint


def detects_anomaly(trainer: Trainer) -> bool:
    """Return the Trainer's argument ``detect_anomaly``."""
    return trainer._detect_anomaly


def has_sync_batchnorm(trainer: Trainer) -> bool:
    """Return the Trainer's argument ``sync_batchnorm``."""
    return trainer._accelerator_connector._layer_sync is not None


def model_registry(trainer: Trainer) -> str | None:
    """Return the Trainer's argument ``model_registry``."""
    return trainer._model_registry


def ddp_options(strategy: DDPStrategy) -> Mapping[str, object]:
    """Return the strategy's arguments for ``DistributedDataParallel``."""
    return strategy._ddp_kwargs


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the Trainer that a module is attached to, or None, where ``module.trainer`` would raise an error."""
    return module._trainer


def given_checkpoint_io(strategy: object) -> CheckpointIO | None:
    """Return the checkpoint plugin passed to a strategy; None without one, and then none is created."""
    return strategy._checkpoint_io if isinstance(strategy, Strategy) else None


def teardown(trainer: Trainer) -> None:
    """Undo the set-up of a stage (fit, test, ...), as the Trainer does at the stage's end."""
    trainer._teardown()


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set the module's ``device_mesh``, as Lightning's own strategy with several dimensions does."""
    module._device_mesh = mesh


@contextmanager
def without_cuda_rng() -> Iterator[None]:
    """Context manager in which a Trainer does not save and restore CUDA's random state, which it otherwise does in a
    fit for all devices.
    """
    trainer_module.isolate_rng = partial(isolate_rng, include_cuda=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer_module.isolate_rng = isolate_rng  # type: ignore[attr-defined]
