"""Plans that several tests look at: of the models whose memory was measured."""

from dataclasses import replace
from typing import Any

from transformers import Qwen3Config

from rlightning.memory_plan.devices import read_device_memory
from rlightning.memory_plan.work import Parallelism, RoleMemory, RolloutMemory, Work
from rlightning.rollout.engine_memory import EngineMemory, read_engine
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


def engine_of(
    config: Qwen3Config, *, longest: int = 1280, share: float = 0.3, max_sequences: int = 128
) -> EngineMemory:
    """An engine in bfloat16."""
    arguments = {"max_model_len": longest, "max_num_seqs": max_sequences, "gpu_memory_utilization": share}
    return read_engine(config, arguments | {"dtype": "bfloat16", "max_num_batched_tokens": 2048})


def colocated(config: Qwen3Config, **engine: Any) -> Work:
    """A run with a reference model, and an engine beside it."""
    rollout = RolloutMemory(engine=engine_of(config, **engine))
    reference = RoleMemory(name="reference", config=config)
    return Work(config=config, others=(reference,), batch=TWO_PROMPTS, longest=1280, rollout=rollout)


def with_engine(work: Work, **changes: Any) -> Work:
    """The same run with another engine."""
    assert work.rollout is not None and work.rollout.engine is not None
    return replace(work, rollout=replace(work.rollout, engine=replace(work.rollout.engine, **changes)))


COLOCATED = colocated(SMALL)
FSDP_ALONE = Work(config=SMALL, batch=TWO_PROMPTS, longest=1280, parallelism=Parallelism(kind="fsdp"))
