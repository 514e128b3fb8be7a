"""Private names of the libraries: where they stand, and that they are there, so that an upgrade fails here by name."""

import ast
from collections.abc import Callable, Sequence, Set
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from datasets import Dataset
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

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
    "fit_loop._data_source",
    "fit_loop.epoch_loop._broadcast_sigterm_tensor",
    "fit_loop.epoch_loop._results",
    "predict_loop._data_source",
    "predict_loop._module_mode",
    "validate_loop._data_source",
    "validate_loop._module_mode",
)
"""Attributes of a Lightning Trainer."""
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "jsonargparse": {"jsonargparse._loaders_dumpers": ("get_yaml_default_loader",)},
    "lightning": {
        "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": ("_call_children_scripts",),
    },
    "peft": {"peft.tuners.tuners_utils.BaseTunerLayer": ("_disable_adapters",)},
    "ray": {
        "ray._private.node.Node": ("get_session_dir_path",),
        "ray._private.worker.Worker": ("get_serialization_context",),
        "ray._raylet.CoreWorker": ("add_object_out_of_scope_callback",),
    },
    "torch": {
        "torch": ("_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_foreach_zero_"),
        "torch._C._distributed_c10d": ("Store",),
        "torch._dynamo": ("config",),
        "torch._dynamo.backends.debugging": ("boxed_nop",),
        "torch._functorch.aot_autograd": ("aot_function",),
        "torch._functorch.partitioners": ("min_cut_rematerialization_partition",),
        "torch._inductor": ("list_options",),
        "torch._inductor.decomposition": ("select_decomp_table",),
        "torch._inductor.runtime.cache_dir_utils": ("default_cache_dir",),
        "torch._subclasses.fake_tensor": ("FakeTensorMode",),
        "torch.cuda.memory": ("_set_allocator_settings",),
        "torch.distributed.distributed_c10d": ("_get_default_store", "_set_pg_timeout", "_world"),
        "torch.distributed.distributed_c10d.ProcessGroup": ("_get_backend",),
        "torch.distributed.distributed_c10d.ProcessGroupGloo": ("_Options",),
        "torch.distributed.tensor.DTensor": ("_local_tensor",),
        "torch.nn.attention.varlen": ("_varlen_attn_backward",),
        "torch.optim.AdamW": ("_init_group",),
        "torch.ops.aten": ("_grouped_mm",),
        "torch.ops.aten.add.Tensor": ("_schema",),
        "torch.utils._python_dispatch": ("TorchDispatchMode",),
        "torch.utils._pytree": ("tree_leaves",),
    },
    "transformers": {
        "transformers.modeling_utils.PreTrainedModel": (
            "_init_weights",
            "_is_stateful",
            "_keys_to_ignore_on_save",
            "_supports_attention_backend",
            "_supports_sdpa",
        ),
    },
}
"""By library, the names of its modules and classes, which are given by their dotted paths."""
OBJECTS: dict[str, dict[Callable[..., object], tuple[str, ...]]] = {
    "datasets": {partial(Dataset.from_dict, {}): ("_fingerprint",)},
    "lightning": {
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
        partial(EarlyStopping, "val/sums/reward"): ("_check_on_train_epoch_end",),
        BatchSizeFinder: ("_early_exit",),
        LearningRateFinder: ("_early_exit",),
        LightningModule: ("_device_mesh", "_trainer"),
        DDPStrategy: ("_ddp_kwargs", "_launcher"),
        ModelParallelStrategy: ("_device_mesh", "_setup_distributed"),
        partial(SingleDeviceStrategy, "cpu"): ("_checkpoint_io", "_launcher"),
        partial(CSVLogger, "unused"): ("_experiment",),
        RichProgressBar: ("_add_task", "_enabled", "_update"),
    },
    "torch": {
        torch.nn.Module: ("_non_persistent_buffers_set",),
        partial(torch.UntypedStorage, 1): ("_cdata",),
        lambda: resolve_name("torch.distributed.distributed_c10d.ProcessGroupGloo._Options")(): (
            "_devices",
            "_timeout",
        ),
    },
}
"""By library, the names of its objects, which are given by the calls that return them."""
SOURCES = {
    "lightning": {"lightning.pytorch.cli": ("_subcommand_parsers",)},
    "torch": {
        "torch._dynamo.variables.builder": ("_is_fsdp_managed_module",),
        "torch.nn.attention._fa4": ("_flash_attn_bwd",),  # as flash-attn-4 names it, which is not installed
    },
    "transformers": {
        "transformers.core_model_loading": ("_weight_conversions",),
        "transformers.initialization": ("_is_hf_initialized",),
    },
    "vllm": {
        "vllm._custom_ops": ("_supports_onednn",),
        "vllm.lora.model_manager": ("_last_mapping",),
        "vllm.lora.worker_manager": ("_adapter_manager",),
        "vllm.model_executor.layers.utils": ("check_cpu_sgl_kernel",),
    },
}
"""By library, the names in the source of its modules, which these modules set or read."""
UNCHECKED = {"_accelerator_setAllocatorSettings": "optional: without it, _set_allocator_settings is called"}
"""Names that no check needs, and why."""
PLACES = {**INTERNALS, "datasets": "data/sources.py", "peft": "models/adapter_layers.py"}


