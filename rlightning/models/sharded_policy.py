"""A policy whose weights are sharded over ranks with FSDP2, and optionally split by tensor parallelism.

    config.json -> modules on the meta device -> tensor parallelism -> fully_shard -> each rank reads its own slices

No rank ever has the whole model in device or host memory. A layer's weights are gathered when it runs and freed
afterwards.
"""

import logging
from collections.abc import Mapping
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.adapter import LoRA
from rlightning.models.adapter_layers import add_adapter, initialize_adapter, store_digest
from rlightning.models.architecture import build_small, check_policy, not_finite
from rlightning.models.files import check_head, find_weights, is_converted
from rlightning.models.finite import find_not_finite
from rlightning.models.layers import decoder_layers
from rlightning.models.logprobs import compute_packed_logprobs
from rlightning.models.policy import load_config, load_policy
from rlightning.models.tensor_parallel import check_tensor_parallel, parallelize
from rlightning.models.weight_reading import build_on_meta, initialize_buffers, read_slices
from rlightning.parallel.collectives import gather_objects
from rlightning.parallel.gathering import local_part
from rlightning.parallel.sharding import Sharding, local_tensor, named_weights, release_without_gradient

log = logging.getLogger(__name__)


def load_sharded_policy(
    model: str, sharding: Sharding, *, dtype: torch.dtype = torch.float32, adapter: LoRA | None = None
) -> PreTrainedModel:
    """Load a policy as :func:`~rlightning.models.load_policy` does, but each rank reads and stores only its shards.
    Every rank must call it.

    The parameters are DTensors on the device. With an adapter they are frozen, and the adapter's parameters are
    DTensors too.

    Raises:
        ConfigError: weights are missing, or packed attention or the tensor-parallel size is not supported.
    """
    tensor_parallel_mesh = sharding.mesh["tensor_parallel"]
    check_tensor_parallel(model, load_config(model), tensor_parallel_mesh.size())
    policy = build_on_meta(model, dtype)
    check_policy(model, build_small(policy.config))  # the whole model is loaded nowhere
    if adapter is not None:
        add_adapter(policy, adapter, torch.device("meta"))
    if tensor_parallel_mesh.size() > 1:
        parallelize(policy, tensor_parallel_mesh)
    shard(policy, sharding)
    policy.to_empty(device=sharding.storage_device)
    policy.tie_weights()  # to_empty has allocated separate memory for each tied parameter
    if buffer := initialize_buffers(policy, sharding.device):
        raise ConfigError(
            f"model='{model}' has a buffer, '{buffer}', that cannot be computed without loading the whole model. Use "
            "trainer.strategy=ddp."
        )
    load_shards(model, policy)
    if adapter is not None:
        initialize_adapter(policy, adapter)
        store_digest(policy, model)
    return policy


def shard(policy: PreTrainedModel, sharding: Sharding) -> None:
    """Shard a policy's parameters in place over the data-parallel ranks: one FSDP group per decoder layer, and one for
    the rest.
    """
    is_mixed = sharding.compute_dtype is not None
    precision = MixedPrecisionPolicy(
        param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32 if is_mixed else None
    )
    for layer in decoder_layers(policy):
        sharding.shard(layer, precision, reshard_after_forward=sharding.reshard_after_forward)
    # Embedding and output layer are needed first in the backward pass: they stay gathered until then.
    sharding.shard(policy, precision, reshard_after_forward=False)
    policy.register_forward_hook(lambda *_: release_without_gradient(policy))
    name = compute_packed_logprobs.__name__
    setattr(policy, name, MethodType(compute_packed_logprobs, policy))
    register_fsdp_forward_method(policy, name)  # FSDP gathers weights for it as for forward()


@torch.no_grad()
def load_shards(model: str, policy: PreTrainedModel) -> None:
    """Fill the policy's allocated parameters and saved buffers from its files; every rank must call it.

    Raises:
        ConfigError: weights are missing, have other shapes or are not finite; raised on every rank.
    """
    files = find_weights(model)
    check_head(model, policy.config, files)
    targets = dict(named_weights(policy))
    if targets.keys() <= files.keys() and not is_converted(policy):
        read_slices(model, targets, files)
    else:
        broadcast_slices(model, targets)
    broken = [
        name for names in gather_objects(find_not_finite(targets.items()), name="shards are read") for name in names
    ]
    if broken:
        raise not_finite(model, sorted(set(broken)))


def broadcast_slices(model: str, targets: Mapping[str, Tensor]) -> None:
    """Have rank 0 load the whole model with transformers and broadcast each weight, of which each rank keeps its part.
    Every rank must call it.

    Used for files whose names or shapes transformers converts while loading, and for formats other than safetensors.
    """
    is_first = dist.get_rank() == 0
    failure: str | None = None
    whole: dict[str, Tensor] = {}
    if is_first:
        log.info("The files of model='%s' do not hold its weights by their names: rank 0 loads and sends them.", model)
        try:
            whole = dict(named_weights(load_policy(model, next(iter(targets.values())).dtype)))
        except ConfigError as error:
            failure = str(error)
    failure = gather_objects(failure, name="rank 0 has loaded the model")[0]
    if failure is not None:
        raise ConfigError(failure)
    for name, target in targets.items():
        device = target.device_mesh.device_type if isinstance(target, DTensor) else target.device
        weight = whole[name].to(device) if is_first else torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(weight, src=0)
        local_tensor(target).copy_(local_part(weight, target))
