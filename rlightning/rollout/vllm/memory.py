"""The size of a vLLM engine's KV cache, and its check."""

import torch
from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.models.counts import read_setting
from rlightning.parallel.device import GIB, memory_use
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.engine_memory import read_engine
from rlightning.rollout.vllm.settings import BLOCK_TOKENS

CPU_CACHE_BYTES = 1 << 30
"""Maximum bytes of the KV cache of an engine on a CPU."""
CPU_BLOCK_TOKENS = 128
"""Tokens of a KV cache block on a CPU, vLLM's default."""


def kv_cache_setting(
    arguments: EngineArguments, config: PreTrainedConfig, device: torch.device, *, is_alone: bool = True
) -> dict[str, int]:
    """Return the argument ``kv_cache_memory_bytes`` for vLLM; an empty dict if vLLM can measure the free memory itself.

    vLLM measures the free memory of the device, not its own use, and so counts what an actor or another engine
    allocates while it starts. A size is returned unless the engine is alone on the device; also if all sequences
    together need less than the available memory.

    Args:
        arguments: see :func:`~rlightning.rollout.engine_memory.read_engine`; without ``kv_cache_memory_bytes``.
        config: configuration of the model.
        device: device of the engine.
        is_alone: whether no actor or other engine allocates memory on the device while this one starts.

    Returns:
        One argument, or none.

    Raises:
        ConfigError: the engine is not alone, and a sequence does not fit.
    """
    if device.type != "cuda":
        wanted = read_engine(config, arguments, block_tokens=CPU_BLOCK_TOKENS).wanted
        return {"kv_cache_memory_bytes": min(wanted, CPU_CACHE_BYTES)}
    memory = memory_use(device)
    if memory is None:
        return {}
    engine = read_engine(config, arguments)
    available = engine.available(memory.total)
    if engine.wanted < engine.certain(memory.total):
        return {"kv_cache_memory_bytes": engine.wanted}
    if is_alone:
        return {}
    if available < engine.sequence:
        raise ConfigError(
            f"An engine's part of rollout.gpu_memory_utilization, {engine.utilization:g}, has no room for a sequence "
            f"of {engine.longest:,} tokens beside its {engine.weights / GIB:.1f} GiB of weights and "
            f"{engine.activations / GIB:.1f} GiB of activations. Raise it, or lower rollout.num_engines."
        )
    return {"kv_cache_memory_bytes": engine.certain(memory.total)}


def check_kv_cache(arguments: EngineArguments, config: PreTrainedConfig | None, *, is_cuda: bool) -> None:
    """Raise a ConfigError if the user's size of the KV cache is too small for one sequence of maximum length.

    One more block is needed, which vLLM reserves.

    Raises:
        ConfigError: names the given and the required size.
    """
    if config is not None and not _is_cached_whole(config):
        return
    length, blocks = int(arguments["max_model_len"]), arguments.get("num_gpu_blocks_override")
    # Where vLLM chooses the size of blocks by the attention's kernel, the largest of its choices.
    num_needed = -(-length // int(arguments.get("block_size") or CPU_BLOCK_TOKENS)) + 1
    if blocks is not None and blocks < num_needed:
        raise ConfigError(
            f"rollout.engine.num_gpu_blocks_override={blocks} must be at least {num_needed}: the KV cache must hold a "
            f"sequence of max_model_len={length} tokens, and one block is reserved. Leave it out."
        )
    cache = arguments.get("kv_cache_memory_bytes")
    if cache is None or config is None:
        return
    engine = read_engine(config, arguments, block_tokens=BLOCK_TOKENS if is_cuda else CPU_BLOCK_TOKENS)
    needed = engine.sequence + engine.block_tokens * engine.token
    if cache < needed:
        raise ConfigError(
            f"rollout.engine.kv_cache_memory_bytes={cache} must be at least {needed}: the KV cache must hold a "
            f"sequence of max_model_len={length} tokens, {engine.token} bytes each, and a reserved block. Leave it out."
        )


def _is_cached_whole(config: PreTrainedConfig) -> bool:
    """Whether every layer caches every token, so that the size of a sequence in the cache is known."""
    kinds = read_setting(config, "layer_types") or []
    return {"full_attention"}.issuperset(kinds) and read_setting(config, "sliding_window") is None
