"""Bytes on a rank's device in each phase of a step, and what fits."""

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from rlightning.memory_plan.devices import GIB
from rlightning.memory_plan.engine_memory import EnginePlan, plan_engine
from rlightning.memory_plan.trainer_memory import TRANSIENT_PARTS, TrainerMemory
from rlightning.memory_plan.work import Checkpointing, Work

Phase = Literal["sync", "generate", "score", "update"]
ENGINE_PARTS = ("engine's weights", "engine's activations", "KV cache")
"""What the engine's share of the device pays for."""

# Measured on an H200 (docs/measurements.md, "Memory of a GPU that actor and engine share").
CONTEXT_BYTES = int(0.6 * GIB)
"""Of the trainer's CUDA context: what the driver takes beside PyTorch."""
ENGINE_CONTEXT_BYTES = int(1.5 * GIB)
"""Of an engine's context, libraries and CUDA graphs, which it keeps while it sleeps."""
EMPTIED_CACHE_BYTES = int(0.6 * GIB)
"""What PyTorch still holds beyond its tensors after the cache was emptied."""
FRESH_FRAGMENTATION = 0.06
"""Of what an update takes and gives back: blocks that do not fit, in a cache that was empty before."""
FREE_SHARE = 0.1
"""Of the device, that the update leaves free where it is chosen how many layers are checkpointed."""
MODELS = ("parameters", "reference model")


