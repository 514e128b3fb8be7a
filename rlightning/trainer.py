"""The Trainer of a run: Lightning's with this package's defaults, in scripts and on the command line."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, ParamSpec, TypeVar

import lightning.pytorch
from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

import rlightning.parallel.fsdp  # noqa: F401  so that Lightning knows fsdp2
from rlightning.config.argument_checks import check_arguments, check_value
from rlightning.console import quieten
from rlightning.error_report import INTERRUPTED
from rlightning.errors import ConfigError
from rlightning.hooks import check_repeated
from rlightning.lightning_internals import given_checkpoint_io
from rlightning.module.trainer_options import check_options
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.parallel.checkpoint_search import FOLDER, settle_checkpoint
from rlightning.parallel.launcher import check_launch
from rlightning.parallel.stacks import run_folder, start_recorder
from rlightning.parallel.strategy import replace_lightning_ddp
from rlightning.parallel.strategy_names import find_strategy
from rlightning.python_values import to_python
from rlightning.run_dir import new_run_folder
from rlightning.run_lock import check_writable

DEFAULTS: Mapping[str, object] = {
    # The engine validates, and a run validates before its first step: a sanity check would be another validation.
    "num_sanity_val_steps": 0,
    # The run's own block at its start names the model and its size.
    "enable_model_summary": False,
    # The data module spreads prompts over the ranks itself.
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
    "check_val_every_n_epoch": None,
}
"""Defaults that differ from Lightning's, except those that depend on other options; docs/configuration.md has all."""

Options = dict[str, Any]
"""Arguments of Lightning's Trainer, by name."""
OBSERVERS = ("RLProgressBar", "Throughput", "CompletionsTable", "RunReport")
"""Callbacks that are added to a run unless it lists one of the same class."""


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Context manager in which Ctrl-C raises KeyboardInterrupt after clean-up, instead of Lightning's SystemExit."""
    try:
        yield
    except SystemExit as stop:
        was_asked = isinstance(stop, SIGTERMException) and stop.code == INTERRUPTED
        if was_asked or isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


P = ParamSpec("P")
T = TypeVar("T")


def _settling(command: Callable[P, T]) -> Callable[P, T]:
    """Return a command of Lightning's Trainer that first settles its ``ckpt_path``, and raises KeyboardInterrupt at
    Ctrl-C.
    """
    signature = inspect.signature(command)

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(*args, **kwargs)
        trainer: Trainer = given.arguments["self"]
        path = trainer._settle_checkpoint(command.__name__, given.arguments.get("ckpt_path"))
        given.arguments["ckpt_path"] = path
        trainer._has_fitted |= command.__name__ == "fit"
        with raising_interrupts():
            return command(*given.args, **given.kwargs)

    return run


class Trainer(lightning.pytorch.Trainer):
    """Lightning's Trainer with the defaults of ``rlightning fit``. Lightning's own Trainer can be used too.

    Added are the engine, a progress bar or a line for each step, ``Throughput``, ``CompletionsTable``, ``RunReport``,
    metrics of each step as CSV, and checkpoints; all files are in the run's folder. Ctrl-C raises KeyboardInterrupt.

    The commands (``fit``, ``validate``, ``test``, ``predict``) have Lightning's arguments. ``ckpt_path="last"`` is the
    undamaged checkpoint with the highest step, in the run's folder or a ``dirpath`` of its ``ModelCheckpoint``; for a
    fit, one with the optimizer's state. A new fit in a folder with another run's checkpoints raises a ConfigError.

    Args:
        rollout: the rollout callback; None for none; "auto" for a ``VLLMRollout()``, unless ``callbacks`` has a rollout
            callback.
        options: arguments of Lightning's Trainer. ``default_root_dir`` is the run's folder, by default
            ``runs/<date>-<time>``.

    Raises:
        ConfigError: an option is unknown, has the wrong type, or is not supported.
    """

    def __init__(self, *, rollout: Callback | Literal["auto"] | None = "auto", **options: object) -> None:
        check_arguments(lightning.pytorch.Trainer, (), options)
        check_value("Trainer", "rollout", rollout, Callback | Literal["auto"] | None)
        quieten()
        replace_lightning_ddp()
        settled = settle_options({**_lightning_defaults(), **DEFAULTS, **to_python(options)})
        settled["callbacks"] = complete_callbacks(rollout, settled)
        check_repeated(settled["callbacks"])
        super().__init__(**settled)
        start_recorder(run_folder(self.default_root_dir), f"rank {self.global_rank}")
        check_launch(self.num_devices, self.num_nodes)
        for callback in settled["callbacks"]:
            if isinstance(callback, find_callback("ControllerMode")):
                callback.check(self)
        self._has_fitted = False

    fit = _settling(lightning.pytorch.Trainer.fit)
    validate = _settling(lightning.pytorch.Trainer.validate)
    test = _settling(lightning.pytorch.Trainer.test)
    predict = _settling(lightning.pytorch.Trainer.predict)

    def _settle_checkpoint(self, command: str, ckpt_path: str | Path | None) -> str | None:
        """Return the path of the checkpoint to load; after this object's fit, leave None and "best" to Lightning."""
        if self._has_fitted and ckpt_path in (None, "best"):
            return None if ckpt_path is None else "best"
        listed: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        given = None if ckpt_path is None else str(ckpt_path)
        return settle_checkpoint(command, Path(self.default_root_dir), listed, given)


