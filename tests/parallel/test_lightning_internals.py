"""Lightning's private names that this package uses: an upgrade that moves one is told here, by all of them at once."""

from importlib import import_module

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

TRAINER = (
    "_accelerator_connector._layer_sync",
    "_active_loop",
    "_checkpoint_connector._loaded_checkpoint",
    "_data_connector.prepare_data",
    "_detect_anomaly",
    "_evaluation_loop",
    "_logger_connector",
    "_model_registry",
    "_results",
    "_run_sanity_check",
    "_signal_connector._sigterm_notifier_fn",
    "_signal_connector.received_sigterm",
    "_teardown",
    "fit_loop.epoch_loop._broadcast_sigterm_tensor",
    "fit_loop.epoch_loop._results",
    "predict_loop._module_mode",
    "validate_loop._module_mode",
)
OBJECTS = {
    ModelCheckpoint: (
        "_every_n_epochs",
        "_every_n_train_steps",
        "_last_checkpoint_saved",
        "_last_global_step_saved",
        "_monitor_candidates",
        "_save_on_train_epoch_end",
        "_save_topk_checkpoint",
        "_should_skip_saving_checkpoint",
        "_train_time_interval",
    ),
    EarlyStopping: ("_check_on_train_epoch_end", "_should_skip_check"),
    DDPStrategy: ("_ddp_kwargs", "_launcher"),
    ModelParallelStrategy: ("_device_mesh", "_setup_distributed"),
    SingleDeviceStrategy: ("_accelerator", "_checkpoint_io", "_launcher"),
    CSVLogger: ("_experiment",),
}
ARGUMENTS = {
    EarlyStopping: {"monitor": "val/sums/reward"},
    SingleDeviceStrategy: {"device": "cpu"},
    CSVLogger: {"save_dir": "unused"},
}
MODULES = {
    "lightning.fabric.utilities.device_dtype_mixin": ("_update_properties",),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop",),
    "lightning.pytorch.loops.fit_loop": ("_FitLoop",),
    "lightning.pytorch.loops.prediction_loop": ("_PredictionLoop",),
    "lightning.pytorch.loops.progress": ("_ProcessedTracker",),
    "lightning.pytorch.loops.training_epoch_loop": ("_TrainingEpochLoop",),
    "lightning.pytorch.strategies.launchers": ("_SubprocessScriptLauncher",),
    "lightning.pytorch.strategies.launchers.launcher": ("_Launcher",),
}


def test_private_names_of_lightning_are_where_they_were() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", devices=1)
    moved = []
    for path in TRAINER:
        *owners, name = path.split(".")
        owner: object = trainer
        for part in owners:
            owner = getattr(owner, part, None)
        if name not in dir(owner):
            moved.append(f"Trainer.{path}")
    for kind, names in OBJECTS.items():
        made = kind(**ARGUMENTS.get(kind, {}))
        moved += [f"{kind.__name__}.{name}" for name in names if name not in dir(made)]
    for module, names in MODULES.items():
        moved += [f"{module}.{name}" for name in names if not hasattr(import_module(module), name)]
    assert moved == []
