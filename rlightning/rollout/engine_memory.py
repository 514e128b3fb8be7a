"""The device memory of engines: ``utilization x device memory = weights + activations + KV cache``."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from rlightning.models.counts import cached_numbers, count_weights, head_size, inner_size, num_key_value_heads
from rlightning.models.files import torch_dtype
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.vllm.settings import BLOCK_TOKENS

SPLITS_IN_GRAPHS = 32
"""vLLM's ``flash_attn_max_num_splits_for_cuda_graph``: parts of a sequence, of which a CUDA graph has room for sums in
float32."""
MISSED_BYTES = 1 << 30
"""Bytes kept free for what this arithmetic misses (CUDA context, CUDA graphs), at most a tenth of the KV cache.

On an H200 it is within 0.5 GiB of what vLLM 0.24 measures for 0.6B and 4B shapes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An estimate of the device memory that all engines on one device use together.

    Attributes:
        num_engines: number of engines on the device.
        utilization: share of the device's memory that all engines together may use.
        can_sleep: whether the engines free their memory during an update.
        weights: bytes of weights.
        asleep: bytes of copies of adapters and of buffers in CUDA graphs, which are kept in addition, even while the
            engines sleep.
        activations: estimated bytes of a forward pass and of sampling.
        token: bytes of one token in the KV cache.
        block_tokens: tokens of a block of the KV cache.
        longest: tokens of the longest sequence.
        max_sequences: maximum number of sequences that are computed concurrently.
        kv_cache_bytes: size of the KV caches, if the user sets it; None to derive it from the utilization.
    """

    num_engines: int = 1
    utilization: float
    can_sleep: bool = True
    weights: int
    activations: int
    token: int
    block_tokens: int
    longest: int
    max_sequences: int
    kv_cache_bytes: int | None = None
    asleep: int = 0

    @property
    def sequence(self) -> int:
        """Bytes of the KV cache for one sequence of the maximum length."""
        return -(-self.longest // self.block_tokens) * self.block_tokens * self.token

    @property
    def wanted(self) -> int:
        """Bytes of the KV caches: the user's size, or enough for ``max_sequences`` sequences of the maximum length."""
        # One more block for each: vLLM schedules a step ahead.
        most = self.max_sequences * (self.sequence + self.block_tokens * self.token)
        return most if self.kv_cache_bytes is None else self.kv_cache_bytes

    def available(self, device_memory: int) -> int:
        """Return the bytes of the device that remain for the KV caches; negative if the other parts do not fit."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        return int(self.utilization * device_memory) - self.weights - self.activations

    def certain(self, device_memory: int) -> int:
        """Return the bytes that remain for the KV caches after a margin of ``MISSED_BYTES``, at most a tenth."""
        available = self.available(device_memory)
        return available - min(MISSED_BYTES, max(available, 0) // 10)

    def kv_cache(self, device_memory: int) -> int:
        """Return the bytes of the KV caches; negative if the other parts do not fit."""
        return self.wanted if self.wanted < self.certain(device_memory) else self.available(device_memory)

    def num_sequences(self, device_memory: int) -> int:
        """Return the number of sequences of the maximum length that fit into the KV caches at the same time."""
        return max(self.kv_cache(device_memory), 0) // self.sequence

    def longest_sequence(self, device_memory: int) -> int:
        """Return the tokens of the longest sequence that fits into the KV cache."""
        return max(self.available(device_memory), 0) // self.token // self.block_tokens * self.block_tokens


def read_engine(
    config: PreTrainedConfig,
    arguments: EngineArguments,
    *,
    block_tokens: int = BLOCK_TOKENS,
    num_engines: int = 1,
    can_sleep: bool = True,
) -> EngineMemory:
    """Return an estimate of the memory of ``num_engines`` engines on one device, all with the same arguments.

    Args:
        config: configuration of the model.
        arguments: arguments of vLLM's EngineArgs for each engine, with those of
            :func:`~rlightning.rollout.vllm.settings.derive_settings`.
        block_tokens: tokens of a block, if the arguments do not set it.
        num_engines: number of engines.
        can_sleep: see :class:`EngineMemory`.
    """
    text_config: Any = config.get_text_config()
    cache, named = str(arguments.get("kv_cache_dtype") or "auto"), arguments.get("kv_cache_memory_bytes")
    size, itemsize = int(arguments.get("tensor_parallel_size") or 1), torch_dtype(arguments["dtype"]).itemsize
    num_sequences = num_engines * int(arguments["max_num_seqs"])
    # Hidden states with residual, queries with keys and values, and the feed-forward's two halves and their product.
    heads = text_config.num_attention_heads + 2 * num_key_value_heads(config)
    width = 3 * text_config.hidden_size + (heads * head_size(config) + 3 * inner_size(config)) // size
    activations = itemsize * num_engines * int(arguments["max_num_batched_tokens"]) * width
    # The sampler computes in float32 on logits, log-probabilities and noise.
    activations += 3 * 4 * num_sequences * text_config.vocab_size
    # Attention divides long sequences among the GPU's processors; graphs of all sizes share the buffers of the largest.
    captured = max(arguments.get("cudagraph_capture_sizes") or [0])
    splits = 4 * SPLITS_IN_GRAPHS * captured * text_config.num_attention_heads * head_size(config) // size
    kv_itemsize = 1 if "fp8" in cache or "int8" in cache else itemsize
    return EngineMemory(
        num_engines=num_engines,
        utilization=num_engines * float(arguments.get("gpu_memory_utilization", 0)),
        can_sleep=can_sleep,
        weights=num_engines * itemsize * count_weights(config).total // size,
        activations=activations,
        token=text_config.num_hidden_layers * cached_numbers(config, size) * kv_itemsize,
        block_tokens=int(arguments.get("block_size") or block_tokens),
        longest=int(arguments["max_model_len"]),
        max_sequences=num_sequences,
        kv_cache_bytes=None if named is None else num_engines * named,
        asleep=num_engines * splits,
    )
