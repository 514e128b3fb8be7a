"""Private names of transformers that have no public equivalent; tests/test_library_internals.py checks each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_stateful(kind: "type[PreTrainedModel]") -> bool:
    """Return whether a model's layers carry a recurrent state from token to token."""
    return bool(kind._is_stateful)


def supports_sdpa(kind: "type[PreTrainedModel]") -> bool:
    """Return whether a model's attention can be computed by torch's scaled_dot_product_attention."""
    return bool(kind._supports_sdpa)


def supports_attention_backend(kind: "type[PreTrainedModel]") -> bool:
    """Return whether a model accepts an external attention function."""
    return bool(kind._supports_attention_backend)


def keys_left_out(policy: "PreTrainedModel") -> set[str]:
    """Return the names of weights that ``save_pretrained`` leaves out."""
    return set(policy._keys_to_ignore_on_save or ())


def weight_conversions(policy: "PreTrainedModel") -> Sequence[object] | None:
    """Return the conversions that were applied to the weights while loading; None for a model not loaded from files."""
    found: Sequence[object] | None = vars(policy).get("_weight_conversions")
    return found


def initialize_buffers_of(policy: "PreTrainedModel", module: nn.Module) -> None:
    """Recompute the buffers of one of a policy's modules, without changing its parameters."""
    for weight in module.parameters(recurse=False):
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
    policy._init_weights(module)