def settle_options(options: Mapping[str, object]) -> Options:
    """Return the options with defaults that depend on other options; raises a ConfigError for an unsupported option."""
    settled: Options = dict(options)
    check_options(settled)
    settled["strategy"] = find_strategy(settled["strategy"])
    folder = os.path.expanduser(settled["default_root_dir"] or new_run_folder())
    if os.path.isfile(folder):
        raise ConfigError(f"trainer.default_root_dir={folder} is a file. Name a folder for the run.")
    settled["default_root_dir"] = folder
    settle_lengths(settled)
    if settled["barebones"]:
        settled["log_every_n_steps"] = settled["num_sanity_val_steps"] = 0  # Lightning rejects the defaults here
    if settled["logger"] in (None, True):
        is_needed = not settled["fast_dev_run"] and not settled["barebones"]
        settled["logger"] = CSVLogger(folder, name="metrics") if is_needed else None
    settled["plugins"] = add_checkpoint_io(settled["plugins"], settled["strategy"])
    if hasattr(settled["strategy"], "take_devices"):  # a controller's workers have the devices
        settled["strategy"].take_devices(settled["accelerator"], settled["devices"], settled["num_nodes"])
        settled |= {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
    return settled


def settle_lengths(options: Options | Namespace) -> None:
    """Set, in place, one epoch if no end of the run is set, and validation after each epoch if no interval is set."""
    if options["max_epochs"] is None and options["max_steps"] == -1 and options["max_time"] is None:
        options["max_epochs"] = 1
    interval = options["val_check_interval"]
    if options["check_val_every_n_epoch"] is None and (interval is None or isinstance(interval, float)):
        options["check_val_every_n_epoch"] = 1


def add_checkpoint_io(plugins: object, strategy: object) -> list[object]:
    """Return the Trainer's plugins, with one that saves single files atomically unless a checkpoint plugin is given."""
    listed = list(plugins) if isinstance(plugins, list | tuple) else [plugins] if plugins else []
    has_one = any(isinstance(plugin, CheckpointIO) for plugin in listed) or given_checkpoint_io(strategy)
    return listed if has_one else [*listed, AtomicCheckpointIO()]


def complete_callbacks(rollout: Callback | Literal["auto"] | None, options: Options) -> list[Callback]:
    """Return the rollout callback, the user's callbacks, then the default callbacks of classes not listed.

    ``options`` are those of :func:`settle_options`, with the user's callbacks.
    """
    listed = options["callbacks"] or []
    callbacks = order_callbacks(listed if isinstance(listed, list) else [listed])
    if rollout == "auto":
        has_one = any(isinstance(callback, find_callback("RolloutCallback")) for callback in callbacks)
        rollout = None if has_one else find_callback("VLLMRollout")()
    if isinstance(rollout, Callback):
        callbacks.insert(0, rollout)
    if options["barebones"]:
        return callbacks
    for name in OBSERVERS:
        kind = find_callback(name)
        taken = ProgressBar if issubclass(kind, ProgressBar) else kind
        is_wanted = options["enable_progress_bar"] is not False or taken is not ProgressBar
        if is_wanted and not any(isinstance(callback, taken) for callback in callbacks):
            callbacks.append(kind())
    folder = Path(options["default_root_dir"]) / FOLDER
    # For every command, not only `fit`: this callback finds `--ckpt_path last`.
    has_checkpoints = options["enable_checkpointing"] is not False
    if has_checkpoints and not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        # Its file names are already unique, and "last" is a link: nothing is written twice.
        callbacks.append(ModelCheckpoint(folder, save_last="link", enable_version_counter=False))
    for callback in callbacks:
        # Lightning's default is a folder of the first logger.
        if not isinstance(callback, ModelCheckpoint):
            continue
        chosen = str(callback.dirpath or folder.resolve())
        callback.dirpath = chosen
        if "://" not in chosen:
            check_writable(Path(chosen), "dirpath of ModelCheckpoint")
    return callbacks


def order_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks with the rollout callback first (:mod:`rlightning.hooks`), the others in their order."""
    rollout = find_callback("RolloutCallback")
    return sorted(callbacks, key=lambda callback: not isinstance(callback, rollout))


def find_callback(name: str) -> type[Any]:
    """Return one of the package's callback classes by name, which is imported only now."""
    kind: type[Any] = resolve_name(f"rlightning.callbacks:{name}")
    return kind


def _lightning_defaults() -> dict[str, object]:
    parameters = inspect.signature(lightning.pytorch.Trainer).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}
