"""What an engine does with its share of a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.memory_plan.devices import GIB
from rlightning.memory_plan.weights import count_weights
from rlightning.memory_plan.work import Engine
from rlightning.models import load_config
from rlightning.models.sizes import cached_numbers, head_size, inner_size, num_key_value_heads
from rlightning.parallel.device import memory_use
from rlightning.rollout.engine_settings import BLOCK_TOKENS

CPU_CACHE_BYTES = 1 << 30
"""The most that an engine on a CPU takes for its KV cache."""
CPU_BLOCK_TOKENS = 128
"""vLLM's default there."""
WORTHWHILE = 0.9
"""Of what there is for the KV cache. The rest covers what this arithmetic misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """vLLM's arithmetic: utilization x total = weights + the peak of its activations + KV cache.

    Attributes:
        weights: bytes on a device.
        activations: bytes that a forward pass and sampling take on it; estimated.
        available: bytes for the KV cache, which the user has named or the utilization leaves; negative if it leaves
            none.
        wanted: bytes of it that all sequences at once would take, each of the longest length.
        sequence: bytes of the KV cache that one sequence of the longest length takes on it.
        token: bytes of one token.
    """

    weights: int
    activations: int
    available: int
    wanted: int
    sequence: int
    token: int

    @property
    def is_less_wanted(self) -> bool:
        """Whether the KV cache can do with clearly less than there is for it."""
        return self.wanted < WORTHWHILE * self.available

    @property
    def kv_cache(self) -> int:
        """Bytes that the KV cache takes; negative if there are none left."""
        return self.wanted if self.is_less_wanted else self.available

    @property
    def num_sequences(self) -> int:
        """Of the longest length, that the cache holds at once."""
        return max(self.kv_cache, 0) // self.sequence


def kv_cache_setting(
    arguments: Mapping[str, Any], model: str, device: torch.device, *, is_alone: bool = True
) -> dict[str, int]:
    """How large vLLM is told to make the KV cache, where all sequences at once can use less than there is for it.

    Args:
        arguments: of its EngineArgs, those of :func:`~rlightning.rollout.engine_settings.derive_settings` among them.
        model: a folder or a name on the hub.
        device: what the engine runs on.
        is_alone: whether no other engine starts there at the same time. vLLM would measure both otherwise.

    Returns:
        An argument more, or none.

    Raises:
        ConfigError: if it is not alone, and there is no room for any.
    """
    if arguments.get("kv_cache_memory_bytes") is not None:
        return {}
    config, longest = load_config(model), int(arguments["max_model_len"])
    itemsize = getattr(torch, arguments["dtype"]).itemsize
    if device.type != "cuda":
        engine = read_engine({"block_size": CPU_BLOCK_TOKENS} | dict(arguments), itemsize=itemsize)
        wanted = plan_engine(engine, config, longest=longest, weights=0, device_memory=0).wanted
        return {"kv_cache_memory_bytes": min(wanted, CPU_CACHE_BYTES)}
    memory = memory_use(device)
    if memory is None:
        return {}
    engine, weights = read_engine(arguments, itemsize=itemsize), count_weights(config).total
    plan = plan_engine(engine, config, longest=longest, weights=weights, device_memory=memory.total)
    if plan.is_less_wanted:
        return {"kv_cache_memory_bytes": plan.wanted}
    if is_alone:
        return {}
    if plan.available < plan.sequence:
        raise ConfigError(
            f"An engine's part of rollout.gpu_memory_utilization, {engine.utilization:g}, has no room for a sequence "
            f"of {longest:,} tokens beside its {plan.weights / GIB:.1f} GiB of weights and "
            f"{plan.activations / GIB:.1f} GiB of activations. Raise it, or lower rollout.num_engines."
        )
    return {"kv_cache_memory_bytes": int(WORTHWHILE * plan.available)}


def read_engine(arguments: Mapping[str, Any], *, itemsize: int, number: int = 1, **settings: Any) -> Engine:
    """The engines that start with some arguments each.

    Args:
        arguments: as in :func:`kv_cache_setting`.
        itemsize: bytes of a weight.
        number: of engines that share a device.
        settings: of :class:`Engine`, that are no arguments of vLLM.
    """
    cache, named = str(arguments.get("kv_cache_dtype") or "auto"), arguments.get("kv_cache_memory_bytes")
    return Engine(
        **settings,
        number=number,
        utilization=number * float(arguments.get("gpu_memory_utilization", 0)),
        itemsize=itemsize,
        kv_itemsize=1 if "fp8" in cache or "int8" in cache else itemsize,
        kv_cache_bytes=None if named is None else number * named,
        block_tokens=int(arguments.get("block_size") or BLOCK_TOKENS),
        tensor_parallel_size=int(arguments.get("tensor_parallel_size") or 1),
        max_sequences=number * int(arguments["max_num_seqs"]),
        max_batched_tokens=number * int(arguments["max_num_batched_tokens"]),
    )


def plan_engine(
    engine: Engine, config: PreTrainedConfig, *, longest: int, weights: int, device_memory: int
) -> EnginePlan:
    """What an awake engine does with its share of a device.

    Args:
        engine: with the share.
        config: of its model.
        longest: tokens of the longest sequence.
        weights: how many the model has.
        device_memory: bytes, all of the device.
    """
    text_config = config.get_text_config()
    size = engine.tensor_parallel_size
    heads: int = text_config.num_attention_heads
    kv_heads, head_dim = num_key_value_heads(config), head_size(config)
    token = text_config.num_hidden_layers * cached_numbers(config, size) * engine.kv_itemsize
    held = engine.number * engine.itemsize * weights // size
    # Hidden states with residual, queries with keys and values, and the feed-forward's two halves and their product.
    width = 3 * text_config.hidden_size + ((heads + 2 * kv_heads) * head_dim + 3 * inner_size(config)) // size
    # The sampler works in float32 on logits, log-probabilities and noise.
    activations = engine.itemsize * engine.max_batched_tokens * width
    activations += 3 * 4 * engine.max_sequences * text_config.vocab_size
    block = engine.block_tokens * token
    sequence = -(-longest // engine.block_tokens) * block
    named = engine.kv_cache_bytes
    return EnginePlan(
        weights=held,
        activations=activations,
        available=int(engine.utilization * device_memory) - held - activations if named is None else named,
        # A block more for each: vLLM schedules a step ahead.
        wanted=engine.max_sequences * (sequence + block) if named is None else named,
        sequence=sequence,
        token=token,
    )
