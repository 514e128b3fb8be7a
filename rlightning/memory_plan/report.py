"""A plan as text: what each phase takes, what the engine does with its share, what fits."""

from collections.abc import Sequence
from dataclasses import replace

from rlightning.memory_plan.advice import advise
from rlightning.memory_plan.devices import GIB
from rlightning.memory_plan.phases import MemoryPlan, Phase, total
from rlightning.memory_plan.work import Parallelism

TITLES: dict[Phase, str] = {"sync": "sync", "generate": "generate", "score": "log-probs", "update": "update"}

TOLERANCE = 0.04
"""So far below what was measured a plan may be (docs/plan.md)."""


def format_plan(plan: MemoryPlan) -> str:
    """The whole answer of ``rlightning plan``."""
    parts = [describe(plan), format_phases(plan), format_limits(plan)]
    if plan.work.local_engine is not None:
        parts.append(describe_engine(plan))
    return "\n\n".join([*parts, conclude(plan)]) + "\n"


def conclude(plan: MemoryPlan) -> str:
    """Whether all fits, and what to change if it does not, or only just."""
    advice, heading = advise(plan), []
    if not advice:
        advice = advise(MemoryPlan(plan.work, int((1 - TOLERANCE) * plan.device_memory), like=plan.trainer))
        if not advice:
            return "Everything fits."
        heading = [f"It only just fits, and a plan may be {TOLERANCE:.0%} too low. With so much less memory:"]
    return "\n".join([*heading, *(f"- {sentence}" for sentence in advice)])


def describe(plan: MemoryPlan) -> str:
    """What the plan is for, in two lines."""
    work, parallelism = plan.work, plan.work.parallelism
    return (
        f"{work.config.model_type} of {plan.trainer.weights.total:,} parameters, {work.precision}, "
        f"{parallelism.ranks} rank{'s' if parallelism.ranks > 1 else ''}{describe_spread(parallelism)}, "
        f"{plan.device_memory / GIB:.1f} GiB each\n"
        f"micro-batches of {plan.tokens:,} tokens, sequences of up to {work.longest:,}, "
        f"gradient_checkpointing: {describe_checkpointing(plan)}"
    )


def describe_spread(parallelism: Parallelism) -> str:
    """What each of several ranks holds of the models, as the end of a clause; "" of a single one."""
    spread = {"single": "", "ddp": ", a copy each", "fsdp": f", shards of {parallelism.shard_size}"}[parallelism.kind]
    if parallelism.tensor_parallel_size > 1:
        spread += f", tensor-parallel over {parallelism.tensor_parallel_size}"
    return spread


def describe_checkpointing(plan: MemoryPlan) -> str:
    """The setting, and what it comes to if that is to be found out."""
    setting = plan.work.gradient_checkpointing
    if setting != "auto":
        return str(setting).lower()
    return f"auto ({plan.count_checkpointed_layers()} of {plan.trainer.num_layers} layers)"


def format_phases(plan: MemoryPlan) -> str:
    """GiB on a rank, a row for each part and a column for each phase."""
    phases = {phase: parts for phase, parts in plan.phases().items() if parts}
    names = dict.fromkeys(name for parts in (phases["update"], *phases.values()) for name in parts)
    rows = [["GiB a rank", *(TITLES[phase] for phase in phases)]]
    for name in names:
        sizes = [parts.get(name, 0) for parts in phases.values()]
        if any(sizes):
            rows.append([name, *(f"{size / GIB:.2f}" if size else "-" for size in sizes)])
    rows.append(["total", *(f"{total(parts) / GIB:.2f}" for parts in phases.values())])
    rows.append(["left", *(f"{(plan.device_memory - total(parts)) / GIB:.2f}" for parts in phases.values())])
    return align(rows)


def format_limits(plan: MemoryPlan) -> str:
    """What an update could be, by the settings that decide it."""
    parallelism = plan.work.parallelism
    is_sharded = parallelism.kind == "fsdp"
    rows = [["gradient_checkpointing"], *([name] for name in ("false", "true"))]
    choices = [(False, parallelism.reshard_after_forward), (True, parallelism.reshard_after_forward)]
    if is_sharded:
        choices = [(is_checkpointed, reshards) for is_checkpointed in (False, True) for reshards in (True, False)]
        rows = [["gradient_checkpointing", "reshard_after_forward"]]
        rows += [[str(checkpointed).lower(), str(reshards).lower()] for checkpointed, reshards in choices]
    rows[0] += ["activations, GiB", "update, GiB", "largest micro-batch", "longest sequence"]
    for row, (is_checkpointed, reshards) in zip(rows[1:], choices, strict=True):
        other = plan.replace(parallelism=replace(parallelism, reshard_after_forward=reshards))
        update = other.update(gradient_checkpointing=is_checkpointed)
        row += [f"{update['activations'] / GIB:.2f}", f"{total(update) / GIB:.2f}"]
        limits = (other.largest_microbatch(is_checkpointed), other.longest_sequence(is_checkpointed))
        row += [f"{limit:,}" if limit else "none" for limit in limits]
    return align(rows)


def describe_engine(plan: MemoryPlan) -> str:
    """What the engine does with its share, and which one to give it."""
    engine = plan.work.local_engine
    assert engine is not None
    parts, suggested = plan.engine(), plan.suggested_utilization()
    text = (
        f"gpu_memory_utilization {engine.utilization:g} is {engine.utilization * plan.device_memory / GIB:.1f} GiB: "
        f"weights {parts.weights / GIB:.1f}, activations {parts.activations / GIB:.1f}, KV cache "
        f"{max(parts.kv_cache, 0) / GIB:.1f}, which holds {parts.num_sequences:,} sequences of {plan.work.longest:,} "
        f"tokens at once (the engine works on up to {engine.max_sequences:,})."
    )
    away = plan.away()
    if any(away.values()):
        names, size = " and ".join(away), sum(away.values()) / GIB
        text += f"\nWhile it is awake, {names} wait in the host's memory ({size:.1f} GiB), or it would lack room."
    if suggested is None:
        return f"{text}\nSuggested: none, there is no room for an engine beside this trainer."
    held = min(plan.engine(suggested).num_sequences, engine.max_sequences)
    return f"{text}\nSuggested: rollout.gpu_memory_utilization: {suggested:.2f}, which holds {held:,} of them."


def align(rows: Sequence[Sequence[str]]) -> str:
    """A table of text: the first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)
