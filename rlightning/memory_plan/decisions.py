"""Decisions of a run based on its memory plan: layers to checkpoint, what FSDP keeps, whether an engine can start."""

import logging
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from transformers import PreTrainedConfig

from rlightning.data.prompt_limit import PROMPT_TOKENS
from rlightning.errors import ConfigError
from rlightning.memory_plan.advice import advise_engine, advise_update
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.report import sum_up
from rlightning.memory_plan.work import Parallelism, RoleMemory, Work, read_precision
from rlightning.models.adapter import LoRA
from rlightning.models.counts import can_count
from rlightning.models.layers import Checkpointing, should_compile
from rlightning.optim.optimizer import AdamWSettings
from rlightning.parallel.collectives import any_rank
from rlightning.parallel.device import GIB
from rlightning.parallel.fsdp import FSDP
from rlightning.protocols import HasConfig, HasData, HasPromptLimit, has
from rlightning.types.batch_plan import BatchPlan

log = logging.getLogger(__name__)

ACTOR = "actor"
"""The role that a :class:`~rlightning.memory_plan.work.Work` describes; see module/roles.py."""


class PlannedRole(Protocol):
    """The settings of one model of the run that a memory plan reads; a :class:`~rlightning.module.roles.ModelRole` has
    them.
    """

    optimizer: AdamWSettings | None
    config: PreTrainedConfig | None
    gradient_checkpointing: Checkpointing


@runtime_checkable
class PlannedModule(HasConfig, Protocol):
    """A module whose memory can be planned: it has the batch plan, models and settings that a plan reads, as
    :class:`~rlightning.module.RLModule` has.
    """

    plan: BatchPlan | None
    compiles_layers: bool | None
    generates: bool
    adapter: LoRA | None
    kl_coef: float

    @property
    def max_model_length(self) -> int:
        """Maximum number of tokens of a sequence, by the model's position encoding."""

    def configure_roles(self) -> Mapping[str, PlannedRole]:
        """Return the settings of the run's models by role, such as "actor"."""

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference is the actor without its adapter."""


def read_run(trainer: Trainer, module: object) -> Work:
    """Return the properties of a run on which its memory depends, after its devices are set up; raises a ConfigError if
    they cannot be planned with.
    """
    if not isinstance(module, PlannedModule) or module.plan is None:
        raise ConfigError(f"{type(module).__name__} has no plan of a step's batch")
    strategy, roles = trainer.strategy, dict(module.configure_roles())
    parallelism = Parallelism.of(strategy, trainer.world_size)
    actor = roles.pop(ACTOR)
    work = Work(
        config=module.model_config,
        adapter=module.adapter,
        is_own_reference=module.is_own_reference and module.kl_coef > 0,
        others=tuple(
            RoleMemory(
                name=name,
                config=role.config if role.config is not None and can_count(role.config) else None,
                optimizer_states=None if role.optimizer is None else role.optimizer.optimizer_states,
                gradient_checkpointing=role.gradient_checkpointing,
            )
            for name, role in roles.items()
        ),
        batch=module.plan,
        longest=min(module.plan.max_tokens_per_microbatch, module.max_model_length),
        precision=read_precision(trainer.precision),
        gradient_checkpointing=actor.gradient_checkpointing,
        is_compiled=should_compile(module.compiles_layers, strategy.root_device)[0],
        optimizer_states=(actor.optimizer or AdamWSettings()).optimizer_states,
        parallelism=parallelism,
    )
    data = trainer.datamodule if has(trainer, HasData) else None
    max_prompt_tokens = data.max_prompt_tokens if has(data, HasPromptLimit) else None
    callbacks = trainer.callbacks if module.generates else ()  # type: ignore[attr-defined]  # set by a connector
    return work.with_callbacks(callbacks, max_prompt_tokens or PROMPT_TOKENS)


def plan_run(trainer: Trainer, module: object) -> MemoryPlan:
    """Return the memory plan of a run on the trainer's CUDA device; see :func:`read_run`.

    ``torch.cuda.set_per_process_memory_fraction`` reduces the trainer's memory; an engine's share is of the device's
    whole memory.
    """
    work, device = read_run(trainer, module), trainer.strategy.root_device
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(device) if torch.cuda.is_initialized() else 1.0
    plan = MemoryPlan(work, int(fraction * total))
    if fraction == 1 or not plan.has_engine_share:
        return plan
    return plan.with_engine(utilization=plan.engine.utilization / fraction)


def check_engine(trainer: object, module: object) -> None:
    """Raise a ConfigError if the engine, or the sampler in the trainer's process, cannot fit on the device even with
    maximum offloading. Without a CUDA device or a plan, do nothing.

    The message has the arithmetic, and the keys that would help.
    """
    if not isinstance(trainer, Trainer) or trainer.strategy.root_device.type != "cuda":
        return
    try:
        plan = plan_run(trainer, module)
    except ConfigError:
        return  # without a plan there is nothing to foresee
    if advice := advise_engine(plan):
        phases = {"sync": plan.sync(), "generate": plan.generate()}
        if plan.has_engine_share:
            phases["start"] = plan.start()
        worst = max(phases, key=lambda phase: phases[phase].total)
        raise ConfigError(f"{advice[0]} {sum_up(worst, phases[worst])}.")


def decide_gathering(trainer: Trainer, module: object) -> None:
    """Replace FSDP's settings that are "auto", by the memory plan of all ranks, and log what is kept and why; every
    rank has to call it.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP) or not Parallelism.of(strategy, trainer.world_size).automatic:
        return
    try:
        plan = plan_run(trainer, module) if strategy.root_device.type == "cuda" else None
    except ConfigError:
        plan = None
    found = Parallelism() if plan is None else plan.work.parallelism
    reshards, reduces = bool(found.reshard_after_forward), bool(found.reduce_every_microbatch)
    # Ranks whose devices differ have to communicate alike.
    reshards, reduces = any_rank(reshards, name="weights"), any_rank(reduces, name="gradients")
    strategy.decide_gathering(reshard_after_forward=reshards, reduce_every_microbatch=reduces)
    if plan is None or (reshards and reduces) or not trainer.is_global_zero:
        return
    kept = " and ".join([*["weights gathered"] * (not reshards), *["gradients whole"] * (not reduces)])
    log.info(
        "FSDP keeps %s until the optimizer step: an update is planned to take %.1f of %.1f GiB with them",
        kept,
        plan.update().total / GIB,
        plan.device_memory / GIB,
    )


