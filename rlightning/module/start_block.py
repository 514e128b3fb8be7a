"""The summary of a run's plan that is logged when the run starts."""

import shutil
from pathlib import Path
from textwrap import fill

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.memory_plan.decisions import plan_run
from rlightning.memory_plan.report import describe_checkpointing, describe_moved, describe_phases, describe_spread
from rlightning.memory_plan.work import Parallelism
from rlightning.models.architecture import can_share_prefixes
from rlightning.models.attention import describe_attention
from rlightning.models.counts import can_count, count_weights
from rlightning.models.layers import should_compile
from rlightning.module.batching import least_saved_share
from rlightning.module.evaluation import EvaluationSteps
from rlightning.module.roles import ACTOR
from rlightning.optim.moments import bytes_per_parameter
from rlightning.parallel.execution_mode import ExecutionMode, execution_mode
from rlightning.protocols import callbacks_of

WIDTH = 118
"""Maximum number of characters of a line."""
NAME_WIDTH = 8
"""Number of characters of a row's name."""


def describe_start(trainer: Trainer, module: EvaluationSteps) -> str:
    """Return the summary of a run that is logged at its start, with rows for model, layout, batch, memory, engine and
    output.

    Called after the callbacks' ``setup``, before weights are loaded.
    """
    is_fit = trainer.state.fn == "fit"
    rows = {"model": describe_model(trainer, module), "layout": describe_layout(trainer)}
    if is_fit:
        rows["batch"] = module.plan.describe(trainer.world_size)
        rows["memory"] = describe_memory(trainer, module)
    if module.sampler is not None:
        rows["engine"] = module.sampler.describe()
    if is_fit and trainer.ckpt_path is not None:
        rows["resumes"] = str(trainer.ckpt_path)
    rows["writes"] = describe_output(trainer, module)
    return "\n".join(wrap(name, text) for name, text in rows.items() if text)


def wrap(name: str, text: str) -> str:
    """Return a row of the summary, name and text, wrapped to :data:`WIDTH` characters with further lines indented."""
    return fill(
        f"{name:<{NAME_WIDTH}}{text}",
        WIDTH,
        subsequent_indent=" " * NAME_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_model(trainer: Trainer, module: EvaluationSteps) -> str:
    """Return the model's name and size, its reference and adapter, and which attention and compilation it uses."""
    device, num_parameters = trainer.strategy.root_device, count_weights(module.model_config).total
    computes_in = torch.bfloat16 if trainer.precision.startswith("bf16") else torch.get_default_dtype()
    _, compiled = should_compile(module.compiles_layers, device)
    attention = describe_attention(module.model_config, device, computes_in)
    shared = describe_sharing(module, device)
    reference = f", reference {module.reference_path}" if module.kl_coef else ""
    adapter = module.adapter
    trained = "" if adapter is None else f", trained by {adapter.describe()} ({adapter.num_parameters:,} parameters)"
    return (
        f"{module.model_path} ({module.model_config.model_type}, {num_parameters:,} parameters){reference}{trained}; "
        f"attention is {attention}; {shared}{compiled}"
    )


def describe_sharing(module: EvaluationSteps, device: torch.device) -> str:
    """Return how often shared prefixes are computed, with a semicolon; "" if each sequence computes its own."""
    if module.share_prefixes == "auto":
        least = least_saved_share(module.model_config)
        return f"shared prefixes are computed once where that saves {least:.0%} of the tokens; "
    if module.share_prefixes:
        is_exact = can_share_prefixes(module.model_config, device.type)
        return f"shared prefixes are computed {'once' if is_exact else 'each time (once is inexact)'}; "
    return ""


def describe_layout(trainer: Trainer) -> str:
    """Return the number of ranks, their devices, and the part of the model that each rank stores."""
    parallelism, device = Parallelism.of(trainer.strategy, trainer.world_size), trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    num_ranks = trainer.world_size
    return (
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {name}{describe_spread(parallelism)}, "
        f"precision {trainer.precision}"
    )


def describe_memory(trainer: Trainer, module: EvaluationSteps) -> str:
    """Return the planned memory of each phase on a rank's CUDA device; "" for other devices."""
    if trainer.strategy.root_device.type != "cuda":
        return ""
    try:
        plan = plan_run(trainer, module)
    except ConfigError as error:
        return f"not planned: {error.line}"
    moved = describe_moved(plan)
    text = f"{describe_phases(plan)} on each rank (planned); gradient checkpointing {describe_checkpointing(plan)}"
    return f"{text}; while the engine is awake, {moved}" if moved else text


def describe_output(trainer: Trainer, module: EvaluationSteps) -> str:
    """Return the folders that the run writes to, with the size of a checkpoint; "" if there are none."""
    assert trainer.state.fn is not None
    folder, stage = Path(trainer.default_root_dir), trainer.state.fn.value
    if execution_mode() is ExecutionMode.WORKER:  # the controller has the loggers
        return str(folder)
    parts = []
    if stage == "fit":
        parts.append(describe_checkpoints(trainer, module, folder))
        parts += [relative(logger.log_dir, folder) for logger in trainer.loggers if logger.log_dir]
    outputs = (one.output(trainer, stage) for one in callbacks_of(trainer) if isinstance(one, RLCallback))
    parts += [relative(output, folder) for output in outputs if output is not None]
    if parts:
        return f"{folder}: {', '.join(parts)}"
    return str(folder) if trainer.loggers else ""


def describe_checkpoints(trainer: Trainer, module: EvaluationSteps, folder: Path) -> str:
    """Return the folder of checkpoints, the size of a checkpoint, and the free disk space."""
    saver = next((one for one in callbacks_of(trainer) if isinstance(one, ModelCheckpoint)), None)
    if saver is None:
        return "no checkpoints"
    size = checkpoint_bytes(module, 2 if trainer.precision == "bf16-true" else 4, has_state=not saver.save_weights_only)
    kept = "all are kept" if saver.save_top_k == -1 else f"{saver.save_top_k} kept"
    free = shutil.disk_usage(existing(folder)).free
    place = relative(saver.dirpath or folder / "checkpoints", folder)
    return f"{place} ({format_bytes(size)} each, {kept}; {format_bytes(free)} free)"


def checkpoint_bytes(module: EvaluationSteps, itemsize: int, *, has_state: bool) -> float:
    """Return the bytes of a checkpoint: trained weights of ``itemsize`` bytes each, and with ``has_state`` the
    optimizer state. Roles of unknown size are left out.
    """
    size = 0.0
    for name, role in module.configure_roles().items():
        if role.optimizer is not None and role.config is not None and (name == ACTOR or can_count(role.config)):
            adapter = module.adapter if name == ACTOR else None
            count = count_weights(role.config).total if adapter is None else adapter.num_parameters
            named = count_weights(role.config).shapes if adapter is None else adapter.shapes
            shapes = [shape for _, shape in named]
            state = bytes_per_parameter(role.optimizer.optimizer_states, shapes, itemsize) if has_state else 0
            size += count * (itemsize + state)
    return size


def existing(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def relative(path: str | Path, folder: Path) -> str:
    """Return a path relative to the run's folder if it is inside, else the path itself."""
    whole, root = Path(path).absolute(), folder.absolute()
    return str(whole.relative_to(root)) if whole.is_relative_to(root) else str(path)


def format_bytes(size: float) -> str:
    """Return a size in MiB, or in GiB if it is at least 1 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
