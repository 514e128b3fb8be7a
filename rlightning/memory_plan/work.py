"""The properties of a run that a memory plan depends on: models, batch, parallelism, engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from lightning.pytorch.strategies import DDPStrategy, Strategy
from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.lightning_internals import ddp_options
from rlightning.models.adapter import LoRA
from rlightning.models.layers import Checkpointing
from rlightning.optim import OptimizerStates
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.sharding import Automatic, CPUOffload
from rlightning.python_values import field_values
from rlightning.rollout import Sampling
from rlightning.rollout.vllm.memory import EngineMemory
from rlightning.types.batch_plan import BatchPlan

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
PRECISIONS: dict[str, Precision] = {
    "32": "32-true",
    "32-true": "32-true",
    "None": "32-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
}
"""Lightning's precision by each name that it accepts."""


def read_precision(name: object) -> Precision:
    """Return Lightning's full name of a precision, such as "bf16-mixed" for "bf16"; raise a ConfigError if a memory
    plan does not support it.
    """
    if str(name) not in PRECISIONS:
        raise ConfigError(f"trainer.precision={name} cannot be planned. Use bf16-mixed, bf16-true or 32-true.")
    return PRECISIONS[str(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMemory:
    """The memory that sampling takes on a rank's device.

    Attributes:
        engine: the engine on the rank's device; None if engines have other devices.
        bucket_bytes: bytes of the buffer for sending weights (:func:`~rlightning.rollout.weights.plan_chunks`); 0 if
            they are gathered directly into the sampler's weights.
        itemsize: bytes of an element of the sent weights.
        max_support: maximum number of tokens that top-p and top-k leave for a sampled token; 0 if sampling is not
            truncated.
    """

    engine: EngineMemory | None = None
    bucket_bytes: int = 2 << 30
    itemsize: int = 2
    max_support: int = 0


@runtime_checkable
class PlannedRollout(Protocol):
    """What a memory plan needs of a rollout callback: its sampling settings, and the memory that sampling takes."""

    sampling: Sampling

    def plan_memory(self, work: "Work", max_prompt_tokens: int) -> RolloutMemory:
        """Return the memory of sampling on a rank's CUDA device, for prompts of up to ``max_prompt_tokens``."""


@runtime_checkable
class PlannedOffload(Protocol):
    """What a memory plan needs of a callback that offloads parts of the trainer's memory to the host: their names."""

    @property
    def moved_each_step(self) -> frozenset[str]:
        """The parts offloaded in each step, by the names in :class:`~rlightning.memory_plan.phases.PhaseBytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the models are distributed over the ranks.

    Attributes:
        kind: one device, a copy on each rank (DDP), or shards (FSDP).
        ranks: number of all ranks.
        tensor_parallel_size: see :class:`~rlightning.parallel.FSDP`, also for ``cpu_offload``.
        shard_size: number of data-parallel ranks that share one copy; all except in hybrid sharding.
        reshard_after_forward: see :class:`~rlightning.parallel.FSDP`, also for the next one; a
            :class:`~rlightning.memory_plan.phases.MemoryPlan` replaces "auto".
        has_gradient_buckets: whether DDP keeps buckets in addition to the gradients.
    """

    kind: Literal["single", "ddp", "fsdp"] = "single"
    ranks: int = 1
    tensor_parallel_size: int = 1
    shard_size: int = 1
    cpu_offload: CPUOffload = "none"
    reshard_after_forward: Automatic = True
    reduce_every_microbatch: Automatic = True
    has_gradient_buckets: bool = False

    @property
    def can_keep(self) -> bool:
        """Whether FSDP saves communication if weights stay gathered and gradients whole until the optimizer step."""
        return self.kind == "fsdp" and self.shard_size > 1 and self.cpu_offload != "parameters"

    @property
    def automatic(self) -> list[str]:
        """The names of the settings that are "auto"."""
        return [name for name, value in field_values(self).items() if value == "auto"]

    def decided(self, *, keeps: bool) -> "Parallelism":
        """Return these settings with False for each "auto" if weights and gradients are kept, otherwise with True."""
        changes: dict[str, Any] = dict.fromkeys(self.automatic, not keeps)
        return replace(self, **changes)

    @classmethod
    def of(cls, strategy: Strategy, ranks: int) -> "Parallelism":
        """Return how a strategy distributes models over ``ranks`` ranks; the strategy's devices must be set up."""
        if isinstance(strategy, FSDP):
            return cls(
                kind="fsdp",
                ranks=ranks,
                tensor_parallel_size=strategy.tensor_parallel_size,
                shard_size=strategy.shard_size or strategy.data_parallel_size,
                cpu_offload=strategy.cpu_offload,
                reshard_after_forward=strategy.reshard_after_forward,
                reduce_every_microbatch=strategy.reduce_every_microbatch,
            )
        if isinstance(strategy, DDPStrategy):
            has_views = bool(ddp_options(strategy).get("gradient_as_bucket_view", False))
            return cls(kind="ddp", ranks=ranks, has_gradient_buckets=not has_views)
        return cls(ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The properties of a model other than the actor, such as a reference or a critic, that its memory depends on.

    Attributes:
        name: name of the model's role.
        config: its Hugging Face configuration; None for any other model, whose size is unknown.
        optimizer_states: format of AdamW's moments; None if the model is frozen.
        gradient_checkpointing: whether activations are recomputed in all layers, none, or the actor's share of layers.
    """

    name: str
    config: PreTrainedConfig | None
    optimizer_states: OptimizerStates | None = None
    gradient_checkpointing: Checkpointing = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The properties of a run that its memory depends on.

    Attributes:
        config: the actor's.
        adapter: the actor's adapter; None if its weights are trained.
        others: models other than the actor.
        batch: numbers of prompts, samples and tokens of a step.
        longest: tokens of the longest sequence, prompt and completion.
        precision: Lightning's name of the precision.
        gradient_checkpointing: whether activations of the actor are recomputed in all layers, none, or as few as fit.
        is_compiled: whether layers are compiled.
        optimizer_states: format of the actor's moments.
        parallelism: how the models are distributed over the ranks.
        is_own_reference: whether the actor without its adapter is the reference.
        rollout: memory of sampling; None without rollouts.
        moved_each_step: parts that a callback offloads to the host in each step.
    """

    config: PreTrainedConfig
    adapter: LoRA | None = None
    others: tuple[RoleMemory, ...] = ()
    batch: BatchPlan
    longest: int
    precision: Precision = "bf16-mixed"
    gradient_checkpointing: Checkpointing = False
    is_compiled: bool = False
    optimizer_states: OptimizerStates = "float32"
    parallelism: Parallelism = Parallelism()
    is_own_reference: bool = False
    rollout: RolloutMemory | None = None
    moved_each_step: frozenset[str] = frozenset()

    def with_callbacks(self, callbacks: Iterable[object], max_prompt_tokens: int) -> "Work":
        """Return a copy of these properties that includes callbacks' effects: the memory of sampling, the longest
        sequence with its completion, and the parts that are offloaded to the host.

        Raises a ConfigError if the engines cannot be planned.
        """
        listed = list(callbacks)
        moved = [one.moved_each_step for one in listed if isinstance(one, PlannedOffload)]
        work = replace(self, moved_each_step=frozenset().union(*moved))
        for one in listed:
            if isinstance(one, PlannedRollout):
                work = replace(work, longest=min(self.longest, max_prompt_tokens + one.sampling.max_new_tokens))
                return replace(work, rollout=one.plan_memory(work, max_prompt_tokens))
        return work

    @property
    def engine(self) -> EngineMemory | None:
        """The memory of the engines that share a rank's device; None if there are none."""
        return None if self.rollout is None else self.rollout.engine

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of a trained parameter, and of its gradient."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an element in matrix products."""
        return 4 if self.precision == "32-true" else 2

    @property
    def is_autocast(self) -> bool:
        """Whether autocast casts float32 weights to bfloat16 in each layer; False with FSDP, which casts them when it
        gathers them.
        """
        return self.precision == "bf16-mixed" and self.parallelism.kind != "fsdp"

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities are computed by separate forward passes before the update."""
        has_frozen = self.is_own_reference or any(role.optimizer_states is None for role in self.others)
        return self.batch.optimizer_steps > 1 or has_frozen