def find_moved(library: str) -> list[str]:
    """Return the names of :data:`NAMES`, :data:`OBJECTS` and :data:`SOURCES` that a library does not have."""
    moved = []
    for path, names in NAMES.get(library, {}).items():
        try:
            found = resolve_name(path)
        except (ImportError, AttributeError):
            moved.append(path)
        else:
            moved += [f"{path}.{name}" for name in names if name not in dir(found) and not hasattr(found, name)]
    for make, names in OBJECTS.get(library, {}).items():
        made = make()
        moved += [f"{type(made).__name__}.{name}" for name in names if name not in dir(made)]
    for path, names in SOURCES.get(library, {}).items():
        moved += [f"{path}: {name}" for name in names if name not in source_of(path)]
    return moved


def source_of(path: str) -> str:
    """Return the source of a module, which is not imported; "" if its file does not exist."""
    library, *parts = path.split(".")
    spec = find_spec(library)
    assert spec is not None and spec.origin is not None
    module = Path(spec.origin).parent.joinpath(*parts)
    files = (module.with_suffix(".py"), module / "__init__.py")
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")


def moved_text(library: str, moved: Sequence[str]) -> str:
    """Return the error for names that a library has moved or renamed."""
    return f"{library} has moved or renamed {moved}: adapt rlightning/{PLACES[library]}, or where ALLOWED has the name"


@pytest.mark.parametrize("library", PLACES)
def test_private_names_are_where_they_were(library: str) -> None:
    pytest.importorskip(library)
    if library in INTERNALS:
        import_module("rlightning." + INTERNALS[library].removesuffix(".py").replace("/", "."))
    moved = find_moved(library)
    assert moved == [], moved_text(library, moved)


def test_private_names_of_trainer_are_where_they_were() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", devices=1)
    moved = []
    for path in TRAINER:
        *owners, name = path.split(".")
        owner: object = trainer
        for part in owners:
            owner = getattr(owner, part, None)
        if name not in dir(owner):
            moved.append(f"Trainer.{path}")
    assert moved == [], moved_text("lightning", moved)


def test_ray_init_has_its_private_argument() -> None:
    ray = pytest.importorskip("ray")
    moved = [name for name in ("_temp_dir",) if name not in unwrap(ray.init).__code__.co_varnames]
    assert moved == [], moved_text("ray", moved)


def test_private_names_of_jsonargparse_actions_are_where_they_were() -> None:
    parser = import_module("jsonargparse").ArgumentParser()
    action = parser.add_argument("--folder", type=str)
    moved = [name for name in ("_typehint", "_enable_path") if name not in vars(action)]
    moved += [name for name in ("_actions",) if action not in getattr(parser, name, ())]
    assert moved == [], moved_text("jsonargparse", moved)


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


@pytest.fixture(scope="module")
def parsed() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files and of the callbacks, by path."""
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "callbacks" not in path.parents]
    files += [*CALLBACKS.glob("*.py")]
    roots = {path: CALLBACKS.parent if path.parent == CALLBACKS else PACKAGE for path in files}
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path, root in roots.items()}


@pytest.mark.long
def test_private_names_are_in_one_file_per_library(parsed: dict[str, ast.Module]) -> None:
    own = {name for tree in parsed.values() for name in defined_names(tree)}
    used = {name: private_names(tree, own) for name, tree in parsed.items() if name not in INTERNALS.values()}
    allowed = {name: set(" ".join(reasons).split()) for name, reasons in ALLOWED.items()}
    assert {name: names for name, names in used.items() if names} == allowed


def checked_names() -> set[str]:
    """Return the names that the checks above require, and the private modules that they import."""
    found = {part for path in TRAINER for part in path.split(".")} | {"_actions", *UNCHECKED}
    for tables in (NAMES, SOURCES):
        for table in tables.values():
            found |= {part for path, names in table.items() for part in (*path.split("."), *names)}
    return found.union(*(names for table in OBJECTS.values() for names in table.values()))


def imported_names(tree: ast.Module) -> set[str]:
    """Return the private names that importing a file imports: a file of internals cannot be imported without them."""
    return set().union(*(private_names(ast.Module([node], []), set()) for node in tree.body if is_import(node)))


def is_import(node: ast.stmt) -> bool:
    """Return whether a statement is an import."""
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.long
def test_each_private_name_is_checked(parsed: dict[str, ast.Module]) -> None:
    own = {name for tree in parsed.values() for name in defined_names(tree)}
    used = set().union(*(private_names(tree, own) for tree in parsed.values()))
    checked = checked_names().union(*(imported_names(parsed[file]) for file in INTERNALS.values()))
    assert sorted(used - checked) == [], "add them to NAMES, OBJECTS or SOURCES"


def test_private_names_that_are_set_are_checked() -> None:
    """A misspelt name that is read raises an error, and one that is set does not."""
    for file in INTERNALS.values():
        nodes = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        written = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        assert {name for name in written if is_private(name)} <= checked_names()


def test_moved_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "torch", {"torch.cuda.gone": ("_a",), "torch.cuda": ("_b", "is_available")})
    monkeypatch.setitem(OBJECTS, "torch", {torch.nn.Identity: ("_c", "forward")})
    monkeypatch.setitem(SOURCES, "torch", {"torch.gone": ("_d",), "torch.version": ("_e", "cuda")})
    assert find_moved("torch") == [
        "torch.cuda.gone",
        "torch.cuda._b",
        "Identity._c",
        "torch.gone: _d",
        "torch.version: _e",
    ]


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
