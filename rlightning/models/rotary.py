"""Rotary position embeddings with scaling: the lengths and factors for which actor and engine agree."""

import math

from torch import nn
from transformers import PreTrainedConfig

from rlightning.models.counts import read_setting
from rlightning.parallel.device import exact_float32
from rlightning.python_values import JsonObject


def use_exact_angles(policy: nn.Module) -> None:
    """Have a model compute rotary angles without TF32, whose rounding makes positions above 2,048 inexact.

    transformers 5.17 multiplies positions by frequencies in a matrix product, later versions do so elementwise.
    """
    for name, module in policy.named_modules():
        if name.rpartition(".")[2].startswith("rotary_emb") and "layers." not in name:
            module.forward = exact_float32()(module.forward)


def scaled_ropes(config: PreTrainedConfig) -> list[JsonObject]:
    """Return the parameters of scaled rotary embeddings, one set for each type of layer that has its own; [] if none is
    scaled.
    """
    parameters = read_setting(config, "rope_parameters") or {}
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [rope for rope in sets if rope.get("rope_type", "default") != "default"]


def max_model_length(config: PreTrainedConfig) -> int:
    """Return the longest sequence, in tokens, for which actor and engine compute the same positions."""
    length = read_setting(config, "max_position_embeddings")
    return min([int(length) if length else 1 << 30, *_longrope_borders(config)])


def describe_length_limit(config: PreTrainedConfig) -> str:
    """Return why :func:`max_model_length` is smaller than the model's number of positions; "" if it is not."""
    if _longrope_borders(config) == [max_model_length(config)]:
        return "beyond, its longrope frequencies are others for all sequences of a micro-batch"
    return ""


def describe_longrope_gap(config: PreTrainedConfig) -> str | None:
    """Return how vLLM's factor for LongRoPE differs from transformers'; None if they are equal.

    vLLM takes ``short_mscale`` from config.json, or computes the factor from the lengths (arXiv:2402.13753, section
    3.3). transformers takes ``attention_factor``, or computes it from ``factor`` or the lengths.
    """
    positions = read_setting(config, "max_position_embeddings")
    for rope in scaled_ropes(config):
        original = rope.get("original_max_position_embeddings")
        if rope["rope_type"] == "longrope" and original:
            ratio = positions / original
            actor = rope.get("attention_factor") or _longrope_factor(rope.get("factor") or ratio, original)
            engine = rope.get("short_mscale") or _longrope_factor(ratio, original)
            if not math.isclose(actor, engine, rel_tol=1e-3):
                given = [
                    f"{key}={rope[key]}" for key in ("attention_factor", "factor", "short_mscale") if rope.get(key)
                ]
                return f"{' and '.join(given)} make it {actor:.4g} in transformers and {engine:.4g} in vLLM"
    return None


def _longrope_factor(ratio: float, original: int) -> float:
    return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0


def _longrope_borders(config: PreTrainedConfig) -> list[int]:
    """Return the length above which transformers switches LongRoPE's frequencies for a whole batch; [] if none.

    LongRoPE (arXiv:2402.13753) has two sets of frequencies. transformers chooses by the longest sequence of a batch, so
    that a result depends on the other sequences; vLLM chooses by the engine's maximum length.
    """
    ropes = [rope for rope in scaled_ropes(config) if rope["rope_type"] == "longrope"]
    borders = [rope.get("original_max_position_embeddings") for rope in ropes]
    return [int(min(filter(None, borders)))] if any(borders) else []
