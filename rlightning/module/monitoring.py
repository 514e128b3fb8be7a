"""Lightning's callbacks that monitor a metric, for modules with manual optimization.

With manual optimization Lightning's ``ModelCheckpoint`` ignores ``train_time_interval``, and uses the metric's value of
an earlier validation. :func:`adapt_monitoring` changes the class of such callback objects to those of this module,
which use a metric only in the step that logged it.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.disk import needed
from rlightning.errors import ConfigError, did_you_mean
from rlightning.lightning_internals import epoch_results
from rlightning.module.metric_names import find_names, is_among
from rlightning.parallel.stop_signal import stop_signal
from rlightning.protocols import callbacks_of, has

if TYPE_CHECKING:
    from rlightning.module.evaluation import EvaluationSteps

log = logging.getLogger(__name__)


class _StandsForModule(Protocol):
    """A controller's module, which stands in for the module that the user configured."""

    @property
    def configured(self) -> object: ...


def adapt_monitoring(callbacks: Iterable[Callback]) -> None:
    """Change the class of each ``ModelCheckpoint`` to :class:`StepCheckpoint`, and of each ``EarlyStopping`` to
    :class:`StepEarlyStopping`, in place; methods that a user's subclass overrides are kept.
    """
    for callback in callbacks:
        for base, own in ((ModelCheckpoint, StepCheckpoint), (EarlyStopping, StepEarlyStopping)):
            kind = type(callback)
            if isinstance(callback, base) and not isinstance(callback, own):
                names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
                adapted: Any = own if kind is base else type(kind.__name__, (kind, own), names)
                callback.__class__ = adapted


def check_monitors(trainer: Trainer, module: "EvaluationSteps") -> None:
    """Raise a ConfigError if a callback monitors a metric that the run cannot log; only if all metrics of the run are
    known in advance.
    """
    names = find_names(trainer, module)
    if names is None:
        return
    for callback in callbacks_of(trainer):
        if not isinstance(callback, ModelCheckpoint | EarlyStopping):
            continue
        is_needed = isinstance(callback, ModelCheckpoint) or callback.strict
        if is_needed and callback.monitor not in (None, "epoch", "step") and not is_among(callback.monitor, names):
            raise ConfigError(_unknown(callback, callback.monitor, names))


def has_validation(trainer: Trainer) -> bool:
    """Return whether this fit runs validations."""
    batches = trainer.num_val_batches
    return bool(trainer.enable_validation) and sum(batches if isinstance(batches, list) else [batches]) > 0


class _Monitor:
    """Tracks whether the current step has logged the monitored metric, and whether any step does."""

    monitor: Any  # a name, or None: Lightning's two classes differ
    _validated_step = -1
    _has_trained = False
    _is_known = False

    def _generate_state_key(self, **kwargs: object) -> str:
        """Return the key of the state in Lightning's checkpoints, as for the class that the user listed."""
        return f"{_name_of(self)}{kwargs!r}"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Raise a ConfigError if a step has ended, the monitored metric was never logged, and neither the first
        validation nor the end of the first epoch can still log it.
        """
        if self._has_trained and not self._is_known:
            self._check_name(trainer, pl_module)

    def _check_name(self, trainer: Trainer, module: LightningModule) -> None:
        if self.monitor is None or self.monitor in self._metrics(trainer):
            self._is_known = True
            return
        if has_validation(trainer) and self._validated_step < 0:
            return
        if trainer.current_epoch == 0 and logs_at_epoch_end(trainer, module):
            return
        raise ConfigError(_unknown(self, self.monitor, self._metrics(trainer)))

    def _metrics(self, trainer: Trainer) -> set[str]:
        return {*trainer.callback_metrics, "epoch", "step"}

    def _note_validation(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def _is_logged(self, trainer: Trainer) -> bool:
        """Whether the monitored metric, if there is one, was logged in this step."""
        if self.monitor in (None, "epoch", "step"):
            return True
        if self._validated_step == trainer.global_step:
            return self.monitor in trainer.callback_metrics
        return self.monitor in _training_metrics(trainer)


def _name_of(callback: object) -> str:
    """The name of the class that the user listed."""
    kind = type(callback)
    return kind.__qualname__ if kind.__module__ != __name__ else kind.__mro__[2].__qualname__


def _unknown(callback: object, monitor: str, metrics: Iterable[str]) -> str:
    return f"{_name_of(callback)}.monitor='{monitor}' is not a metric of this run. {did_you_mean(monitor, metrics)}"


def _training_metrics(trainer: Trainer) -> set[str]:
    """Names of the metrics that this epoch's training steps log."""
    names = {metric.meta.name for _, metric in epoch_results(trainer).valid_items()}
    return {f"{name}{fork}" for name in names for fork in ("", "_step", "_epoch")}


def logs_at_epoch_end(trainer: Trainer, module: object) -> bool:
    """Return whether a user's code overrides ``on_train_epoch_end``, so that it may log a metric for the first time
    there.
    """
    configured = module.configured if has(module, _StandsForModule) else module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    own = [type(c) for c in callbacks if not type(c).__module__.startswith(("lightning.", "rlightning."))]
    return is_overridden("on_train_epoch_end", configured, LightningModule) or any(
        kind.on_train_epoch_end is not Callback.on_train_epoch_end for kind in own if not issubclass(kind, _Monitor)
    )


