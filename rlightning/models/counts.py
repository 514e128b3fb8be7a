"""Floating point operations that a model's forward and backward passes need, from its configuration alone.

A matrix product of [M, K] and [K, N] has ``2 M K N`` of them. What is not a matrix product (norms, activations,
softmax, rotary positions) counts for nothing, nor does what is computed twice to save memory: these are the model's
operations, whatever the hardware makes of them (PaLM, arXiv:2204.02311, appendix B). For a sequence of ``L`` tokens, of
which the output layer predicts ``M``:

    forward  = 2 W L + 2 E V M + sum over layers of 2 H (Dk + Dv) S(L)
    training = 3 forward

``W``: weights of all matrices that a token goes through in the layers; of experts the active ones. The embedding is
looked up and takes none. ``E V``: hidden size and vocabulary, that is the output layer, tied or not. ``H, Dk, Dv``:
query heads, and the sizes of a key and a value. ``S(L)``: pairs of a token and one that it sees, itself included; that
is ``L (L + 1) / 2``, and with a window of ``w < L`` tokens ``w (w + 1) / 2 + (L - w) w``.

A backward pass makes two products for each of the forward's: one for what went in, one for the weights. The usual "6N"
is ``6 N L``, with ``N`` all weights, the embedding's too (tied ones once, of experts the active ones), without
attention.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlightning.models.sizes import head_size, num_active_experts, num_experts

_COUNTED: dict[str, "ModelFlops"] = {}


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The coefficients of the formula.

    Attributes:
        matrices: ``W``.
        head: ``E V``.
        pair: ``2 H (Dk + Dv)``, of one layer.
        windows: numbers of layers by their window in tokens; None is a layer that sees all.
        active: ``N``.
    """

    matrices: int
    head: int
    pair: int
    windows: tuple[tuple[int | None, int], ...]
    active: int

    def sequences(self, lengths: Tensor, predicted: Tensor | None = None) -> Tensor:
        """Operations of forward and backward.

        Args:
            lengths: [N], tokens of each sequence.
            predicted: [N], how many of them the output layer is computed for; None is all.

        Returns:
            [N] float64, on the device of ``lengths``.
        """
        lengths = lengths.double()
        predicted = lengths if predicted is None else predicted.double()
        forward = 2.0 * self.matrices * lengths + 2.0 * self.head * predicted
        for window, num_layers in self.windows:
            forward += float(self.pair * num_layers) * visible_pairs(lengths, window)
        return 3 * forward

    def six_n(self, num_tokens: int) -> float:
        """The usual estimate, ``6 N T``."""
        return 6.0 * self.active * num_tokens


def sequence_flops(config: PreTrainedConfig, lengths: Tensor, predicted: Tensor | None = None) -> Tensor:
    """Operations of forward and backward over each sequence: see :meth:`ModelFlops.sequences`."""
    return model_flops(config).sequences(lengths, predicted)


def visible_pairs(lengths: Tensor, window: int | None) -> Tensor:
    """``S(L)``: pairs of a token and one that it sees, under causal attention.

    Args:
        lengths: [N] float64.
        window: how many tokens back a token sees, itself included; None is all.
    """
    seen = lengths if window is None else lengths.clamp(max=window)
    return seen * (seen + 1) / 2 + (lengths - seen) * seen


def model_flops(config: PreTrainedConfig) -> ModelFlops:
    """Make the model without memory and count its matrices; the second time the answer is there.

    Args:
        config: of a causal language model.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _COUNTED:
        _COUNTED[key] = _count(config)
    return _COUNTED[key]


def _count(config: PreTrainedConfig) -> ModelFlops:
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    text_config: Any = config.get_text_config()
    head: Any = policy.get_output_embeddings()
    heads: int = text_config.num_attention_heads
    size = head_size(config)
    # Keys and values of latent attention (DeepSeek-V2, arXiv:2405.04434) have sizes of their own.
    sizes = [getattr(text_config, name, None) or size for name in ("qk_head_dim", "v_head_dim")]
    share = num_active_experts(config) / num_experts(config) if num_experts(config) else 1.0
    experts = sum(p.numel() for name, p in policy.named_parameters() if _is_expert(name))
    matrices = [
        (name, parameter)
        for prefix, module in policy.named_modules()
        if not isinstance(module, nn.Embedding) and module is not head and "norm" not in prefix.rpartition(".")[2]
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.ndim > 1 and not name.endswith("bias")
    ]
    return ModelFlops(
        matrices=round(sum(p.numel() * (share if _is_expert(name) else 1) for name, p in matrices)),
        head=head.weight.numel(),
        pair=2 * heads * sum(sizes),
        windows=_count_windows(text_config),
        active=round(sum(p.numel() for p in policy.parameters()) - experts * (1 - share)),
    )


def _is_expert(name: str) -> bool:
    """Whether a parameter belongs to experts that a router chooses from; shared ones are always active."""
    return "experts" in name.split(".")


def _count_windows(text_config: Any) -> tuple[tuple[int | None, int], ...]:
    window: int | None = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * text_config.num_hidden_layers  # where there is a window, all layers have it
    return tuple(Counter(window if kind == "sliding_attention" else None for kind in kinds).items())
