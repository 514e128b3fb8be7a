"""Private names of the libraries: where they stand, and that they are there, so that an upgrade fails here by name."""

import ast
from collections.abc import Set
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource, unwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from rlightning.rollout.vllm.vllm_source import source_of

PACKAGE = Path(__file__).parent.parent / "rlightning"
CALLBACKS = PACKAGE.parent / "callbacks"
LIBRARIES = ("lightning", "torch", "ray", "transformers", "jsonargparse", "vllm", "peft", "datasets")
INTERNALS = {
    "jsonargparse": "config/jsonargparse_internals.py",
    "lightning": "lightning_internals.py",
    "ray": "controller/ray_internals.py",
    "torch": "torch_internals.py",
    "transformers": "models/transformers_internals.py",
    "vllm": "rollout/vllm/vllm_internals.py",
}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_current_frames", "_exit", "_getframe"}
"""Of named tuples and of Python's own modules, whose documentation has them."""
ALLOWED = {
    "callbacks/progress_bar.py": {
        "_add_task _update": "Lightning's bar of a run, which has no public way to draw on it",
        "_enabled": "is_enabled is also false for refresh_rate=0, where log lines still go above the bar",
    },
    "cli/lightning_cli.py": {"_subcommand_parsers": "LightningCLI keeps the commands' parsers here alone"},
    "data/sources.py": {"_fingerprint": "what datasets calls the same rows; it has no public name"},
    "memory_plan/activations.py": {
        "_dynamo _functorch _inductor _subclasses": "parts of torch.compile, which take seconds to import",
        "_python_dispatch _pytree": "torch's documented way to see each operator has no public module",
        "_grouped_mm": "the operator's only name",
        "_cdata": "tells storages apart that have no memory, and so no data_ptr()",
    },
    "models/adapter_layers.py": {"_disable_adapters": "PEFT's public method also freezes the adapter's weights"},
    "models/flash_attention_4.py": {
        "_flash_attn_bwd": "the backward alone, for torch.compile; torch's own integration calls it, too"
    },
    "models/layers.py": {
        "_dynamo _inductor": "options of torch.compile that torch.compiler does not have",
        "_is_fsdp_managed_module": "the mark by which torch.compile takes a module's integers for variables",
    },
    "module/monitoring.py": {
        "_every_n_epochs _every_n_train_steps _monitor_candidates _save_on_train_epoch_end _save_topk_checkpoint "
        "_should_skip_saving_checkpoint _train_time_interval": "of the ModelCheckpoint that StepCheckpoint is",
        "_check_on_train_epoch_end": "of the EarlyStopping that StepEarlyStopping is",
    },
    "parallel/fsdp.py": {
        "_setup_distributed": "of the strategy that this one is: setup_environment() makes another mesh, too"
    },
    "parallel/launcher.py": {
        "_call_children_scripts": "of the launcher that this one is: launch() also runs the function"
    },
    "report/loggers.py": {"_experiment": "the property opens another file where there is none"},
    "rollout/weights/transfer_group.py": {
        "_Options _devices _timeout": "of a gloo group outside the default one, which torch makes by these alone",
    },
}
"""By file, the private names that no file of internals has for it, and why."""
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
    EarlyStopping: ("_check_on_train_epoch_end",),
    LightningModule: ("_device_mesh", "_trainer"),
    DDPStrategy: ("_ddp_kwargs", "_launcher"),
    ModelParallelStrategy: ("_device_mesh", "_setup_distributed"),
    SingleDeviceStrategy: ("_checkpoint_io", "_launcher"),
    CSVLogger: ("_experiment",),
    RichProgressBar: ("_add_task", "_enabled", "_update"),
}
ARGUMENTS = {
    EarlyStopping: {"monitor": "val/sums/reward"},
    SingleDeviceStrategy: {"device": "cpu"},
    CSVLogger: {"save_dir": "unused"},
}
TRANSFORMERS = (
    "_init_weights",
    "_is_stateful",
    "_keys_to_ignore_on_save",
    "_supports_attention_backend",
    "_supports_sdpa",
)
WRITTEN_IN = {
    "_is_hf_initialized": "transformers.initialization",
    "_weight_conversions": "transformers.core_model_loading",
}
"""Attributes of objects, which these modules set or read."""
VLLM = {
    "vllm._custom_ops": "_supports_onednn",
    "vllm.lora.model_manager": "_last_mapping",
    "vllm.lora.worker_manager": "_adapter_manager",
    "vllm.model_executor.layers.utils": "check_cpu_sgl_kernel",
}
"""Names in the source of these modules."""
MODULES = {
    "torch.cuda.memory": ("_set_allocator_settings",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_set_pg_timeout", "_world"),
    "torch.distributed.distributed_c10d.ProcessGroup": ("_get_backend",),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.nn.attention.varlen": ("_varlen_attn_backward",),
    "torch.optim.AdamW": ("_init_group",),
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
    import_module("rlightning.controller.ray_internals")
    raylet = import_module("ray._raylet")
    moved = [name for name in ("get_serialization_context",) if not hasattr(worker.Worker, name)]
    moved += [name for name in ("add_object_out_of_scope_callback",) if not hasattr(raylet.CoreWorker, name)]
    node = import_module("ray._private.node")
    moved += [name for name in ("get_session_dir_path",) if not hasattr(node.Node, name)]
    moved += [name for name in ("_temp_dir",) if name not in unwrap(import_module("ray").init).__code__.co_varnames]
    assert moved == [], f"Ray has moved or renamed {moved}: adapt rlightning/controller/ray_internals.py"


def test_private_names_of_transformers_are_where_they_were() -> None:
    import_module("rlightning.models.transformers_internals")
    model = import_module("transformers.modeling_utils").PreTrainedModel
    moved = [name for name in TRANSFORMERS if not hasattr(model, name)]
    for name, module in WRITTEN_IN.items():
        if name not in getsource(import_module(module)):
            moved.append(name)
    assert moved == [], f"transformers has moved or renamed {moved}: adapt rlightning/models/transformers_internals.py"


def test_private_names_of_vllm_are_where_they_were() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    moved = [f"{module}: {name}" for module, name in VLLM.items() if name not in source_of(module)]
    assert moved == [], f"vLLM has moved or renamed {moved}: adapt rlightning/rollout/vllm/vllm_internals.py"


def test_private_names_of_jsonargparse_are_where_they_were() -> None:
    import_module("rlightning.config.jsonargparse_internals")
    parser = import_module("jsonargparse").ArgumentParser()
    action = parser.add_argument("--folder", type=str)
    moved = [name for name in ("_typehint", "_enable_path") if name not in vars(action)]
    moved += [name for name in ("_actions",) if action not in getattr(parser, name, ())]
    assert moved == [], f"jsonargparse has moved or renamed {moved}: adapt rlightning/config/jsonargparse_internals.py"


def top_level(name: str) -> bool:
    """Whether a dotted name is of one of the libraries."""
    return name.split(".")[0] in LIBRARIES


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(tree: ast.AST) -> set[str]:
    """What a file gives a name to: classes, functions, fields of classes, attributes of ``self`` and ``cls``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
            found.add(node.attr)
        if isinstance(node, ast.ClassDef):
            # A type alone may be that of a library's attribute.
            fields = [part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign) and part.value]
            found |= {name.id for part in fields for name in ast.walk(part) if isinstance(name, ast.Name)}
    return found


def is_own_object(owner: ast.expr) -> bool:
    """Whether an attribute's owner is ``self``, ``cls`` or ``super()``."""
    return ast.unparse(owner) in ("self", "cls", "super()")


def private_names(tree: ast.AST, own: Set[str]) -> set[str]:
    """The private names of others that a file uses: of imports, and of attributes, those of ``getattr`` included.

    A name of ``self`` is another's where no file of the package gives it, as with a base class of a library's; one of
    another object where this file does not.

    Args:
        own: names that the package's files give.
    """
    found: set[str] = set()
    here = defined_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and top_level(node.module):
            found |= {part for part in node.module.split(".") if is_private(part)}
            found |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if top_level(alias.name)]
            found |= {part for name in names for part in name.split(".") if is_private(part)}
        else:
            attribute = read_attribute(node)
            if attribute is not None and is_private(attribute[1]) and attribute[1] not in DOCUMENTED:
                owner, name = attribute
                if name not in (own if is_own_object(owner) else here):
                    found.add(name)
    return found


def read_attribute(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The owner and the name of an attribute, if a node is one or a call of ``getattr`` and its like."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) in BY_NAME:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None


@pytest.mark.long
def test_private_names_are_in_one_file_per_library() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "callbacks" not in path.parents]
    files += [*CALLBACKS.glob("*.py")]
    roots = {path: CALLBACKS.parent if path.parent == CALLBACKS else PACKAGE for path in files}
    parsed = {path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path, root in roots.items()}
    own = {name for tree in parsed.values() for name in defined_names(tree)}
    used = {name: private_names(tree, own) for name, tree in parsed.items() if name not in INTERNALS.values()}
    allowed = {name: set(" ".join(reasons).split()) for name, reasons in ALLOWED.items()}
    assert {name: names for name, names in used.items() if names} == allowed


def test_private_names_that_are_set_are_checked() -> None:
    """A misspelt name that is read raises an error, and one that is set does not."""
    checked = {
        "lightning": {part for path in TRAINER for part in path.split(".")}.union(*OBJECTS.values()),
        "transformers": {*TRANSFORMERS, *WRITTEN_IN},
        "vllm": {*VLLM.values()},
    }
    for library, file in INTERNALS.items():
        nodes = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        written = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        assert {name for name in written if is_private(name)} <= checked.get(library, set())


@pytest.mark.long
def test_internals_import_private_names_of_their_library_only() -> None:
    for library, file in INTERNALS.items():
        for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and private_names(node, set()):
                assert str(node.module).split(".")[0] == library


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("trainer._data_connector._datahook_selector", {"_data_connector", "_datahook_selector"}),
        ("getattr(policy, '_weight_conversions', None)", {"_weight_conversions"}),
        ("from torch._dynamo import config", {"_dynamo"}),
        ("from peft.tuners import _buffer_dict", {"_buffer_dict"}),
        ("import vllm._custom_ops", {"_custom_ops"}),
        ("class A(ModelCheckpoint):\n    def f(self): self._save_topk_checkpoint()", {"_save_topk_checkpoint"}),
        ("class A:\n    def f(self, other): self._own = other._own", set()),
        ("class A(ModelCheckpoint):\n    def _save(self): super()._save()", set()),
        ("prompt._replace(index=1)", set()),
        ("from sys import _getframe", set()),
        ("self.__class__, module.__dict__, _", set()),
    ],
)
def test_private_names_are_found_wherever_they_stand(source: str, found: set[str]) -> None:
    tree = ast.parse(source)
    assert private_names(tree, defined_names(tree)) == found
