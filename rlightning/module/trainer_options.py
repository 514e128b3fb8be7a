"""Checks of Lightning's Trainer options and callbacks; docs/configuration.md has a table of supported ones."""

import logging
from collections.abc import Iterable, Mapping
from enum import Enum
from multiprocessing.context import get_spawning_popen

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value
from rlightning.hooks import check_repeated
from rlightning.lightning_internals import given_data, has_sync_batchnorm, is_of_tuner, model_registry
from rlightning.parallel.strategy_names import SPAWN_RULE, check_strategy
from rlightning.protocols import HasData, has

log = logging.getLogger(__name__)

REFUSED_CALLBACKS: dict[type[Callback], str] = {
    callbacks.BaseFinetuning: "would add groups to an optimizer whose schedule is set. Freeze parameters in an "
    "override of configure_model",
    callbacks.BatchSizeFinder: "has no batch size to find. Lower model.max_tokens_per_microbatch for memory",
    callbacks.GradientAccumulationScheduler: "has no effect: the model steps its optimizer itself, and accumulates "
    "micro-batches by itself. Set model.prompts_per_step and model.max_tokens_per_microbatch",
    callbacks.LearningRateFinder: "needs Lightning to step the optimizer, and the model does. Compare runs with "
    "several model.lr",
    callbacks.ModelPruning: "would rename the weights that engines are sent. Prune the folder that model.model names",
    callbacks.SpikeDetection: "needs a loss from each training step, which returns none here. Watch policy/loss and "
    "optim/grad_norm; steps whose gradient is not finite are skipped",
    callbacks.StochasticWeightAveraging: "would copy the module before its weights are loaded, and so average none "
    "of them. Average exports of SaveHF (every_n_steps)",
    callbacks.ThroughputMonitor: "would count prompts alone. The default callback Throughput counts what is sampled "
    "and trained on",
    callbacks.WeightAveraging: "would load the model before the strategy has spread it, and put averages into "
    "checkpoints in place of the trained weights. Average exports of SaveHF (every_n_steps), or a copy of module.actor "
    "in a callback of your own",
}
"""Lightning's callbacks that cannot work here, with the reason and an alternative."""


TUNER_METHODS: dict[type[Callback], str] = {
    callbacks.BatchSizeFinder: "scale_batch_size",
    callbacks.LearningRateFinder: "lr_find",
}
"""The methods of Lightning's ``Tuner`` that use these callbacks."""
OWN_STEPS = "has no effect here: the model steps its optimizer itself"
_REFUSED_OPTIONS: dict[str, tuple[object, str]] = {
    "accumulate_grad_batches": (
        1,
        f"{OWN_STEPS}. Lower model.max_tokens_per_microbatch: micro-batches are accumulated by themselves",
    ),
    "gradient_clip_val": (None, f"{OWN_STEPS}. Set model.max_grad_norm={{value}}"),
    "gradient_clip_algorithm": (None, f"{OWN_STEPS}, and clips by norm. Leave it out, and set model.max_grad_norm"),
    "sync_batchnorm": (False, "has no effect: language models have no such layer. Leave it out"),
    "model_registry": (None, "needs Lightning's cloud service. Leave it out, and upload what SaveHF writes"),
}
"""Trainer options that would have no effect, each with its default and an alternative."""


def check_trainer(trainer: Trainer) -> None:
    """Raise a ConfigError for Trainer options that Lightning ignores or misapplies under manual optimization."""
    if trainer.precision == "bf16-true":
        log.warning(
            "trainer.precision=bf16-true keeps the weights themselves in bfloat16, which rounds off updates below "
            "1/256 of a weight or so: at a small lr nothing is learned. Use bf16-mixed."
        )
    check_unused_options(
        {
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "sync_batchnorm": has_sync_batchnorm(trainer),
            "model_registry": model_registry(trainer),
        }
    )
    listed: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    check_repeated(listed)
    check_callbacks(listed)


def check_not_spawned() -> None:
    """Raise a ConfigError if a strategy such as ``ddp_spawn`` pickles the module for a process that it spawns."""
    if get_spawning_popen() is not None:
        raise ConfigError(f"trainer.strategy {SPAWN_RULE}")


_DATA = {
    "fit": ("train_dataloader", "rows"),
    "validate": ("val_dataloader", "validation=rows"),
    "test": ("test_dataloader", "validation=rows"),
    "predict": ("predict_dataloader", "predict=rows"),
}
"""By command, the hook that returns the batches, and the data module's argument for their prompts."""


def check_data_source(trainer: Trainer, module: LightningModule) -> None:
    """Raise a ConfigError if the Trainer has no data module but, for example, a loader, whose batches are not prompts.
    A module that overrides the loader's hook needs no data module.
    """
    assert trainer.state.fn is not None
    command = trainer.state.fn.value
    hook, argument = _DATA[command]
    has_data = has(trainer, HasData) and trainer.datamodule is not None
    if not has_data and not is_overridden(hook, module, LightningModule):
        given = given_data(trainer, command)
        what = "it is given no data" if given is None else f"{cut_value(given)} is no data module"
        whose = "the loader's rows" if isinstance(given, DataLoader) else "the rows, or the path of their file,"
        raise ConfigError(
            f"trainer.{command}() has no prompts: {what}, from which {type(module).__name__} takes them. Give {whose} "
            f"as trainer.{command}(module, datamodule=PromptDataModule({argument}))."
        )


def check_options(options: Mapping[str, object]) -> None:
    """Raise a ConfigError for unsupported Trainer options, as the user gave them, before the Trainer is constructed."""
    check_strategy(options["strategy"])
    check_unused_options(options)


def check_unused_options(options: Mapping[str, object]) -> None:
    """Raise a ConfigError for float16 and for Trainer options that would have no effect."""
    check_precision(options["precision"])
    for name, (default, reason) in _REFUSED_OPTIONS.items():
        given = options[name]
        if given != default:
            value = str(given).lower() if isinstance(given, bool) else given.value if isinstance(given, Enum) else given
            raise ConfigError(f"trainer.{name}={value} {reason.format(value=value)}.")


def check_callbacks(listed: Iterable[Callback | type]) -> None:
    """Raise a ConfigError if a callback, or a callback class, is one of Lightning's that cannot work with RLModule."""
    for callback in listed:
        kind = callback if isinstance(callback, type) else type(callback)
        for refused, reason in REFUSED_CALLBACKS.items():
            if not issubclass(kind, refused):
                continue
            if isinstance(callback, Callback) and is_of_tuner(callback):
                raise ConfigError(f"Tuner.{TUNER_METHODS[refused]} {reason}.")
            raise ConfigError(f"trainer.callbacks: {kind.__name__} {reason}.")


def check_precision(precision: object) -> None:
    """Raise a ConfigError for float16 in the user's option: on a CPU, Lightning replaces it by bfloat16."""
    if str(precision) in ("16", "16-mixed", "16-true"):
        raise ConfigError(
            f"trainer.precision={precision} needs a scaled loss, which this step's is not. Use bf16-mixed."
        )
