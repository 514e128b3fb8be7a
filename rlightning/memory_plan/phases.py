"""Computes the bytes on a rank's device in each phase of a step, the basis of all decisions about memory."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlightning.memory_plan.trainer import TrainerMemory
from rlightning.memory_plan.work import Work
from rlightning.models.counts import read_setting
from rlightning.parallel.device import GIB
from rlightning.python_values import field_values
from rlightning.rollout.engine_memory import EngineMemory

# Measured on an H200 (docs/measurements.md, "Memory of a GPU that actor and engine share").
CONTEXT_BYTES = int(0.6 * GIB)
"""Bytes of the trainer's CUDA context, in addition to PyTorch's memory."""
ENGINE_CONTEXT_BYTES = int(1.5 * GIB)
"""Bytes of an engine's CUDA context, libraries and CUDA graphs, which it keeps while it sleeps."""
EMPTIED_CACHE_BYTES = int(0.6 * GIB)
"""Bytes that PyTorch reserves beyond its tensors after its cache was emptied."""
FRESH_FRAGMENTATION = 0.06
"""Fragmentation of a cache that was emptied before, as a share of an update's transient bytes."""
FREE_SHARE = 0.1
"""Share of the device's memory that an update should leave free if the number of checkpointed layers is chosen."""
KEPT_FREE_SHARE = 0.2
"""Share of the device's memory that an update has to leave free for FSDP's "auto" to keep weights gathered."""
STATE, MODELS = frozenset({"optimizer_state"}), frozenset({"parameters", "frozen_models"})
MOVES = (STATE, STATE | MODELS)
"""Sets of parts to offload while an engine that lacks room is awake; the first sufficient set is used."""
PART_NAMES = {
    "layer_backward": "a layer's backward",
    "allocator_slack": "allocator's slack",
    "contexts": "CUDA contexts",
    "engine_weights": "engine's weights",
    "engine_activations": "engine's activations",
    "kv_cache": "KV cache",
}
"""Names in tables of the fields of :class:`PhaseBytes` whose own names are not used there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """The peak bytes on a rank's device in one phase, by part."""

    parameters: int = 0
    frozen_models: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    gathered_parameters: int = 0
    activations: int = 0
    logits: int = 0
    layer_backward: int = 0
    attention_workspace: int = 0
    weight_bucket: int = 0
    gathering_window: int = 0
    allocator_slack: int = 0
    contexts: int = 0
    engine_weights: int = 0
    engine_activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(field_values(self).values())

    @property
    def transient(self) -> int:
        """Bytes that are allocated and freed within the phase."""
        return self.activations + self.logits + self.layer_backward + self.attention_workspace

    @property
    def engine(self) -> int:
        """Bytes of an engine's weights, activations and KV cache, which are in its share of the device."""
        return self.engine_weights + self.engine_activations + self.kv_cache

    @property
    def tensors(self) -> int:
        """Bytes of the trainer's tensors, without engines, CUDA contexts and allocator overhead."""
        return self.total - self.engine - self.contexts - self.allocator_slack

    def by_name(self) -> dict[str, int]:
        """Return the bytes of each part that is not 0, by its name in tables."""
        return {
            PART_NAMES.get(field, field.replace("_", " ")): size for field, size in field_values(self).items() if size
        }