class MemoryPlan:
    """Bytes of every phase on a rank's device, and what follows from them.

    Args:
        work: the run.
        device_memory: bytes of the device, as PyTorch reports them.
        like: see :class:`TrainerMemory`.
    """

    def __init__(self, work: Work, device_memory: int, *, like: TrainerMemory | None = None) -> None:
        self.work, self.device_memory = work, device_memory
        self.trainer = TrainerMemory(work, like)
        self.tokens = work.batch.max_tokens_per_microbatch

    def replace(self, **changes: object) -> "MemoryPlan":
        """The same models under other settings; their configurations and the sequences' length must stay."""
        work = replace(self.work, **changes)  # type: ignore[arg-type]
        return MemoryPlan(work, self.device_memory, like=self.trainer)

    def update(self, tokens: int | None = None, gradient_checkpointing: Checkpointing | None = None) -> dict[str, int]:
        """By name, at the update's peak; for another micro-batch or with other checkpointing, where asked."""
        tokens = self.tokens if tokens is None else tokens
        return self._update(tokens, self.count_checkpointed_layers(tokens, gradient_checkpointing))

    def count_checkpointed_layers(
        self, tokens: int | None = None, gradient_checkpointing: Checkpointing | None = None
    ) -> int:
        """How many layers' activations are computed twice: with "auto" as few as leave ``FREE_SHARE``, or all."""
        wanted = self.work.gradient_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        num_layers = self.trainer.num_layers
        if wanted != "auto":
            return num_layers if wanted else 0
        tokens, limit = self.tokens if tokens is None else tokens, (1 - FREE_SHARE) * self.device_memory
        fitting = (count for count in range(num_layers) if total(self._update(tokens, count)) <= limit)
        return next(fitting, num_layers)

    def _update(self, tokens: int, checkpointed_layers: int) -> dict[str, int]:
        parts = self.trainer.update_parts(tokens, checkpointed_layers)
        parts["weight bucket"] = self.trainer.bucket()
        parts["allocator's slack"] = int(FRESH_FRAGMENTATION * transient(parts))
        return parts | self._beside_trainer()

    def score(self) -> dict[str, int]:
        """By name, while log-probabilities are computed; empty where none are."""
        if not self.work.is_scored:
            return {}
        parts = self.trainer.score_parts(self.tokens)
        parts["weight bucket"] = self.trainer.bucket()
        parts["allocator's slack"] = int(FRESH_FRAGMENTATION * transient(parts))
        return parts | self._beside_trainer()

    def sync(self) -> dict[str, int]:
        """By name, while weights are sent: an engine here has room for weights, not yet for its cache."""
        if self.work.engine is None:
            return {}
        parts = self._resting([name for name in self.away() if name not in MODELS])
        parts["gathering window"] = self.trainer.gathering_window()
        parts |= self._beside_trainer()
        if self.work.local_engine is not None:
            parts["engine's weights"] = self.engine().weights
        return parts

    def generate(self) -> dict[str, int]:
        """By name, while the engine generates."""
        return {} if self.work.local_engine is None else self._generate(self.away())

    def start(self) -> dict[str, int]:
        """By name, when the engine comes up beside models that have just been loaded: nothing is offloaded yet."""
        if self.work.local_engine is None:
            return {}
        parts = {"parameters": self.trainer.parameters(), "reference model": self.trainer.reference_parameters()}
        return parts | self._beside_trainer(is_generating=True)

    def phases(self) -> dict[Phase, dict[str, int]]:
        """Each phase's bytes by name."""
        return {"sync": self.sync(), "generate": self.generate(), "score": self.score(), "update": self.update()}

    def engine(self, utilization: float | None = None) -> EnginePlan:
        """The engine's share, or another one, cut up."""
        engine = self.work.local_engine
        assert engine is not None
        if utilization is not None:
            engine = replace(engine, utilization=utilization)
        return plan_engine(
            engine,
            self.work.config,
            longest=self.work.longest,
            weights=self.trainer.weights.total,
            device_memory=self.device_memory,
        )

    def away(self) -> dict[str, int]:
        """Bytes by name that wait in the host's memory while the engine is awake.

        ``OffloadDuringRollout`` moves its own in each step, ``MakeRoomForEngine`` as little besides as makes room:
        optimizer state, then also parameters.
        """
        engine = self.work.local_engine
        state = ("optimizer state",) if self.work.offloads_optimizer else ()
        listed = (*state, *(MODELS if self.work.offloads_parameters else ()))
        choices = [listed]
        if engine is not None and engine.can_sleep:
            choices += [("optimizer state", *listed), ("optimizer state", *MODELS)]
        sizes = self._models()
        fitting = (names for names in choices if total(self._generate(names)) <= self.device_memory)
        return {name: sizes[name] for name in next(fitting, choices[-1])}

    def _generate(self, away: Collection[str]) -> dict[str, int]:
        return self._resting(away) | self._beside_trainer(is_generating=True)

    def _resting(self, away: Collection[str]) -> dict[str, int]:
        """The trainer between two updates, its cache emptied."""
        parts = {name: 0 if name in away else size for name, size in self._models().items()}
        return parts | {"weight bucket": self.trainer.bucket(), "allocator's slack": EMPTIED_CACHE_BYTES}

    def _models(self) -> dict[str, int]:
        trainer = self.trainer
        models = dict(zip(MODELS, (trainer.parameters(), trainer.reference_parameters()), strict=True))
        return models | {"optimizer state": trainer.optimizer_state()}

    def _beside_trainer(self, *, is_generating: bool = False) -> dict[str, int]:
        """What the driver and an engine here have; one that does not sleep has all of it at any time."""
        parts = {"CUDA contexts": CONTEXT_BYTES}
        engine = self.work.local_engine
        if engine is None:
            return parts
        parts["CUDA contexts"] += engine.number * ENGINE_CONTEXT_BYTES
        if is_generating or not engine.can_sleep:
            planned = self.engine()
            parts["engine's weights"] = planned.weights
            parts["engine's activations"] = planned.activations
            parts["KV cache"] = max(planned.kv_cache, 0)
        return parts

    # What follows

    def largest_microbatch(self, gradient_checkpointing: Checkpointing) -> int:
        """The most tokens of a micro-batch whose update fits; 0 if none does."""
        checkpointed_layers = self.trainer.num_layers if gradient_checkpointing else 0
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            if total(self._update(middle, checkpointed_layers)) <= self.device_memory:
                low = middle
            else:
                high = middle - 1
        return low

    def longest_sequence(self, gradient_checkpointing: Checkpointing) -> int:
        """Tokens that a micro-batch, the KV cache of the suggested engine and the model's positions have room for."""
        limits = [
            self.largest_microbatch(gradient_checkpointing),
            getattr(self.work.config.get_text_config(), "max_position_embeddings", None) or 1 << 30,
        ]
        if self.work.local_engine is not None:
            share = self.suggested_utilization()
            cache = 0 if share is None else max(self.engine(share).available, 0)
            block = self.work.local_engine.block_tokens
            limits.append(cache // self.engine().token // block * block)
        return int(min(limits))

    def available_utilization(self) -> float:
        """The largest share of the device that nothing else needs, in hundredths, rounded down; maybe below 0."""
        engine = self.work.local_engine
        assert engine is not None
        awake = [self.start(), self.generate()]
        if not engine.can_sleep:
            awake += [self.update(), self.score()]
        beside = max(total(parts) - total(only_engine(parts)) for parts in awake)
        return (self.device_memory - beside) * 100 // self.device_memory / 100

    def suggested_utilization(self) -> float | None:
        """Enough for all sequences at the longest length, or all that there is; None if that holds not even one."""
        engine = self.work.local_engine
        assert engine is not None
        parts = self.engine()
        wanted = parts.weights + parts.activations + engine.max_sequences * parts.sequence
        share = min(-(-wanted * 100 // self.device_memory) / 100, self.available_utilization(), 0.95)
        return share if share > 0 and self.engine(share).num_sequences >= 1 else None


def total(parts: dict[str, int]) -> int:
    """All bytes of a phase."""
    return sum(parts.values())


def sum_up(phase: str, parts: dict[str, int]) -> str:
    """A phase's arithmetic in one line."""
    sizes = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return f"GiB in {phase}: {sizes} = {total(parts) / GIB:.1f}"


def transient(parts: dict[str, int]) -> int:
    """Those that come and go within the phase."""
    return sum(parts.get(name, 0) for name in TRANSIENT_PARTS)


def only_engine(parts: dict[str, int]) -> dict[str, int]:
    """Those that the engine's share of the device pays for."""
    return {name: size for name, size in parts.items() if name in ENGINE_PARTS}
