"""A small SFT run whose Trainer has chosen options, and what could be seen of them from inside."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from tiny import bare_trainer, make_data

from rlightning.algorithms import SFT


class Witness(Callback):
    """Notes what happens in a run.

    Attributes:
        prompts: of each training step.
        validated: the step of each validation, but those of the sanity check.
        num_batches: of each kind of evaluation.
        modes: of a training step: autocast's dtype, and whether anomalies are detected.
        inference: whether validation ran in inference mode.
    """

    def __init__(self, *, stops_at: int | None = None) -> None:
        self.stops_at = stops_at
        self.prompts: list[list[str]] = []
        self.validated: list[int] = []
        self.num_batches = dict.fromkeys(("sanity", "validation", "test", "predict"), 0)
        self.modes: set[tuple[torch.dtype | None, bool]] = set()
        self.inference: set[bool] = set()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        def note(*args: Any) -> None:
            if torch.is_grad_enabled():
                dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
                self.modes.add((dtype, torch.is_anomaly_enabled()))

        pl_module.loaded_actor.get_input_embeddings().register_forward_pre_hook(note)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.prompts.append([prompt.text for prompt in batch])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if self.stops_at is not None and trainer.global_step >= self.stops_at:
            trainer.should_stop = True

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.num_batches["sanity" if trainer.sanity_checking else "validation"] += 1
        self.inference.add(torch.is_inference_mode_enabled())

    def on_test_batch_end(self, *args: Any) -> None:
        self.num_batches["test"] += 1

    def on_predict_batch_end(self, *args: Any) -> None:
        self.num_batches["predict"] += 1

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


class EchoingSFT(SFT):
    """Has something to predict."""

    def predict_step(self, prompts: Any, batch_idx: int) -> Any:
        return [prompt.text for prompt in prompts]


def make_module(model: str, lr_schedule: str = "linear") -> EchoingSFT:
    settings: dict[str, Any] = {"prompts_per_step": 4, "lr": 0.01, "lr_schedule": lr_schedule, "warmup_steps": 1}
    module = EchoingSFT(model, completion_column="answer", **settings)
    module.save_hyperparameters({"word": "x"})
    return module


def make_rows(folder: Path) -> Any:
    """Sixteen prompts to train on, four steps an epoch; the same to validate and predict, four batches."""
    path = str(folder / "sums.jsonl")
    return make_data(folder, validation=path, predict=path, validation_batch_size=4)


def fit(folder: Path, model: str, *listed: Callback, **options: Any) -> Trainer:
    """Two steps, unless the options say otherwise."""
    options = {"max_steps": 2} | options
    trainer = bare_trainer(folder, options.pop("max_steps"), *listed, **options)
    trainer.fit(make_module(model, "linear" if trainer.max_steps > 0 else "constant"), datamodule=make_rows(folder))
    return trainer