@dataclass(frozen=True)
class MemoryPlan:
    """The planned bytes of each phase on a device, and the limits that follow from them."""

    work: Work
    device_memory: int

    def __post_init__(self) -> None:
        """Replace FSDP's settings that are "auto".

        Weights stay gathered and gradients whole until the optimizer step if an update then leaves ample memory, with
        no more layers checkpointed.
        """
        parallelism = self.work.parallelism
        if not parallelism.automatic:
            return
        freed = self.with_work(parallelism=parallelism.decided(keeps=False))
        work = freed.work
        if parallelism.can_keep:
            kept = self.with_work(parallelism=parallelism.decided(keeps=True))
            count = kept.count_checkpointed_layers()
            is_ample = kept.update_of(kept.tokens, count).total <= (1 - KEPT_FREE_SHARE) * self.device_memory
            if is_ample and count == freed.count_checkpointed_layers():
                work = kept.work
        object.__setattr__(self, "work", work)

    def with_work(self, **changes: Any) -> "MemoryPlan":
        """Return the plan of a run with these fields of :class:`Work` changed, on the same device."""
        return replace(self, work=replace(self.work, **changes))

    def with_engine(self, **changes: Any) -> "MemoryPlan":
        """Return the plan of a run with these properties of the engine changed."""
        assert self.work.rollout is not None
        return self.with_work(rollout=replace(self.work.rollout, engine=replace(self.engine, **changes)))

    @cached_property
    def trainer(self) -> TrainerMemory:
        """The memory of the trainer, without engines."""
        return TrainerMemory(self.work)

    @property
    def engine(self) -> EngineMemory:
        """The memory of the engine on the device, or of the sampler in the trainer's process. Access it only if there
        is one.
        """
        assert self.work.engine is not None
        return self.work.engine

    @property
    def has_engine_share(self) -> bool:
        """Whether engine processes have a share of the device; a sampler in the trainer's process has none."""
        return self.work.engine is not None and self.engine.num_engines > 0

    @property
    def tokens(self) -> int:
        """Number of tokens of a full micro-batch."""
        return self.work.batch.max_tokens_per_microbatch

    # The phases of a step

    def phases(self) -> dict[str, PhaseBytes]:
        """Return the bytes at the peak of each phase that the run has, by the phase's name, in their order."""
        phases = {
            "sync": self.sync if self.work.rollout is not None else None,
            "generate": self.generate if self.work.engine is not None else None,
            "score": self.score if self.work.is_scored else None,
            "update": self.update,
        }
        return {name: count() for name, count in phases.items() if count is not None}

    def update(self) -> PhaseBytes:
        """Return the bytes at the peak of an update with full micro-batches."""
        return self.update_of(self.tokens, self.count_checkpointed_layers(), keeps_logits=self.keeps_logits)

    def update_of(self, tokens: int, checkpointed_layers: int, *, keeps_logits: bool = False) -> PhaseBytes:
        """Return the bytes at the peak of an update with micro-batches of ``tokens``: after a forward or in a layer's
        backward, whichever is larger. Logits that are kept for the backward are freed before its first layer.
        """
        trainer = self.trainer
        activations = trainer.activations(tokens, checkpointed_layers)
        logits = trainer.logits(tokens, has_gradient=True, is_kept=keeps_logits)
        layer, workspace = trainer.layer_backward(activations), trainer.attention_workspace(tokens)
        is_in_layer, most = layer + workspace > logits, max(logits, layer + workspace)
        kept = max(int(activations.kept), int(activations.forward) - most)
        kept += trainer.others_activations(tokens, checkpointed_layers)
        # Moments are taken out when activations are gone.
        moments = max(0, trainer.moments_at_a_time() - kept - most)
        return self._with_slack(
            replace(
                self._models,
                optimizer_state=trainer.optimizer_state() + moments,
                gradients=trainer.gradients(),
                gathered_parameters=trainer.gathered_parameters(),
                activations=kept,
                logits=0 if is_in_layer else logits,
                layer_backward=layer if is_in_layer else 0,
                attention_workspace=workspace if is_in_layer else 0,
            )
        )

    def update_bytes_of(self, role: str) -> int:
        """Return the bytes that a model other than the actor adds to the peak of an update."""
        others = tuple(one for one in self.work.others if one.name != role)
        plans, count = (self, self.with_work(others=others)), self.count_checkpointed_layers()
        beside, without = (plan.update_of(self.tokens, count).total for plan in plans)
        return beside - without

    def score(self) -> PhaseBytes:
        """Return the bytes at the peak of the forward passes for reference and old log-probabilities."""
        return self._with_slack(
            replace(
                self._models,
                gathered_parameters=self.trainer.gathered_parameters(),
                activations=int(self.trainer.activations(self.tokens).scoring),
                logits=self.trainer.logits(self.tokens, has_gradient=False),
            )
        )

    def _with_slack(self, parts: PhaseBytes) -> PhaseBytes:
        return replace(parts, allocator_slack=int(FRESH_FRAGMENTATION * parts.transient))

    def sync(self) -> PhaseBytes:
        """Return the bytes at the peak of a weight sync: an engine on the device has weights, but no KV cache yet."""
        parts = replace(self._resting(self.away() - MODELS), gathering_window=self.trainer.gathering_window())
        return parts if self.work.engine is None else replace(parts, engine_weights=self.engine.weights)

    def generate(self) -> PhaseBytes:
        """Return the bytes at the peak of generation, for an engine or sampler on the device."""
        return self._with_awake_engine(self._resting(self.away()))

    def start(self) -> PhaseBytes:
        """Return the bytes at the peak of the engine's start, while the trainer's models are not yet offloaded."""
        return self._with_awake_engine(replace(self._models, optimizer_state=0, weight_bucket=0))

    def _resting(self, away: frozenset[str]) -> PhaseBytes:
        """Return the trainer's bytes between two updates, with an empty allocator cache, without the parts ``away``."""
        return replace(self._models, allocator_slack=EMPTIED_CACHE_BYTES, **dict.fromkeys(away, 0))

    @cached_property
    def _models(self) -> PhaseBytes:
        """Return the parts that exist in all phases, including all of an engine that cannot sleep."""
        trainer, engine = self.trainer, self.work.engine
        parts = PhaseBytes(
            parameters=trainer.parameters(),
            frozen_models=trainer.frozen_models(),
            optimizer_state=trainer.optimizer_state(),
            weight_bucket=trainer.weight_bucket(),
            contexts=CONTEXT_BYTES
            + (0 if engine is None else engine.num_engines * ENGINE_CONTEXT_BYTES + engine.asleep),
        )
        return parts if engine is None or engine.can_sleep else self._with_awake_engine(parts)

    def _with_awake_engine(self, parts: PhaseBytes) -> PhaseBytes:
        engine, cache = self.engine, max(self.engine.kv_cache(self.device_memory), 0)
        return replace(parts, engine_weights=engine.weights, engine_activations=engine.activations, kv_cache=cache)

    # Settings derived from the sizes

    def count_checkpointed_layers(self) -> int:
        """Return the number of checkpointed layers; for "auto" the fewest that leave ``FREE_SHARE`` of memory free."""
        wanted, num_layers = self.work.gradient_checkpointing, self.trainer.num_layers
        if wanted != "auto":
            return num_layers if wanted else 0
        limit = (1 - FREE_SHARE) * self.device_memory
        fitting = (count for count in range(num_layers) if self.update_of(self.tokens, count).total <= limit)
        return next(fitting, num_layers)

    @cached_property
    def keeps_logits(self) -> bool:
        """Whether an update keeps its logits for the backward pass: if that leaves ``FREE_SHARE`` of memory free, no
        layer is checkpointed, and no other model is trained, whose backward pass may come first.
        """
        is_alone = all(role.optimizer_states is None for role in self.work.others)
        if not is_alone or self.count_checkpointed_layers():
            return False
        return self.update_of(self.tokens, 0, keeps_logits=True).total <= (1 - FREE_SHARE) * self.device_memory

    def away(self) -> frozenset[str]:
        """Return the names of the parts that are offloaded to the host while the engine is awake.

        ``OffloadDuringRollout`` offloads its parts in each step, ``MakeRoomForEngine`` as few others as possible for an
        engine process that sleeps. For a sampler in the trainer's process, no others are offloaded.
        """
        own = self.work.moved_each_step
        if not self.has_engine_share or not self.engine.can_sleep:
            return own
        choices = [own, *(own | moved for moved in MOVES)]
        awake = ((away, self._with_awake_engine(self._resting(away))) for away in choices)
        return next((away for away, parts in awake if parts.total <= self.device_memory), choices[-1])

    def moved(self) -> PhaseBytes:
        """Return the bytes of the parts that are offloaded to the host while the engine is awake."""
        sizes = field_values(self._models)
        return PhaseBytes(**{name: sizes[name] for name in self.away()})

    def largest_microbatch(self) -> int:
        """Return the maximum tokens of a micro-batch that fits, for "auto" with all layers checkpointed; 0 if none."""
        checkpointed_layers = self.trainer.num_layers if self.work.gradient_checkpointing else 0
        sizes = range(1, (1 << 24) + 1)
        return bisect_right(sizes, self.device_memory, key=lambda n: self.update_of(n, checkpointed_layers).total)

    def longest_sequence(self) -> int:
        """Return the length of the longest sequence that fits micro-batch, KV cache and the model's positions."""
        positions: int | None = read_setting(self.work.config, "max_position_embeddings")
        limits = [self.largest_microbatch(), positions or 1 << 30]
        if self.has_engine_share:
            share = self.suggested_utilization()
            engine = self.engine if share is None else replace(self.engine, utilization=share)
            limits.append(0 if share is None else engine.longest_sequence(self.device_memory))
        return min(limits)

    def available_utilization(self) -> float:
        """Return the share of the device that the engine can have, rounded down to hundredths; may be negative."""
        awake = [self.start(), self.generate()]
        if not self.engine.can_sleep:
            update = self.update_of(self.tokens, self.count_checkpointed_layers())  # logits are kept in what is left
            awake += [update, self.score()] if self.work.is_scored else [update]
        beside = max(parts.total - parts.engine for parts in awake)
        return (self.device_memory - beside) * 100 // self.device_memory / 100

    def suggested_utilization(self) -> float | None:
        """Return the share of the device for which all the engine's sequences fit at full length, or the available
        share if that is smaller; None if not even one sequence would fit.
        """
        engine = self.engine
        wanted = engine.weights + engine.activations + engine.max_sequences * engine.sequence
        share = min(-(-wanted * 100 // self.device_memory) / 100, self.available_utilization(), 0.95)
        is_enough = share > 0 and self.with_engine(utilization=share).engine.num_sequences(self.device_memory) >= 1
        return share if is_enough else None
