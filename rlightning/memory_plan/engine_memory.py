"""What an engine does with its share of a device."""

from dataclasses import dataclass

from rlightning.memory_plan.weights import Weights
from rlightning.memory_plan.work import Work

BLOCK_TOKENS = 16
"""Of the KV cache, vLLM's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """vLLM's arithmetic: utilization x total = weights + the peak of its activations + KV cache.

    Attributes:
        weights: bytes on a device.
        activations: bytes that a forward pass and sampling take on it; estimated.
        kv_cache: bytes that are left of the utilization; negative if they do not suffice.
        sequence: bytes of the KV cache that one sequence of the longest length takes on it.
        token: bytes of one token.
    """

    weights: int
    activations: int
    kv_cache: int
    sequence: int
    token: int

    @property
    def num_sequences(self) -> int:
        """Of the longest length, that the cache holds at once."""
        return max(self.kv_cache, 0) // self.sequence


def plan_engine(work: Work, weights: Weights, device_memory: int, utilization: float) -> EnginePlan:
    """What an awake engine does with its share of a device.

    Args:
        work: the run, which has an engine.
        weights: the actor's.
        device_memory: bytes, all of the device.
        utilization: the share.
    """
    engine = work.engine
    assert engine is not None
    text_config = work.config.get_text_config()
    size = engine.tensor_parallel_size
    heads: int = text_config.num_attention_heads
    kv_heads: int = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    token = 2 * text_config.num_hidden_layers * max(kv_heads // size, 1) * head_dim * engine.kv_itemsize
    held = engine.itemsize * weights.total // size
    # Hidden states with residual, queries with keys and values, and the feed-forward's two halves and their product.
    width = (
        3 * text_config.hidden_size + ((heads + 2 * kv_heads) * head_dim + 3 * text_config.intermediate_size) // size
    )
    # The sampler works in float32 on logits, log-probabilities and noise.
    activations = engine.itemsize * engine.max_batched_tokens * width
    activations += 3 * 4 * engine.max_sequences * text_config.vocab_size
    return EnginePlan(
        weights=held,
        activations=activations,
        kv_cache=int(utilization * device_memory) - held - activations,
        sequence=-(-work.longest // BLOCK_TOKENS) * BLOCK_TOKENS * token,
        token=token,
    )
