"""Builds a policy without weights, and reads its weights from files into memory that it has allocated."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.files import other_shape
from rlightning.models.policy import load_config, remove_dropout
from rlightning.models.remote_code import load_generation_config
from rlightning.models.routers import keep_routers_float32
from rlightning.models.transformers_internals import initialize_buffers_of
from rlightning.parallel.gathering import local_box
from rlightning.parallel.sharding import local_tensor
from rlightning.torch_internals import non_persistent_buffers


def build_on_meta(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a policy as :func:`~rlightning.models.load_policy` does, but with all weights on the meta device, and
    unchecked.
    """
    config = load_config(model)
    remove_dropout(config)
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=PACKED_ATTENTION
        )
    policy.generation_config = load_generation_config(model, config)  # exported with the weights
    policy.train()  # there is no dropout left
    keep_routers_float32(policy)
    return policy


def initialize_buffers(policy: PreTrainedModel, device: torch.device) -> str | None:
    """Recompute buffers that are in no file, such as the frequencies of rotary embeddings, on ``device``.

    transformers' classes can do this, since transformers itself builds models without memory first. The policy's
    buffers are allocated, but uninitialised.

    Returns:
        The name of a buffer that cannot be computed without loading the whole model; None if there is none.
    """
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.full_like(buffer, math.nan if buffer.is_floating_point() else 0, device=device))
        if non_persistent_buffers(module):
            initialize_buffers_of(policy, module)
    saved = policy.state_dict().keys()
    floating = ((name, buffer) for name, buffer in policy.named_buffers() if buffer.is_floating_point())
    return next((name for name, buffer in floating if name not in saved and buffer.isnan().any()), None)


def read_slices(model: str, targets: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """Read this rank's part of each weight in ``targets`` from the safetensors ``files`` into the target tensor."""
    for path in sorted(set(files.values())):
        names = [name for name in targets if files[name] == path]
        try:
            with safe_open(path, "pt") as file:
                for name in names:
                    stored, target = file.get_slice(name), targets[name]
                    if list(stored.get_shape()) != list(target.shape):
                        raise other_shape(model, name, stored.get_shape(), target.shape)
                    own = local_tensor(target)
                    if not isinstance(target, DTensor):
                        own.copy_(file.get_tensor(name))
                    elif own.numel():  # a shard may be empty, which some versions of safetensors cannot read
                        own.copy_(stored[local_box(target).slices])
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model='{model}' has no readable weights: {error}") from error
