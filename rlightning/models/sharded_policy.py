"""A policy whose weights are spread over ranks: FSDP2, with tensor parallelism inside.

    config.json -> modules on the meta device -> tensor parallelism -> fully_shard -> each rank reads its own slices

No rank ever holds the whole model, on the device or on the host. A layer's weights are gathered when it runs and let go
of afterwards.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlightning.models.architecture import check_architecture
from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.layers import decoder_layers
from rlightning.models.logprobs import compute_packed_logprobs
from rlightning.models.policy import load_config, remove_dropout
from rlightning.models.shard_loading import initialize_buffers, load_shards
from rlightning.models.tensor_parallel import check_tensor_parallel, parallelize
from rlightning.parallel.sharding import Sharding


def load_sharded_policy(model: str, sharding: Sharding, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As :func:`~rlightning.models.load_policy`, but of each weight a rank reads and holds its shard only.

    All ranks have to call it.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        sharding: over which ranks, and how.
        dtype: of the parameters; float32 masters by default, whatever the folder holds.

    Returns:
        The policy, its weights there and on the device; parameters are DTensors.

    Raises:
        ConfigError: if its weights are not all there, or its architecture cannot attend over packed sequences or be
            split as asked.
    """
    config = load_config(model)
    remove_dropout(config)
    tensor_parallel_mesh = sharding.mesh["tensor_parallel"]
    check_tensor_parallel(model, config, tensor_parallel_mesh.size())
    check_architecture(model, config)
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=PACKED_ATTENTION
        )
    if tensor_parallel_mesh.size() > 1:
        parallelize(policy, tensor_parallel_mesh)
    policy.train()  # there is no dropout left
    shard(policy, sharding)
    policy.to_empty(device=sharding.storage_device)
    policy.tie_weights()  # to_empty has given each twin memory of its own
    initialize_buffers(model, policy, sharding.device)
    load_shards(model, policy)
    return policy


def shard(policy: PreTrainedModel, sharding: Sharding) -> None:
    """Spread a policy's parameters over the data-parallel ranks, layer by layer; the rest is one group."""
    is_mixed = sharding.compute_dtype is not None
    options: dict[str, Any] = {
        "mesh": sharding.data_parallel_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32 if is_mixed else None
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=sharding.device.type == "cuda")
        if sharding.cpu_offload == "parameters"
        else OffloadPolicy(),
    }
    for layer in decoder_layers(policy):
        fully_shard(layer, reshard_after_forward=sharding.reshard_after_forward, **options)
    # Embedding and output layer are needed first in the backward pass: they stay gathered until then.
    fully_shard(policy, reshard_after_forward=False, **options)
    policy.register_forward_hook(lambda *_: release_without_gradient(policy))
    add_forward_method(policy, "compute_packed_logprobs", compute_packed_logprobs)


def add_forward_method(policy: Any, name: str, function: Callable[..., Any]) -> None:
    """Make ``function`` a method around which the policy's weights are gathered, as they are around ``forward()``."""
    setattr(policy, name, MethodType(function, policy))
    register_fsdp_forward_method(policy, name)
    gathering = getattr(policy, name)

    def call(*args: Any) -> Any:
        values = gathering(*args)
        release_without_gradient(policy)
        return values

    setattr(policy, name, call)


def release_without_gradient(policy: nn.Module) -> None:
    """Let go of the gathered weights that no backward pass will let go of.

    They would be what ``parameters()`` returns, and be used once more after an optimizer step has changed the shards.
    """
    if not torch.is_grad_enabled():
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
