"""What a plan has to know of a run: its parallelism, its batch, its engine."""

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from rlightning.optim import OptimizerStates
from rlightning.parallel.sharding import CPUOffload
from rlightning.rollout.engine_settings import BLOCK_TOKENS
from rlightning.types.batch_plan import BatchPlan

Checkpointing = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How actor and reference are spread over the ranks.

    Attributes:
        kind: everything on one device, a copy on each, or shards.
        ranks: in all.
        tensor_parallel_size: see :class:`~rlightning.parallel.FSDP` for this and the next four.
        shard_size: data-parallel ranks that share one copy, all of them unless hybrid.
        cpu_offload: see there.
        reshard_after_forward: see there.
        reduce_every_microbatch: see there.
        has_gradient_buckets: whether DDP keeps its buckets beside the gradients.
    """

    kind: Literal["single", "ddp", "fsdp"] = "single"
    ranks: int = 1
    tensor_parallel_size: int = 1
    shard_size: int = 1
    cpu_offload: CPUOffload = "none"
    reshard_after_forward: bool = True
    reduce_every_microbatch: bool = True
    has_gradient_buckets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A rollout engine on each rank's device, or on those of some neighbours; or several there, taken together.

    Attributes:
        is_remote: whether it is on other devices instead, to which rank 0 sends the weights.
        number: of engines there.
        utilization: ``rollout.gpu_memory_utilization``.
        can_sleep: whether it gives its memory back during an update.
        bucket_bytes: see :class:`~rlightning.rollout.weights.WeightBucket`.
        itemsize: bytes of a weight.
        kv_itemsize: bytes of a number in the KV cache.
        kv_cache_bytes: of it, as ``rollout.engine.kv_cache_memory_bytes`` says; None goes by the utilization.
        block_tokens: of one of its blocks.
        tensor_parallel_size: devices that it is spread over.
        max_sequences: that it works on at once.
        max_batched_tokens: that one of its forward passes sees.
    """

    is_remote: bool = False
    number: int = 1
    utilization: float = 0.45
    can_sleep: bool = True
    bucket_bytes: int = 2 << 30
    itemsize: int = 2
    kv_itemsize: int = 2
    kv_cache_bytes: int | None = None
    block_tokens: int = BLOCK_TOKENS
    tensor_parallel_size: int = 1
    max_sequences: int = 256
    max_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A run, as far as memory is concerned.

    Attributes:
        config: the actor's.
        reference: the reference model's, where there is one.
        batch: the arithmetic of a step.
        longest: tokens of the longest sequence, prompt and completion.
        precision: Lightning's name for it.
        gradient_checkpointing: whether activations are computed twice, in all layers or in as few as fit.
        is_compiled: whether layers are compiled.
        optimizer_states: how AdamW's moments are kept.
        parallelism: how the models are spread over the ranks.
        engine: None without rollouts.
        offloads_optimizer: whether ``OffloadDuringRollout`` moves the optimizer's state in each step.
        offloads_parameters: whether it moves parameters.
    """

    config: PreTrainedConfig
    reference: PreTrainedConfig | None = None
    batch: BatchPlan
    longest: int
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "bf16-mixed"
    gradient_checkpointing: Checkpointing = False
    is_compiled: bool = False
    optimizer_states: OptimizerStates = "float32"
    parallelism: Parallelism = Parallelism()
    engine: Engine | None = None
    offloads_optimizer: bool = False
    offloads_parameters: bool = False

    @property
    def local_engine(self) -> Engine | None:
        """The engine that shares the ranks' devices."""
        return None if self.engine is None or self.engine.is_remote else self.engine

    @property
    def master_itemsize(self) -> int:
        """Bytes of a parameter as it is kept, and of its gradient."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def compute_itemsize(self) -> int:
        """Bytes of a number in the products of matrices."""
        return 4 if self.precision == "32-true" else 2

    @property
    def is_autocast(self) -> bool:
        """Whether each layer casts its weights for itself; FSDP gathers them in the dtype of the forward."""
        return self.precision == "bf16-mixed" and self.parallelism.kind != "fsdp"

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities are computed before the update."""
        return self.reference is not None or self.batch.optimizer_steps > 1
