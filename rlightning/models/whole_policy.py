"""A policy that is whole on one device; ``sharded_policy.py`` has those that are sharded over ranks."""

from contextlib import nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from rlightning.models.adapter import LoRA
from rlightning.models.adapter_layers import add_adapter, initialize_adapter
from rlightning.models.policy import hold_as_computed, load_policy
from rlightning.models.quantized import quantize_layers


def load_whole_policy(
    model: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | None = None,
    adapter: LoRA | None = None,
) -> PreTrainedModel:
    """Load a policy as :func:`~rlightning.models.load_policy` does, onto a device.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        device: of the parameters.
        dtype: of the parameters.
        frozen_dtype: of the matrices if the policy is frozen (:func:`~rlightning.models.hold_as_computed`); None if it
            is trained.
        adapter: adapter that is trained on a frozen policy.
    """
    # What is cast is read on the host: on the device, Lightning's default here, float32 would need room first.
    with nullcontext() if frozen_dtype is None else torch.device("cpu"):
        policy = load_policy(model, dtype)
    if frozen_dtype is not None:
        hold_as_computed(policy, frozen_dtype)
    if adapter is not None:
        add_adapter(policy, adapter, device)
        if adapter.quantize_base is not None:
            quantize_layers(policy, set(adapter.quantized), adapter.quantize_base, device)
    policy = nn.Module.to(policy, device)
    if adapter is not None:
        initialize_adapter(policy, adapter)
    return policy
