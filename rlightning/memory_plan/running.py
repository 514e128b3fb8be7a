"""From a run that is about to load its models to the plan of its update."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from rlightning.cli.config_keys import find_class
from rlightning.data.prompt_limit import PROMPT_TOKENS
from rlightning.errors import ConfigError
from rlightning.memory_plan.advice import advise_engine, advise_update
from rlightning.memory_plan.devices import GIB
from rlightning.memory_plan.phases import MemoryPlan, sum_up, total
from rlightning.memory_plan.settings import (
    CALLBACKS,
    PRECISIONS,
    parallelism_of_ddp,
    parallelism_of_fsdp,
    plan_rollout,
)
from rlightning.memory_plan.work import Parallelism, Work
from rlightning.models import load_config
from rlightning.models.layers import should_compile
from rlightning.parallel.fsdp import FSDP


def plan_run(trainer: Any, module: Any) -> MemoryPlan:
    """The plan of a run on the trainer's CUDA device.

    Args:
        trainer: Lightning's, with its devices set up.
        module: an :class:`~rlightning.module.RLModule`.

    Raises:
        ConfigError: if it cannot be planned.
    """
    device = trainer.strategy.root_device
    return MemoryPlan(work_of(trainer, module), torch.cuda.get_device_properties(device).total_memory)


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
    phases = {"start": plan.start(), "sync": plan.sync(), "generate": plan.generate()}
    if advice := advise_engine(plan):
        worst = max(phases, key=lambda phase: total(phases[phase]))
        raise ConfigError(f"{advice[0]} {sum_up(worst, phases[worst])}.")


def decide_checkpointing(trainer: Any, module: Any) -> tuple[int, str]:
    """How many layers ``gradient_checkpointing="auto"`` checkpoints on the trainer's CUDA device, and why.

    Args:
        trainer: Lightning's, with its devices set up.
        module: an :class:`~rlightning.module.RLModule`; what else has no ``plan`` gets all layers checkpointed.

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
    return count, explain(plan, count)


def explain(plan: MemoryPlan, count: int) -> str:
    """Why so many layers are checkpointed."""
    bare = plan.update(gradient_checkpointing=False)
    text = (
        f"without any, an update of {plan.tokens:,} tokens a micro-batch is planned to take "
        f"{total(bare) / GIB:.1f} of {plan.device_memory / GIB:.1f} GiB"
    )
    return f"{text}, with these {total(plan.update()) / GIB:.1f}" if count else text


def work_of(trainer: Any, module: Any) -> Work:
    """What a run is about to do, as far as its update's memory is concerned.

    Raises:
        ConfigError: if it cannot be planned.
    """
    batch = getattr(module, "plan", None)
    precision = PRECISIONS.get(str(trainer.precision))
    if batch is None or precision is None:
        raise ConfigError(f"{type(module).__name__} in precision {trainer.precision} has no plan")
    rollout = find_rollout(trainer)
    max_prompt_tokens = getattr(trainer.datamodule, "max_prompt_tokens", None) or PROMPT_TOKENS
    longest = min(batch.max_tokens_per_microbatch, module.max_model_length)
    engine = None
    if rollout is not None and module.generates:
        longest = min(longest, max_prompt_tokens + rollout.sampling.max_new_tokens)
        engine = plan_rollout(arguments_of(rollout), batch, trainer.world_size, max_prompt_tokens)
    parallelism = parallelism_of(trainer.strategy, trainer.world_size)
    is_compiled, _ = should_compile(
        module.compiles_layers, trainer.strategy.root_device, parallelism.tensor_parallel_size
    )
    return Work(
        config=module.model_config,
        reference=(
            load_config(module.reference_path, trust_remote_code=module.trust_remote_code) if module.kl_coef else None
        ),
        batch=batch,
        longest=longest,
        precision=precision,
        gradient_checkpointing="auto",
        is_compiled=is_compiled,
        optimizer_states=module.optimizer_states,
        parallelism=parallelism,
        engine=engine,
    )


def parallelism_of(strategy: Any, ranks: int) -> Parallelism:
    """How a strategy spreads models over ranks."""
    if isinstance(strategy, FSDP):
        return parallelism_of_fsdp(strategy, ranks)
    if isinstance(strategy, DDPStrategy):
        return parallelism_of_ddp(strategy._ddp_kwargs, ranks)
    return Parallelism(ranks=ranks)


def find_rollout(trainer: Any) -> Any:
    """The callback that runs an engine; None without one."""
    wanted = find_class(f"{CALLBACKS}.VLLMRollout", [], "VLLMRollout")
    return next((callback for callback in trainer.callbacks if isinstance(callback, wanted)), None)


def arguments_of(rollout: Any) -> dict[str, Any]:
    """The arguments that a ``VLLMRollout`` was made with, as far as an engine's memory is concerned."""
    return {
        "engine": rollout.options.arguments,
        "dtype": rollout.options.dtype,
        "placement": rollout.options.placement,
        "num_engines": rollout.options.num_engines,
        "oversample": rollout.options.oversample,
        "gpu_memory_utilization": rollout.options.memory_share,
        "sleep": rollout.options.sleep,
        "bucket_bytes": rollout.options.bucket_bytes,
        "max_new_tokens": rollout.sampling.max_new_tokens,
    }
