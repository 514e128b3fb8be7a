"""Whether a KV cache that a user has sized holds the run's longest sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.memory_plan.engine_memory import CPU_BLOCK_TOKENS, plan_engine, read_engine
from rlightning.rollout.engine_settings import BLOCK_TOKENS


def check_cache(
    given: Mapping[str, Any], arguments: Mapping[str, Any], config: PreTrainedConfig | None, *, is_cuda: bool
) -> None:
    """Refuse a KV cache that is too small for one sequence of ``max_model_len``, which vLLM refuses as it starts.

    It needs a block more than the sequence's, which vLLM reserves.

    Args:
        given: ``rollout.engine``.
        arguments: all of them.
        config: the model's; None where a custom loop's module does not tell.
        is_cuda: whether the engine runs on a GPU.

    Raises:
        ConfigError: with what is given and what is needed.
    """
    if config is not None and not _is_cached_whole(config):
        return
    length = int(arguments["max_model_len"])
    blocks = given.get("num_gpu_blocks_override")
    # Where vLLM chooses the size of blocks by the attention's kernel, the largest of its choices.
    num_needed = -(-length // int(given.get("block_size") or CPU_BLOCK_TOKENS)) + 1
    if blocks is not None and blocks < num_needed:
        raise ConfigError(
            f"rollout.engine.num_gpu_blocks_override={blocks} must be at least {num_needed}: the KV cache must hold a "
            f"sequence of max_model_len={length} tokens, and one block is reserved. Leave it out."
        )
    cache = given.get("kv_cache_memory_bytes")
    if cache is None or config is None:
        return
    block = BLOCK_TOKENS if is_cuda else CPU_BLOCK_TOKENS
    engine = read_engine({"block_size": block} | dict(arguments), itemsize=getattr(torch, arguments["dtype"]).itemsize)
    plan = plan_engine(engine, config, longest=length, weights=0, device_memory=0)
    needed = plan.sequence + engine.block_tokens * plan.token
    if cache < needed:
        raise ConfigError(
            f"rollout.engine.kv_cache_memory_bytes={cache} must be at least {needed}: the KV cache must hold a "
            f"sequence of max_model_len={length} tokens, {plan.token} bytes each, and a reserved block. Leave it out."
        )


def _is_cached_whole(config: PreTrainedConfig) -> bool:
    """Whether every layer caches every token, so that what a sequence takes is known."""
    text_config: Any = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None) or []
    return {"full_attention"}.issuperset(kinds) and getattr(text_config, "sliding_window", None) is None
