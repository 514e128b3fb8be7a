"""Checkpoints of an actor with an adapter: they contain the adapter's weights and a digest of the frozen base."""

from collections.abc import Mapping
from typing import TypeVar

from rlightning.errors import ConfigError
from rlightning.models.adapter import LoRA
from rlightning.parallel.sharding import is_adapter_weight

KEY = "adapter"
"""Key of a checkpoint with the description of the adapter's base."""
PREFIX = "actor."
"""Prefix of the names of the actor's weights in a module."""

T = TypeVar("T")


def is_base_weight(name: str) -> bool:
    """Return whether a weight of the module, by its name, belongs to the actor's frozen base."""
    return name.startswith(PREFIX) and not is_adapter_weight(name)


def without_base(state: Mapping[str, T]) -> dict[str, T]:
    """Return a module's state dict without the weights of the frozen base, which are in the model's folder."""
    return {name: value for name, value in state.items() if not is_base_weight(name)}


def with_base(state: Mapping[str, T], own: Mapping[str, T]) -> dict[str, T]:
    """Return a checkpoint's state dict with the frozen base's weights added from ``own``, the module's state dict."""
    return {name: value for name, value in own.items() if is_base_weight(name)} | dict(state)


def describe_base(lora: LoRA, digest: str) -> dict[str, object]:
    """Return the entry of a checkpoint that identifies an adapter (rank, scaling, layers) and its base model, by the
    base's digest.
    """
    return {
        "rank": lora.rank,
        "scaling": lora.scaling,
        "modules": sorted(lora.modules),
        "quantize_base": lora.quantize_base,
        "base": digest,
    }


def check_resumed(saved: Mapping[str, object] | None, lora: LoRA | None, model: str, digest: str) -> None:
    """Raise a ConfigError if a checkpoint's adapter or base model differs from the run's.

    Args:
        saved: the checkpoint's entry (:func:`describe_base`); None if it has no adapter.
        lora: the run's adapter; None without one.
        model: path or name of the run's base model, for the message.
        digest: digest of the run's base model, as it was loaded.
    """
    if saved is None and lora is None:
        return
    if saved is None or lora is None:
        way = "Leave model.adapter out" if saved is None else "Set model.adapter as that run did"
        kind = "all weights" if saved is None else f"an adapter of rank {saved['rank']}"
        raise ConfigError(f"The checkpoint is of a run that trains {kind}. {way}, or begin a new run.")
    own = describe_base(lora, digest)
    for key in ("rank", "scaling", "modules"):
        if saved[key] != own[key]:
            values = "others" if key == "modules" else f"{saved[key]:g}, not {own[key]:g}"
            raise ConfigError(
                f"The checkpoint's adapter has another {key}: {values}. Set model.adapter as that run did."
            )
    if (held := saved.get("quantize_base")) != lora.quantize_base:
        raise ConfigError(
            f"The checkpoint's adapter was trained on a base in {held or 'full precision'}, not in "
            f"{lora.quantize_base or 'full precision'}. Set model.adapter.quantize_base as that run did."
        )
    if saved["base"] != own["base"]:
        raise ConfigError(
            f"The checkpoint's adapter was trained on a base with other weights than model='{model}' has. Name its own."
        )
