"""Sentences that say which phases do not fit in memory, and which configuration keys to change."""

from collections.abc import Iterator
from dataclasses import replace

from rlightning.memory_plan.phases import STATE, MemoryPlan
from rlightning.parallel.device import GIB

ROUND_TOKENS = 256
"""Suggested sizes of micro-batches are multiples of this."""
MOST_RANKS = 1024
LEAST = "with model.gradient_checkpointing: auto and micro-batches of the longest sequence"
MORE_ROOM = "spread it over more devices by rollout.engine.tensor_parallel_size, or give it its own (rollout.placement)"


def advise(plan: MemoryPlan) -> list[str]:
    """Return sentences that say which phases do not fit in memory, and what to change; empty if all fit."""
    update = advise_update(plan)
    if update and _asleep(plan).with_work(gradient_checkpointing=True).largest_microbatch() < plan.work.longest:
        return [*update, "Then plan again: the engine's room depends on it."]
    return [*update, *([] if update else advise_scoring(plan)), *advise_engine(plan)]


def advise_update(plan: MemoryPlan) -> list[str]:
    """Return the smallest change of settings that makes the update fit, as sentences; empty if it fits."""
    work, needed = plan.work, plan.update().total
    if needed <= plan.device_memory:
        return []
    prefix = f"The update needs {_gib(needed)} of {_gib(plan.device_memory)}:"
    if work.engine is not None and not plan.engine.can_sleep and _fits(_asleep(plan)):
        return [f"{prefix} set rollout.sleep: true, so that the engine gives its memory back."]
    ways = []
    checkpointed = plan.with_work(gradient_checkpointing="auto")
    if not work.gradient_checkpointing and _fits(checkpointed):
        ways.append(f"set model.gradient_checkpointing: auto ({_gib(checkpointed.update().total)})")
    if tokens := _suggest_microbatch(plan):
        ways.append(f"lower model.max_tokens_per_microbatch to {tokens}")
    elif not ways and (tokens := _suggest_microbatch(checkpointed)):
        ways.append(f"set model.gradient_checkpointing: auto and model.max_tokens_per_microbatch: {tokens}")
    return [f"{prefix} {', or '.join(ways) or next(_larger_changes(plan))}."]


def _suggest_microbatch(plan: MemoryPlan) -> int:
    """Return the largest micro-batch, in tokens, that fits and holds the longest sequence; 0 if there is none."""
    longest, largest = plan.work.longest, plan.largest_microbatch()
    return max(largest // ROUND_TOKENS * ROUND_TOKENS, longest) if largest >= longest else 0


def _larger_changes(plan: MemoryPlan) -> Iterator[str]:
    """Yield changes that make an update of the single longest sequence fit, with all layers checkpointed."""
    batch, spread = replace(plan.work.batch, max_tokens_per_microbatch=plan.work.longest), plan.work.parallelism
    least = plan.with_work(gradient_checkpointing=True, batch=batch)
    for states in ("bfloat16", "8bit"):
        smaller = least.with_work(optimizer_states=states)
        if _fits(smaller):
            yield f"set model.optimizer_states: {states}, {LEAST} ({_gib(smaller.update().total)})"
    ranks = max(spread.ranks, 2)
    while ranks <= MOST_RANKS:
        shards = replace(spread, kind="fsdp", ranks=ranks, shard_size=ranks // spread.tensor_parallel_size)
        if _fits(least.with_work(parallelism=shards)):
            if ranks == spread.ranks and spread.kind == "fsdp":
                yield f"leave out trainer.strategy.init_args.shard_size, {LEAST}"
            yield f"shard it over {ranks} devices (trainer.strategy: fsdp2, trainer.devices), {LEAST}"
        ranks *= 2
    for offload in ("optimizer", "parameters"):
        if _fits(least.with_work(parallelism=replace(spread, kind="fsdp", cpu_offload=offload))):
            yield f"set cpu_offload: {offload} of trainer.strategy fsdp2"
    yield "no number of devices makes its longest sequence fit; lower rollout.max_new_tokens or data.max_prompt_tokens"


def advise_scoring(plan: MemoryPlan) -> list[str]:
    """Return sentences that say how to make the forward passes for reference and old log-probabilities fit; empty if
    they fit.
    """
    if not plan.work.is_scored or (needed := plan.score().total) <= plan.device_memory:
        return []
    return [
        f"Log-probabilities before the update need {_gib(needed)} of {_gib(plan.device_memory)}: "
        "lower model.max_tokens_per_microbatch."
    ]


def advise_engine(plan: MemoryPlan) -> list[str]:
    """Return sentences that say how to make the engine on the device, or the sampler in the trainer's process, fit
    together with the trainer; empty if it fits.
    """
    memory = plan.device_memory
    if plan.work.engine is None:
        return []
    if not plan.has_engine_share:
        needed = max(parts.total for parts in (plan.sync(), plan.generate()))
        if needed <= memory:
            return []
        way = "lower rollout.max_sequences or rollout.max_new_tokens"
        offloading = plan.with_work(moved_each_step=plan.work.moved_each_step | STATE)
        if max(parts.total for parts in (offloading.sync(), offloading.generate())) <= memory:
            way += ", or add the callback OffloadDuringRollout"
        return [f"Sampling needs {_gib(needed)} of {_gib(memory)}: {way}."]
    engine, available, suggested = plan.engine, plan.available_utilization(), plan.suggested_utilization()
    if engine.utilization > available:
        way = MORE_ROOM if suggested is None else f"lower it to {suggested:.2f}"
        return [
            f"rollout.gpu_memory_utilization={engine.utilization:g} takes {_gib(engine.utilization * memory)}, "
            f"but the trainer leaves {_gib(max(available, 0) * memory)}: {way}."
        ]
    if engine.num_sequences(memory) >= 1:
        return []
    way = MORE_ROOM if suggested is None else f"raise rollout.gpu_memory_utilization to {suggested:.2f}"
    return [
        f"The engine's share has no room for one sequence of {plan.work.longest:,} tokens, "
        f"{_gib(engine.weights + engine.activations + engine.sequence)} with its weights: {way}."
    ]


def _asleep(plan: MemoryPlan) -> MemoryPlan:
    return plan if plan.work.engine is None else plan.with_engine(can_sleep=True)


def _fits(plan: MemoryPlan) -> bool:
    return plan.update().total <= plan.device_memory


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
