"""What will not fit, and which key to change: one sentence each."""

from dataclasses import replace

from rlightning.memory_plan.devices import GIB
from rlightning.memory_plan.phases import MemoryPlan, total
from rlightning.optim import OptimizerStates

ROUND_TOKENS = 256
"""Micro-batches are suggested in multiples of this."""
MOST_RANKS = 1024


def advise(plan: MemoryPlan) -> list[str]:
    """Sentences about each phase that does not fit; empty if all do."""
    if total(plan.update()) > plan.device_memory and not _can_update(plan):
        return [*advise_update(plan), "Then plan again: the engine's room depends on it."]
    return [*advise_update(plan), *advise_scoring(plan), *advise_engine(plan)]


def _can_update(plan: MemoryPlan) -> bool:
    """Whether an update of the longest sequence would fit where the models are now."""
    engine = plan.work.local_engine
    asleep = plan if engine is None else plan.replace(engine=replace(engine, can_sleep=True))
    return asleep.largest_microbatch(True) >= plan.work.longest


def advise_update(plan: MemoryPlan) -> list[str]:
    """About the update."""
    work, needed = plan.work, total(plan.update())
    if needed <= plan.device_memory:
        return []
    prefix = f"The update needs {_gib(needed)} of {_gib(plan.device_memory)}:"
    if work.local_engine is not None and not work.local_engine.can_sleep:
        asleep = plan.replace(engine=replace(work.local_engine, can_sleep=True))
        if total(asleep.update()) <= plan.device_memory:
            return [f"{prefix} set rollout.sleep: true, so that the engine gives its memory back."]
    ways = []
    if not work.gradient_checkpointing:
        checkpointed = total(plan.update(gradient_checkpointing="auto"))
        if checkpointed <= plan.device_memory:
            ways.append(f"set model.gradient_checkpointing: auto ({_gib(checkpointed)})")
    if (tokens := _round(plan.largest_microbatch(work.gradient_checkpointing))) >= work.longest:
        ways.append(f"lower model.max_tokens_per_microbatch to {tokens}")
    elif not ways and (tokens := _round(plan.largest_microbatch(True))) >= work.longest:
        ways.append(f"set model.gradient_checkpointing: auto and model.max_tokens_per_microbatch: {tokens}")
    return [f"{prefix} {', or '.join(ways or advise_optimizer_states(plan) or advise_sharding(plan))}."]


def advise_optimizer_states(plan: MemoryPlan) -> list[str]:
    """Whether an update of the longest sequence alone would fit with AdamW's moments in fewer bytes."""
    work = plan.work
    batch = replace(work.batch, max_tokens_per_microbatch=work.longest)
    least = plan.replace(gradient_checkpointing=True, batch=batch)
    smaller: tuple[OptimizerStates, ...] = ("bfloat16", "8bit")
    for states in smaller:
        needed = total(least.replace(optimizer_states=states).update())
        if needed <= plan.device_memory and needed < total(least.update()):
            rest = "model.gradient_checkpointing: auto and micro-batches of the longest sequence"
            return [f"set model.optimizer_states: {states}, with {rest} ({_gib(needed)})"]
    return []


def advise_sharding(plan: MemoryPlan) -> list[str]:
    """How else an update of the longest sequence alone would fit."""
    parallelism = plan.work.parallelism
    least = plan.replace(
        gradient_checkpointing=True,
        batch=replace(plan.work.batch, max_tokens_per_microbatch=plan.work.longest),
    )
    ranks = max(parallelism.ranks, 2)
    start = ranks
    while ranks <= MOST_RANKS:
        spread = replace(parallelism, kind="fsdp", ranks=ranks, shard_size=ranks // parallelism.tensor_parallel_size)
        if total(least.replace(parallelism=spread).update()) <= plan.device_memory:
            rest = "model.gradient_checkpointing: auto and micro-batches of the longest sequence"
            if ranks == start and parallelism.kind == "fsdp":
                return [f"leave out trainer.strategy.init_args.shard_size, with {rest}"]
            return [f"shard it over {ranks} devices (trainer.strategy: fsdp2, trainer.devices), with {rest}"]
        ranks *= 2
    for offload in ("optimizer", "parameters"):
        spread = replace(parallelism, kind="fsdp", cpu_offload=offload)
        if total(least.replace(parallelism=spread).update()) <= plan.device_memory:
            return [f"set cpu_offload: {offload} of trainer.strategy fsdp2"]
    return [
        "no number of devices makes its longest sequence fit; lower rollout.max_new_tokens or data.max_prompt_tokens"
    ]


def advise_scoring(plan: MemoryPlan) -> list[str]:
    """About log-probabilities of the reference and of the policy before the update."""
    needed = total(plan.score())
    if needed <= plan.device_memory or total(plan.update()) > plan.device_memory:
        return []  # what makes the update fit makes these fit
    return [
        f"Log-probabilities before the update need {_gib(needed)} of {_gib(plan.device_memory)}: "
        "lower model.max_tokens_per_microbatch."
    ]


def advise_engine(plan: MemoryPlan) -> list[str]:
    """About the engine beside the trainer."""
    engine = plan.work.local_engine
    if engine is None:
        return []
    available, suggested = plan.available_utilization(), plan.suggested_utilization()
    if engine.utilization <= available:
        parts = plan.engine()
        if parts.num_sequences >= 1:
            return []
        needed = f"{_gib(parts.weights + parts.activations + parts.sequence)} with its weights"
        prefix = f"The engine's share has no room for one sequence of {plan.work.longest:,} tokens, {needed}:"
        if suggested is not None:
            return [f"{prefix} raise rollout.gpu_memory_utilization to {suggested:.2f}."]
        return [f"{prefix} {_free_more()}."]
    prefix = (
        f"rollout.gpu_memory_utilization={engine.utilization:g} takes {_gib(engine.utilization * plan.device_memory)}, "
        f"but the trainer leaves {_gib(max(available, 0) * plan.device_memory)}:"
    )
    return [f"{prefix} {_free_more() if suggested is None else f'lower it to {suggested:.2f}'}."]


def _free_more() -> str:
    return "spread it over more devices by rollout.engine.tensor_parallel_size, or give it its own (rollout.placement)"


def _round(tokens: int) -> int:
    return tokens // ROUND_TOKENS * ROUND_TOKENS


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
