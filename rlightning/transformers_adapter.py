"""rlightning's callbacks in a transformers ``Trainer``."""

from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainerCallback

from rlightning.hooks import call_hook


class TransformersAdapter(TrainerCallback):
    """Calls rlightning's callbacks on events of a transformers ``Trainer``, and gives them access to its attributes::

        adapter = TransformersAdapter(trainer, [EmptyCacheAfterUpdate(), OffloadDuringRollout()])
        trainer.add_callback(adapter)

    Callbacks get the adapter as their ``trainer``. ``setup`` and ``teardown`` are called before and after ``train()``,
    and ``on_update_end`` with batch None after each micro-batch. A Trainer that samples calls the hooks of a rollout in
    its ``training_step``: ``call_hook(adapter, model, "on_rollout_start", prompts)``, and so on (docs/callbacks.md).
    Other attributes are the Trainer's, such as ``optimizer``, and ``accelerator`` for device and barrier.

    Args:
        trainer: the transformers ``Trainer``.
        callbacks: callbacks of :mod:`rlightning.callbacks`, except those that need Lightning's Trainer.
    """

    loggers: Sequence[object] = ()

    def __init__(self, trainer: Trainer, callbacks: Sequence[object]) -> None:
        self.trainer, self.callbacks = trainer, list(callbacks)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the transformers ``Trainer``."""
        if name == "trainer":  # a copy that is not initialised yet
            raise AttributeError(name)
        return getattr(self.trainer, name)

    @property
    def global_step(self) -> int:
        """The number of finished optimizer steps."""
        return int(self.trainer.state.global_step)

    @property
    def default_root_dir(self) -> str:
        """The run's folder: ``output_dir``."""
        return str(self.trainer.args.output_dir)

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return int(self.trainer.args.process_index)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self.trainer.args.world_size)

    def on_train_begin(self, args: object, state: object, control: object, **given: object) -> None:
        """Call the callbacks' ``setup``; called when the model and the optimizer are on the device."""
        call_hook(self, given["model"], "setup", "fit")

    def on_substep_end(self, args: object, state: object, control: object, **given: object) -> None:
        """Call the callbacks' ``on_update_end`` after each micro-batch that is not the last of an optimizer step."""
        call_hook(self, given["model"], "on_update_end", None)

    def on_step_end(self, args: object, state: object, control: object, **given: object) -> None:
        """Call the callbacks' ``on_update_end``; called after the optimizer's step."""
        call_hook(self, given["model"], "on_update_end", None)

    def on_train_end(self, args: object, state: object, control: object, **given: object) -> None:
        """Call the callbacks' ``on_train_end`` and ``teardown``; called when training has ended."""
        call_hook(self, given["model"], "on_train_end")
        call_hook(self, given["model"], "teardown", "fit")