def decide_checkpointing(trainer: Trainer, module: HasConfig) -> tuple[int, str]:
    """Return how many layers ``gradient_checkpointing="auto"`` checkpoints on the CUDA device, and why.

    For a module that is not a :class:`PlannedModule`, all layers.

    Raises:
        ConfigError: the update would not fit even with all layers checkpointed; the message has the arithmetic, and the
            keys that would help.
    """
    try:
        plan = plan_run(trainer, module)
    except ConfigError as error:
        num_layers: int = module.model_config.get_text_config().num_hidden_layers
        return num_layers, f"what they take is not known ({error})"
    if advice := advise_update(plan):
        raise ConfigError(f"{advice[0]} {sum_up('update', plan.update())}.")
    count = plan.count_checkpointed_layers()
    bare, total = (plan.update_of(plan.tokens, layers).total for layers in (0, count))
    reason = (
        f"without any, an update of {plan.tokens:,} tokens a micro-batch is planned to take "
        f"{bare / GIB:.1f} of {plan.device_memory / GIB:.1f} GiB"
    )
    return count, f"{reason}, with these {total / GIB:.1f}" if count else reason


def decide_kept_logits(trainer: Trainer, module: object) -> bool:
    """Return whether updates keep their logits until the backward pass, by the memory plan of the CUDA device, and log
    it; False without a plan. Ranks may differ, as results do not.
    """
    try:
        plan = plan_run(trainer, module)
    except ConfigError:
        return False
    if plan.keeps_logits and trainer.is_global_zero:
        log.info(
            "Logits are kept until the backward pass, not computed twice: an update is planned to take %.1f of %.1f "
            "GiB with them",
            plan.update().total / GIB,
            plan.device_memory / GIB,
        )
    return plan.keeps_logits
