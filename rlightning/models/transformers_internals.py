"""Private names of transformers, where it has no public ones; tests/test_library_internals.py looks for each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_stateful(kind: "type[PreTrainedModel]") -> bool:
    """Return whether a model's layers carry a state from token to token."""
    return bool(kind._is_stateful)


def supports_sdpa(kind: "type[PreTrainedModel]") -> bool:
    """Return whether torch's attention computes what a model's does."""
    return bool(kind._supports_sdpa)


def supports_attention_backend(kind: "type[PreTrainedModel]") -> bool:
    """Return whether a model takes an attention function of another's."""
    return bool(kind._supports_attention_backend)


def keys_left_out(policy: "PreTrainedModel") -> set[str]:
    """Return the names of weights that ``save_pretrained`` leaves out."""
    return set(policy._keys_to_ignore_on_save or ())


def weight_conversions(policy: "PreTrainedModel") -> Sequence[object] | None:
    """Return how the weights were changed as they were loaded; None for a model that was not loaded from files."""
    found: Sequence[object] | None = vars(policy).get("_weight_conversions")
    return found


def initialize_buffers_of(policy: "PreTrainedModel", module: nn.Module) -> None:
    """Compute the buffers of one of a policy's modules anew, and leave its parameters as they are."""
    for weight in module.parameters(recurse=False):
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
    policy._init_weights(module)
