"""Plans that several tests look at: of the models whose memory was measured."""

from dataclasses import replace
from functools import cache
from typing import Any

from transformers import Qwen3Config

from rlightning.memory_plan.devices import GIB, read_device_memory
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.work import Engine, Parallelism, Work
from rlightning.types.batch_plan import BatchPlan

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SMALL = Qwen3Config(**QWEN3, hidden_size=1024, intermediate_size=3072)
MIDDLE = Qwen3Config(**QWEN3, hidden_size=2048, intermediate_size=6144)
LARGE = Qwen3Config(
    **QWEN3 | {"num_hidden_layers": 36, "num_attention_heads": 32}, hidden_size=2560, intermediate_size=9728
)
H200 = read_device_memory("H200")
TWO_PROMPTS = BatchPlan(
    prompts_per_step=16,
    samples_per_prompt=8,
    updates_per_rollout=1,
    epochs_per_rollout=1,
    max_tokens_per_microbatch=16384,
)
COLOCATED = Work(
    config=SMALL,
    reference=SMALL,
    batch=TWO_PROMPTS,
    longest=1280,
    engine=Engine(utilization=0.3, max_sequences=128),
)
FSDP_ALONE = Work(config=SMALL, batch=TWO_PROMPTS, longest=1280, parallelism=Parallelism(kind="fsdp"))


@cache
def small() -> MemoryPlan:
    return MemoryPlan(COLOCATED, H200)


@cache
def middle() -> MemoryPlan:
    return MemoryPlan(replace(COLOCATED, config=MIDDLE, reference=MIDDLE), H200)


@cache
def large() -> MemoryPlan:
    return MemoryPlan(replace(COLOCATED, config=LARGE, reference=None), H200)


def plan_of(work: Work, device_memory: int) -> MemoryPlan:
    """A plan that shares what was traced for the same model."""
    same = small() if work.config is SMALL else middle() if work.config is MIDDLE else large()
    return MemoryPlan(work, device_memory, like=same.trainer)


def allocated(parts: dict[str, int]) -> float:
    """GiB that PyTorch's tensors take in a phase, without what other processes, the driver and its cache hold."""
    foreign = ("CUDA contexts", "allocator's slack", "engine's weights", "engine's activations", "KV cache")
    return sum(size for name, size in parts.items() if name not in foreign) / GIB
