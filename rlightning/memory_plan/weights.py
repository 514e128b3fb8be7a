"""How many weights a rank holds, from the model's configuration alone."""

import math
import re
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.layers import decoder_layers
from rlightning.parallel.sharding import named_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of weights, not bytes; tied ones count once.

    Attributes:
        total: of the model.
        held: of them on a rank, the one that has most where they do not divide.
        layer: of the largest layer, a tensor-parallel rank's part of it.
        layers: of all layers, a tensor-parallel rank's part of them.
        root: of the rest (embedding, last norm, output layer), a tensor-parallel rank's part of it.
        head: of the output layer, a tensor-parallel rank's part of it.
        largest: of the largest tensor.
        is_tied: whether the output layer is the embedding.
        shapes: names and full shapes, in the order in which they are sent to an engine.
    """

    total: int
    held: int
    layer: int
    layers: int
    root: int
    head: int
    largest: int
    is_tied: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def count_weights(config: PreTrainedConfig, *, tensor_parallel_size: int = 1, shard_size: int = 1) -> Weights:
    """Make the model without memory and count.

    Args:
        config: the model's.
        tensor_parallel_size: ranks that split each layer, after the plan that transformers ships with the model.
        shard_size: ranks that share what is left, each a part of every tensor's first dimension (FSDP2).
    """
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION
        )
    plan = (config.get_text_config().base_model_tp_plan or {}) if tensor_parallel_size > 1 else {}
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    assert embedding is not None and head is not None
    names = {id(parameter): name for name, parameter in policy.base_model.named_parameters()}
    parts = {}
    for _, parameter in policy.named_parameters():
        module, _, kind = names.get(id(parameter), "").rpartition(".")
        is_vocabulary = parameter is embedding.weight or parameter is head.weight
        style = "colwise" if is_vocabulary else find_style(module, plan)
        parts[id(parameter)] = cut(tuple(parameter.shape), style, kind, tensor_parallel_size)
    layers = [sum(math.prod(parts[id(p)]) for p in layer.parameters()) for layer in decoder_layers(policy)]
    return Weights(
        total=sum(parameter.numel() for parameter in policy.parameters()),
        held=sum(-(-shape[0] // shard_size) * math.prod(shape[1:]) for shape in parts.values()),
        layer=max(layers),
        layers=sum(layers),
        root=sum(math.prod(shape) for shape in parts.values()) - sum(layers),
        head=math.prod(parts[id(head.weight)]),
        largest=max(parameter.numel() for parameter in policy.parameters()),
        is_tied=head.weight is embedding.weight,
        shapes=tuple((name, tuple(tensor.shape)) for name, tensor in named_weights(policy)),
    )


def find_style(module: str, plan: dict[str, str]) -> str:
    """How tensor parallelism cuts a module, by its name below the base model; empty if it does not."""
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module):
            return style
    return ""


def cut(shape: tuple[int, ...], style: str, kind: str, size: int) -> tuple[int, ...]:
    """The part of a weight (or ``kind="bias"``) of ``shape`` that one of ``size`` tensor-parallel ranks holds."""
    if style.startswith("colwise"):
        return (-(-shape[0] // size), *shape[1:])
    if style.startswith("rowwise") and kind == "weight":
        return (shape[0], -(-shape[1] // size))
    return shape
