"""Formats a memory plan as text: the phases, the engine's share, and the limits."""

from collections.abc import Sequence
from dataclasses import replace

from rlightning.memory_plan.advice import advise
from rlightning.memory_plan.phases import MemoryPlan, PhaseBytes
from rlightning.memory_plan.work import Parallelism
from rlightning.parallel.device import GIB

TITLES = {"score": "log-probs"}
"""Column titles that differ from the name of the phase."""
TOLERANCE = 0.04
"""Share of the measured memory by which a plan may underestimate it (docs/plan.md)."""


def format_plan(plan: MemoryPlan) -> str:
    """Return a memory plan as the text that ``rlightning plan`` prints."""
    parts = [describe(plan), format_phases(plan), format_limits(plan)]
    if plan.work.engine is not None:
        parts.append(describe_engine(plan))
    return "\n\n".join([*parts, conclude(plan)]) + "\n"


def conclude(plan: MemoryPlan) -> str:
    """Return the closing text of a plan: that everything fits, or advice if it does not fit or only just fits."""
    advice, heading = advise(plan), []
    if not advice:
        advice = advise(replace(plan, device_memory=int((1 - TOLERANCE) * plan.device_memory)))
        if not advice:
            return "Everything fits."
        heading = [f"It only just fits, and a plan may be {TOLERANCE:.0%} too low. With so much less memory:"]
    return "\n".join([*heading, *(f"- {sentence}" for sentence in advice)])


def describe(plan: MemoryPlan) -> str:
    """Return lines about the plan: actor, precision, ranks and device memory; the batch; and other trained models."""
    work, parallelism, others = plan.work, plan.work.parallelism, describe_others(plan)
    return (
        f"{work.config.model_type} of {plan.trainer.weights.total:,} parameters, {work.precision}, "
        f"{parallelism.ranks} rank{'s' if parallelism.ranks > 1 else ''}{describe_spread(parallelism)}, "
        f"{plan.device_memory / GIB:.1f} GiB each\n"
        f"{describe_adapter(plan)}"
        f"micro-batches of {plan.tokens:,} tokens, sequences of up to {work.longest:,}, "
        f"gradient_checkpointing: {describe_checkpointing(plan)}" + (f"\n{others}" if others else "")
    )


def describe_adapter(plan: MemoryPlan) -> str:
    """Return a line with the number of parameters of the actor's adapter, and the GiB a rank of its weights, gradients
    and moments; "" without an adapter.
    """
    lora, trainer = plan.work.adapter, plan.trainer
    if lora is None:
        return ""
    size = trainer.parameters() + trainer.gradients() + trainer.optimizer_state()
    return (
        f"{lora.describe()}: {lora.num_parameters:,} trained parameters, {size / GIB:.2f} GiB a rank with their "
        "gradients and moments\n"
    )


def describe_others(plan: MemoryPlan) -> str:
    """Return a text with the GiB that each trained model other than the actor adds to the update, and the names of
    models of unknown size; "" if there are none.
    """
    trained = [role.name for role in plan.work.others if role.config is not None and role.optimizer_states is not None]
    unknown = [role.name for role in plan.work.others if role.config is None]
    parts = [f"{name} {plan.update_bytes_of(name) / GIB:.1f} GiB of the update" for name in trained]
    return "; ".join([*parts, *([f"not counted: {', '.join(unknown)}"] if unknown else [])])


def describe_spread(parallelism: Parallelism) -> str:
    """Return a clause such as ", shards of 8" about how models are distributed over ranks; "" if they are not."""
    spread = {"single": "", "ddp": ", a copy each", "fsdp": f", shards of {parallelism.shard_size}"}[parallelism.kind]
    if parallelism.tensor_parallel_size > 1:
        spread += f", tensor-parallel over {parallelism.tensor_parallel_size}"
    return spread


def describe_checkpointing(plan: MemoryPlan) -> str:
    """Return the value of ``gradient_checkpointing`` as text; for "auto" with the number of layers that the plan
    checkpoints.
    """
    setting, kept = plan.work.gradient_checkpointing, ", logits kept" if plan.keeps_logits else ""
    if setting != "auto":
        return f"{str(setting).lower()}{kept}"
    return f"auto ({plan.count_checkpointed_layers()} of {plan.trainer.num_layers} layers{kept})"


def describe_phases(plan: MemoryPlan) -> str:
    """Return one line with the total GiB of each phase, the device's memory, and what other trained models take."""
    sizes = (f"{TITLES.get(phase, phase)} {parts.total / GIB:.1f}" for phase, parts in plan.phases().items())
    others = describe_others(plan)
    return f"{', '.join(sizes)} of {plan.device_memory / GIB:.1f} GiB" + (f" ({others})" if others else "")


