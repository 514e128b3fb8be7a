"""The module in a controller: it has the real module's configuration, and sends commands to the workers."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from rlightning.controller.commands import EndEvaluation, StartEpoch, StartTraining
from rlightning.controller.strategy import ControllerStrategy
from rlightning.parallel.prompt_batches import PromptBatchModule, log_epoch_step
from rlightning.parallel.trainer_stages import ValidatesFirst, validate_in_fit
from rlightning.protocols import HasPlan, HasWeightVersion, has


class ControllerModule(PromptBatchModule):
    """The module of the controller's Trainer and callbacks, without weights, in place of the user's module.

    It has the attributes of the configured module. The real module's hooks run in the workers; the hooks of this class
    send commands, and log the workers' metrics.
    """

    configured: LightningModule
    strategy: ControllerStrategy

    def __init__(self, configured: LightningModule, strategy: ControllerStrategy) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.__dict__["configured"] = configured  # as a child module it would be moved, counted and saved
        self.strategy = strategy
        strategy.weight_version = configured.weight_version if has(configured, HasWeightVersion) else 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["configured"], name)

    @property
    def weight_version(self) -> int:
        """The weight version of the workers' modules."""
        return self.strategy.weight_version

    def configure_callbacks(self) -> list[Callback]:
        """Return the user's module's callbacks; raise a ConfigError if its prompts cannot be split over the workers."""
        if self.trainer.state.fn == "fit" and has(self.configured, HasPlan):
            self.configured.plan.check_world_size(self.strategy.count_workers())
        made = self.configured.configure_callbacks()
        return [made] if isinstance(made, Callback) else list(made)

    def save_hf(self, path: str | Path) -> None:
        """Have the workers write the actor as a Hugging Face folder."""
        self.strategy.call("save_hf", path)

    def save_adapter(self, path: str | Path) -> None:
        """Have the workers write the adapter as a folder in PEFT's format."""
        self.strategy.call("save_adapter", path)

    # Hooks: Lightning checks whether they are defined.

    def configure_optimizers(self) -> None:
        """Return None: the optimizers are in the workers."""

    def training_step(self, batch: object, batch_idx: int) -> None:
        """Do nothing: the strategy sends the step as a command."""

    def validation_step(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Do nothing: the strategy sends the step as a command."""

    test_step = predict_step = validation_step

    def on_train_start(self) -> None:
        """Start training in the workers, and validate before the first step if the real module would."""
        self.strategy.execute_all(StartTraining(self.trainer.num_training_batches))
        is_wanted = has(self.configured, ValidatesFirst) and self.configured.validate_first
        if is_wanted and self.trainer.global_step == 0 and self.trainer.enable_validation:
            validate_in_fit(self.trainer)

    def on_train_epoch_start(self) -> None:
        """Start the epoch in the workers."""
        self.strategy.execute_all(StartEpoch(self.trainer.num_training_batches))

    def on_train_epoch_end(self) -> None:
        """End the epoch in the workers."""
        self.strategy.end_epoch()
        log_epoch_step(self.trainer, self)

    def on_validation_epoch_end(self) -> None:
        """End the validation in the workers, and log rank 0's metrics."""
        (metrics, *_) = self.strategy.execute_all(EndEvaluation())
        self.log_dict(metrics)

    on_test_epoch_end = on_validation_epoch_end

    def on_predict_epoch_end(self) -> None:
        """End the prediction in the workers."""
        self.strategy.execute_all(EndEvaluation())
