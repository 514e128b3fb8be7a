"""Private names of Lightning, torch and Ray that this package uses: an upgrade that moves one fails here by name."""

import ast
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

PACKAGE = Path(__file__).parent.parent / "rlightning"
LIBRARIES = ("lightning", "torch", "ray")
INTERNALS = {library: f"{library}_internals.py" for library in LIBRARIES}
COMPILER = ("memory_plan/activations.py", "models/layers.py")
"""Files that trace or compile a model by what torch.compile is made of; its parts take seconds to import."""
TRAINER = (
    "_accelerator_connector._layer_sync",
    "_active_loop",
    "_checkpoint_connector._loaded_checkpoint",
    "_data_connector.prepare_data",
    "_detect_anomaly",
    "_logger_connector.metrics",
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
    LightningModule: ("_device_mesh", "_trainer"),
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
    "torch.cuda.memory": ("_set_allocator_settings",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_set_pg_timeout", "_world"),
    "torch.distributed.distributed_c10d.ProcessGroup": ("_get_backend",),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.nn.Module": ("_non_persistent_buffers_set",),
    "torch": ("_foreach_copy_", "_foreach_mul_", "_foreach_norm"),
}


def test_private_names_of_lightning_are_where_they_were() -> None:
    import_module("rlightning.lightning_internals")
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
    assert moved == [], f"Lightning has moved or renamed {moved}: adapt rlightning/lightning_internals.py"


def test_private_names_of_torch_are_where_they_were() -> None:
    import_module("rlightning.torch_internals")
    moved = []
    for path, names in MODULES.items():
        found = resolve_name(path)
        found = found() if isinstance(found, type) and path == "torch.nn.Module" else found
        moved += [f"{path}.{name}" for name in names if name not in dir(found)]
    assert moved == [], f"torch has moved or renamed {moved}: adapt rlightning/torch_internals.py"


def test_private_names_of_ray_are_where_they_were() -> None:
    worker = pytest.importorskip("ray._private.worker")
    import_module("rlightning.ray_internals")
    raylet = import_module("ray._raylet")
    moved = [name for name in ("get_serialization_context",) if not hasattr(worker.Worker, name)]
    moved += [name for name in ("add_object_out_of_scope_callback",) if not hasattr(raylet.CoreWorker, name)]
    node = import_module("ray._private.node")
    moved += [name for name in ("get_session_dir_path",) if not hasattr(node.Node, name)]
    moved += [name for name in ("_temp_dir",) if name not in unwrap(import_module("ray").init).__code__.co_varnames]
    assert moved == [], f"Ray has moved or renamed {moved}: adapt rlightning/ray_internals.py"


def private_imports(path: Path) -> list[str]:
    """The private names that a file imports of the libraries."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            library, *parts = name.split(".")
            if library in LIBRARIES and any(part.startswith("_") for part in parts):
                found.append(name)
    return found


@pytest.mark.long
def test_private_names_are_imported_in_one_file_per_library() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): private_imports(path) for path in PACKAGE.rglob("*.py")}
    found = {name: names for name, names in files.items() if names and name not in COMPILER}
    assert set(found) == set(INTERNALS.values())
    for library, name in INTERNALS.items():
        assert {used.partition(".")[0] for used in found[name]} == {library}