def sum_up(phase: str, parts: PhaseBytes) -> str:
    """Return one line that adds up a phase: the GiB of each of its parts, and their total."""
    sizes = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.by_name().items())
    return f"GiB in {phase}: {sizes} = {parts.total / GIB:.1f}"


def format_phases(plan: MemoryPlan) -> str:
    """Return a table in GiB with a row for each part and a column for each phase."""
    phases = plan.phases()
    columns = [parts.by_name() for parts in phases.values()]
    rows = [["GiB a rank", *(TITLES.get(phase, phase) for phase in phases)]]
    for name in PhaseBytes(**dict.fromkeys(PhaseBytes.__slots__, 1)).by_name():
        if any(name in column for column in columns):
            rows.append([name, *(f"{column[name] / GIB:.2f}" if name in column else "-" for column in columns)])
    rows.append(["total", *(f"{parts.total / GIB:.2f}" for parts in phases.values())])
    rows.append(["left", *(f"{(plan.device_memory - parts.total) / GIB:.2f}" for parts in phases.values())])
    return align(rows)


def format_limits(plan: MemoryPlan) -> str:
    """Return a table of what fits with and without gradient checkpointing (and FSDP's ``reshard_after_forward``): the
    GiB of an update, the largest micro-batch and the longest sequence, in tokens.
    """
    parallelism = plan.work.parallelism
    is_sharded = parallelism.kind == "fsdp"
    rows = [["gradient_checkpointing", *(["reshard_after_forward"] if is_sharded else [])]]
    rows[0] += ["activations, GiB", "update, GiB", "largest micro-batch", "longest sequence"]
    for is_checkpointed in (False, True):
        for reshards in (True, False) if is_sharded else (parallelism.reshard_after_forward,):
            spread = replace(parallelism, reshard_after_forward=reshards)
            other = plan.with_work(parallelism=spread, gradient_checkpointing=is_checkpointed)
            update, limits = other.update(), (other.largest_microbatch(), other.longest_sequence())
            row = [str(is_checkpointed).lower(), *([str(reshards).lower()] if is_sharded else [])]
            row += [f"{update.activations / GIB:.2f}", f"{update.total / GIB:.2f}"]
            rows.append(row + [f"{limit:,}" if limit else "none" for limit in limits])
    return align(rows)


def describe_moved(plan: MemoryPlan) -> str:
    """Return a clause that names the parts offloaded to the host while the engine is awake, with their total GiB; "" if
    there are none.
    """
    moved = plan.moved()
    names = " and ".join(moved.by_name())
    return f"the host's memory holds {names} ({moved.total / GIB:.1f} GiB)" if moved.total else ""


def describe_engine(plan: MemoryPlan) -> str:
    """Return lines about the GiB of the engine's weights and KV cache, and how many sequences fit. For an engine with a
    share of the device, they end with a suggested ``gpu_memory_utilization``.
    """
    engine, memory = plan.engine, plan.device_memory
    moved = describe_moved(plan)
    if not plan.has_engine_share:
        return (
            f"The sampler's copy of the model takes {engine.weights / GIB:.1f} GiB, and its KV cache of "
            f"{engine.max_sequences:,} sequences of {plan.work.longest:,} tokens {engine.kv_cache(memory) / GIB:.1f}."
            + (f"\nMeanwhile, {moved}." if moved else "")
        )
    text = (
        f"gpu_memory_utilization {engine.utilization:g} is {engine.utilization * memory / GIB:.1f} GiB: "
        f"weights {engine.weights / GIB:.1f}, activations {engine.activations / GIB:.1f}, KV cache "
        f"{max(engine.kv_cache(memory), 0) / GIB:.1f}, which holds {engine.num_sequences(memory):,} sequences of "
        f"{plan.work.longest:,} tokens at once (the engine works on up to {engine.max_sequences:,})."
    )
    if moved:
        text += f"\nWhile it is awake, {moved}, or it would lack room."
    suggested = plan.suggested_utilization()
    if suggested is None:
        return f"{text}\nSuggested: none, there is no room for an engine beside this trainer."
    held = min(plan.with_engine(utilization=suggested).engine.num_sequences(memory), engine.max_sequences)
    return f"{text}\nSuggested: rollout.gpu_memory_utilization: {suggested:.2f}, which holds {held:,} of them."


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a text table: the first column aligned left, the others aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)
