"""What a run decides by its plan: layers that are checkpointed, and whether an engine can start beside it at all."""

from typing import Any

import torch

from rlightning.data.prompt_limit import PROMPT_TOKENS
from rlightning.errors import ConfigError
from rlightning.memory_plan.advice import advise_engine, advise_update
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.report import sum_up
from rlightning.memory_plan.work import Parallelism, Work, read_precision
from rlightning.models import load_config
from rlightning.models.layers import should_compile
from rlightning.parallel.device import GIB


def read_run(trainer: Any, module: Any) -> Work:
    """Return what a run is about to do.

    Args:
        trainer: Lightning's, with its devices set up.
        module: an :class:`~rlightning.module.RLModule`.

    Raises:
        ConfigError: if it cannot be planned.
    """
    if getattr(module, "plan", None) is None:
        raise ConfigError(f"{type(module).__name__} has no plan of a step's batch")
    strategy = trainer.strategy
    parallelism = Parallelism.of(strategy, trainer.world_size)
    trusts = module.trust_remote_code
    work = Work(
        config=module.model_config,
        reference=load_config(module.reference_path, trust_remote_code=trusts) if module.kl_coef else None,
        batch=module.plan,
        longest=min(module.plan.max_tokens_per_microbatch, module.max_model_length),
        precision=read_precision(trainer.precision),
        gradient_checkpointing=module.gradient_checkpointing,
        is_compiled=should_compile(module.compiles_layers, strategy.root_device, parallelism.tensor_parallel_size)[0],
        optimizer_states=module.optimizer_states,
        parallelism=parallelism,
    )
    max_prompt_tokens = getattr(trainer.datamodule, "max_prompt_tokens", None) or PROMPT_TOKENS
    return work.beside(trainer.callbacks if module.generates else (), max_prompt_tokens)


def plan_run(trainer: Any, module: Any) -> MemoryPlan:
    """Return the plan of a run on the trainer's CUDA device; see :func:`read_run`."""
    device = trainer.strategy.root_device
    return MemoryPlan(read_run(trainer, module), torch.cuda.get_device_properties(device).total_memory)


def check_engine(trainer: Any, module: Any) -> None:
    """Refuse an engine for which the run's device has no room, whatever the trainer moves away, before it is started.

    Raises:
        ConfigError: with the arithmetic, and the keys that would help.
    """
    if getattr(trainer, "strategy", None) is None or trainer.strategy.root_device.type != "cuda":
        return
    try:
        plan = plan_run(trainer, module)
    except ConfigError:
        return  # what has no plan is not foreseen
    if advice := advise_engine(plan):
        phases = {"start": plan.start(), "sync": plan.sync(), "generate": plan.generate()}
        worst = max(phases, key=lambda phase: phases[phase].total)
        raise ConfigError(f"{advice[0]} {sum_up(worst, phases[worst])}.")


def decide_checkpointing(trainer: Any, module: Any) -> tuple[int, str]:
    """Return how many layers ``gradient_checkpointing="auto"`` checkpoints on the trainer's CUDA device, and why.

    Args:
        trainer: as of :func:`read_run`.
        module: as of :func:`read_run`; of others, all layers are checkpointed.

    Raises:
        ConfigError: if the update would not fit with all of them, with the arithmetic, and the keys that would help.
    """
    try:
        plan = plan_run(trainer, module)
    except ConfigError as error:
        num_layers: int = module.model_config.get_text_config().num_hidden_layers
        return num_layers, f"what they take is not known ({error})"
    if advice := advise_update(plan):
        raise ConfigError(f"{advice[0]} {sum_up('update', plan.update())}.")
    count = plan.count_checkpointed_layers()
    bare, total = plan.with_work(gradient_checkpointing=False).update().total, plan.update().total
    reason = (
        f"without any, an update of {plan.tokens:,} tokens a micro-batch is planned to take "
        f"{bare / GIB:.1f} of {plan.device_memory / GIB:.1f} GiB"
    )
    return count, f"{reason}, with these {total / GIB:.1f}" if count else reason
