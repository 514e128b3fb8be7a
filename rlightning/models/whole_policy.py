"""Loads a policy that is not sharded; a frozen one in the dtype in which it computes."""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.adapter import LoRA
from rlightning.models.adapter_layers import add_adapter, initialize_adapter, store_digest
from rlightning.models.architecture import build_small, check_policy, not_finite
from rlightning.models.files import check_head, find_weights, is_converted
from rlightning.models.finite import find_not_finite
from rlightning.models.policy import load_policy, narrow_residuals
from rlightning.models.quantized import quantize_layers
from rlightning.models.weight_reading import build_on_meta, initialize_buffers, read_slices
from rlightning.parallel.sharding import named_weights


def load_whole_policy(
    model: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | None = None,
    adapter: LoRA | None = None,
) -> PreTrainedModel:
    """Load a policy as :func:`load_policy` does, onto a device.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        device: of the parameters.
        dtype: of the parameters.
        frozen_dtype: of the matrices if the policy is frozen (:func:`hold_as_computed`); None if it
            is trained.
        adapter: adapter that is trained on a frozen policy.
    """
    if frozen_dtype is None:
        policy = load_policy(model, dtype)
    else:
        is_quantized = adapter is not None and adapter.quantize_base is not None
        policy = load_frozen_policy(model, torch.device("cpu") if is_quantized else device, dtype, frozen_dtype)
    if adapter is not None:
        add_adapter(policy, adapter, device)
        if adapter.quantize_base is not None:
            quantize_layers(policy, set(adapter.quantized), adapter.quantize_base, device)
    policy = nn.Module.to(policy, device)
    if adapter is not None:
        initialize_adapter(policy, adapter)
        store_digest(policy, model)
    return policy


@torch.no_grad()
def load_frozen_policy(
    model: str, device: torch.device, dtype: torch.dtype, matrix_dtype: torch.dtype
) -> PreTrainedModel:
    """Load a policy whose matrices have another dtype than its other weights (:func:`hold_as_computed`).

    Each weight is read from its file and cast by itself, so that the policy is nowhere in ``dtype``. It is loaded on
    the host first if transformers converts its files, if these are no safetensors, or if only the whole policy tells
    whether packed sequences are supported.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        device: of the parameters.
        dtype: of the parameters that are not matrices.
        matrix_dtype: of the matrices.

    Raises:
        ConfigError: as :func:`~rlightning.models.load_policy` does.
    """
    policy, files = build_on_meta(model, dtype), find_weights(model)
    hold_as_computed(policy, matrix_dtype)
    can_read = dict(named_weights(policy)).keys() <= files.keys() and not is_converted(policy)
    refusal = _check_small(model, policy.config) if can_read else None
    if refusal is not None and dtype.itemsize < 4:
        raise refusal  # a whole policy in half precision is not checked
    if can_read and refusal is None:
        check_head(model, policy.config, files)
        policy.to_empty(device=device)
        policy.tie_weights()  # to_empty has allocated separate memory for each tied parameter
        with device:
            missing_buffer = initialize_buffers(policy, device)
        if missing_buffer is None:
            weights = dict(named_weights(policy))
            read_slices(model, weights, files)
            if broken := find_not_finite(weights.items()):
                raise not_finite(model, broken)
            narrow_residuals(policy)
            return policy
    with torch.device("cpu"):  # Lightning's default is the device, which need not have room for all in ``dtype``
        policy = load_policy(model, dtype)
    hold_as_computed(policy, matrix_dtype)
    return policy


def _check_small(model: str, config: PreTrainedConfig) -> ConfigError | None:
    """Return why a small random model of the architecture does not support packed sequences; None if it does."""
    try:
        with torch.device("cpu"):
            check_policy(model, build_small(config))
    except ConfigError as error:
        return error
    return None


def hold_as_computed(policy: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the matrices of a frozen model in place to ``dtype``, that of autocast, so that no forward pass has to cast
    them.

    The results are the same, with half the memory. The matrices are the weights of linear layers and of the token
    embedding (:func:`narrow_residuals`). Other weights, such as norms and position embeddings, keep their dtype.
    """
    embedding = policy.get_input_embeddings()
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in policy.modules():
        is_cast = type(module) is nn.Linear or (module is embedding and type(module) is nn.Embedding)
        (cast if is_cast else others).update(module.parameters(recurse=False))
    for parameter in cast - others:
        parameter.data = parameter.data.to(dtype)