class StepCheckpoint(_Monitor, ModelCheckpoint):
    """A ``ModelCheckpoint`` that saves by steps or time, with a metric of that step, and always saves the last state.

    A save that is due in a step without the monitored metric happens at the next validation. The last state is saved at
    the end of the run, also when SIGTERM or Ctrl-C ends it, except with ``save_top_k=0`` and without ``save_last``.
    """

    _is_due = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the interval of ``train_time_interval``, and treat the state at the fit's start as saved."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save after every n-th step, or when the time interval has passed."""
        self._has_trained = True
        self._is_due |= self._is_triggered(trainer)
        self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a validation if a save is due then, or was due in an earlier step that had not logged the
        monitored metric.
        """
        self._note_validation(trainer)
        if not self._should_skip_saving_checkpoint(trainer) and not self._should_save_on_train_epoch_end(trainer):
            self._is_due |= self._is_epoch_due(trainer)
        self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end of an epoch, if a save is due."""
        if self._save_on_train_epoch_end is not False and self._is_epoch_due(trainer) and self._is_logged(trainer):
            self._is_due = True
        self._save_if_due(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a checkpoint of the last state, if this callback keeps it; warn if the metric was never logged."""
        self._save_last_state(trainer)
        if self.monitor is not None and self.monitor not in self._metrics(trainer):
            log.warning("%s No checkpoint was chosen by it.", _unknown(self, self.monitor, self._metrics(trainer)))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save a last checkpoint when SIGTERM or Ctrl-C ends the run, unless it interrupted an update."""
        is_stopped = isinstance(exception, SIGTERMException)
        if isinstance(exception, KeyboardInterrupt) and trainer.world_size == 1:
            is_stopped = stop_signal(trainer).can_interrupt
        if is_stopped and trainer.state.fn == TrainerFn.FITTING:
            self._save_last_state(trainer)
        super().on_exception(trainer, pl_module, exception)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best checkpoints, at most ``save_top_k`` of them."""
        super().load_state_dict(state_dict)
        if self.monitor is not None and 0 < self.save_top_k <= len(self.best_k_models):
            best_first = sorted(
                self.best_k_models, key=lambda path: float(self.best_k_models[path]), reverse=self.mode == "max"
            )
            self.best_k_models = {path: self.best_k_models[path] for path in best_first[: self.save_top_k]}
            self.kth_best_model_path = best_first[self.save_top_k - 1]
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _is_triggered(self, trainer: Trainer) -> bool:
        every, interval = self._every_n_train_steps, self._train_time_interval
        is_over = False
        if interval is not None:
            now = time.monotonic()
            assert self._last_time_checked is not None
            # clocks of ranks differ
            is_over = bool(trainer.strategy.broadcast(now - self._last_time_checked >= interval.total_seconds()))
            if is_over:
                self._last_time_checked = now
        return is_over or (every > 0 and trainer.global_step % every == 0)

    def _is_epoch_due(self, trainer: Trainer) -> bool:
        every = self._every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is None and not has_validation(trainer):
            return True
        return super()._should_save_on_train_epoch_end(trainer)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        stop_signal(trainer).keep_step()  # a save that has started must end
        super()._save_checkpoint(trainer, filepath)

    def _save_if_due(self, trainer: Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            self._is_due = False  # even if this step is already saved
        if not self._is_due or not self._is_logged(trainer):
            return
        self._is_due = False
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        if self._last_global_step_saved != trainer.global_step:
            self._last_checkpoint_saved = ""  # a link would lead to an earlier step
        folder = Path(self.dirpath or trainer.default_root_dir)
        with needed("The link to the newest checkpoint in", folder, "The checkpoints are kept: make room, and go on."):
            super()._save_last_checkpoint(trainer, monitor_candidates)

    def _save_last_state(self, trainer: Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer) or not self._keeps_last_state(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        # The last step's epoch: once that is over, the trainer's is the next one.
        candidates["epoch"] = torch.tensor(max(trainer.fit_loop.epoch_progress.current.ready - 1, 0))
        if self.monitor is None and self.save_top_k != 0:
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
            return
        chosen, self.save_last = self.save_last, self.save_last or True
        try:
            self._save_last_checkpoint(trainer, candidates)
        finally:
            self.save_last = chosen

    def _keeps_last_state(self, trainer: Trainer) -> bool:
        """Whether this callback saves the last state: its arguments ask for it, or no other callback does it."""
        if self._saves_all_ends:
            return True
        others = [c for c in trainer.checkpoint_callbacks if isinstance(c, StepCheckpoint) and c is not self]
        is_saved = any(c._saves_all_ends or c._last_global_step_saved == trainer.global_step for c in others)
        return not is_saved and self.save_top_k != 0

    @property
    def _saves_all_ends(self) -> bool:
        return bool(self.save_last) or (self.monitor is None and self.save_top_k != 0)


class StepEarlyStopping(_Monitor, EarlyStopping):
    """An ``EarlyStopping`` that checks, as Lightning's, after validations or at an epoch's end, but counts no value
    twice: it uses the metric only if that step logged it.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record that a training step has ended, from which on the monitored metric should be known."""
        self._has_trained = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric after a validation, unless it is to be checked at the end of each epoch."""
        self._note_validation(trainer)
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric at an epoch's end, if that is configured or the fit has no validation."""
        if not self._check_on_train_epoch_end and not has_validation(trainer):
            self._run_early_stopping_check(trainer)
        super().on_train_epoch_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and the number of checks without improvement; ``patience`` stays that of this run."""
        patience = self.patience
        super().load_state_dict(state_dict)
        self.patience = patience

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if self._is_logged(trainer):
            super()._run_early_stopping_check(trainer)

    def _check_name(self, trainer: Trainer, module: LightningModule) -> None:
        if self.strict:
            super()._check_name(trainer, module)

    def _metrics(self, trainer: Trainer) -> set[str]:
        return set(trainer.callback_metrics)
