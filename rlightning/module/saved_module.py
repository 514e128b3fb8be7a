"""SavedModule: stores a module's settings and arguments in checkpoints, and constructs the module from a checkpoint."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningDataModule

from rlightning.config.run_settings import describe_changes
from rlightning.config.secret_arguments import conceal
from rlightning.errors import ConfigError
from rlightning.module.hyperparameters import bind_arguments, make_module, to_plain
from rlightning.module.trainer_options import check_not_spawned
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.parallel.prompt_batches import PromptBatchModule
from rlightning.protocols import StateDict

log = logging.getLogger(__name__)

SETTINGS = "settings"
"""The key of a checkpoint with the settings of its run."""
ARGUMENT_NAMES = "argument_names"
"""Key of a checkpoint with the names of hyperparameters that are the module's arguments; others are the user's."""


class SavedModule(PromptBatchModule):
    """A module whose checkpoints hold its settings and the arguments of its constructor.

    Attributes:
        arguments: arguments of the constructor, by name.
        configuration: all keys of the configuration from which the command line has constructed this module; else
            empty.
    """

    arguments: dict[str, Any]
    configuration: Mapping[str, Any] = {}

    @property
    def settings(self) -> dict[str, object]:
        """The configuration by key, if the command line has constructed this module; empty if other code has."""
        return dict(self.configuration)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Keep the arguments of the constructor for checkpoints."""
        module = super().__new__(cls, *args, **kwargs)
        vars(module)["arguments"] = bind_arguments(cls, args, kwargs)
        return module

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Save the current settings and the constructor's arguments, without objects and secrets."""
        checkpoint[SETTINGS] = self.settings
        checkpoint[ARGUMENT_NAMES] = list(self.arguments)
        key, of_data = self.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY
        checkpoint[key] = dict(checkpoint.get(key, {})) | self.arguments
        for name in (key, of_data):
            if name in checkpoint:
                checkpoint[name] = to_plain(checkpoint[name])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: object = "cpu",
        *,
        strict: bool = True,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Construct and return the module of a checkpoint (a file or a sharded folder), with its weights loaded.

        Args:
            checkpoint_path: the file or folder.
            map_location: the device for the module.
            strict: whether the names of all weights must match.
            weights_only: as in ``torch.load``.
            kwargs: arguments that replace those in the checkpoint. Arguments that a checkpoint cannot contain, such as
                lambdas as reward functions, have their defaults unless given here.

        Raises:
            ConfigError: the path is not a checkpoint of a run, or an argument without a default is missing.
        """
        checkpoint = AtomicCheckpointIO().load_checkpoint(checkpoint_path, "cpu", weights_only)
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            raise ConfigError(
                f"{checkpoint_path} is no checkpoint of a run: it has no 'state_dict'. Name one that a Trainer has "
                f"saved, or make {cls.__name__} of a model's folder."
            )
        saved: StateDict = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
        values = {name: saved[name] for name in checkpoint.get(ARGUMENT_NAMES, saved) if name in saved}
        module = make_module(cls, values, kwargs, f"The checkpoint {checkpoint_path}")
        for name in checkpoint.get(ARGUMENT_NAMES, ()):
            if name not in {*saved, *kwargs}:
                log.warning(
                    "The checkpoint %s does not hold %s, which has no plain value: %s has its default. Give it as "
                    "%s.load_from_checkpoint(..., %s=...).",
                    *(checkpoint_path, name, cls.__name__, cls.__name__, name),
                )
        module.configure_model()
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=strict)
        return module.to(map_location)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copies; raise an error if a strategy pickles the module for a process that it spawns."""
        check_not_spawned()
        return super().__getstate__()

    @property
    def hparams_initial(self) -> AttributeDict:
        """The arguments that ``save_hyperparameters`` has recorded, for loggers and reports, with references in place
        of secrets.
        """
        concealed: AttributeDict = conceal(super().hparams_initial)
        return concealed

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Log the settings that differ from the checkpoint's; the current settings are used."""
        if self._trainer is None or self.trainer.state.fn != "fit" or not self.trainer.is_global_zero:
            return
        changes = describe_changes(checkpoint.get(SETTINGS, {}), self.settings)
        if changes is not None:
            log.info(changes)
