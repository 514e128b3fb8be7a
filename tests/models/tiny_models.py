"""Models of a few thousand parameters, of several architectures, and sequences to pack."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
"""Of mixtures of experts and of latent attention, under all the names that transformers has for them."""
FROM_THE_HUB = {"rope_scaling", "head_dim", "topk_method", "score_func"}
"""What published files hold though the architecture's class has no field for it."""
LENGTHS = [7, 1, 5, 12]


def tiny_config(kind: str, **config: Any) -> PreTrainedConfig:
    """Make a config of the architecture ``kind``, with nothing in it that transformers would not write.

    Args:
        kind: a ``model_type`` of transformers.
        config: further values, or others in place of ``SIZES`` and ``EXPERTS``, which apply as far as they are known.

    Raises:
        TypeError: for a value that transformers would keep without knowing its name.
    """
    cls = type(AutoConfig.for_model(kind))
    known = {field.name for field in fields(cls)} | cls.attribute_map.keys()
    sizes = {name: size for name, size in (SIZES | EXPERTS).items() if name in known}
    made: PreTrainedConfig = AutoConfig.for_model(kind, **sizes | config)
    unknown = config.keys() & vars(made).keys() - known - FROM_THE_HUB
    if unknown:
        raise TypeError(f"{cls.__name__} knows no {', '.join(sorted(unknown))}.")
    return made


def save_tiny(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> str:
    """Write a model of the architecture ``kind``, with norms that are not all ones, into a folder."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(kind, **config), dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def load_eager(folder: str) -> Any:
    """The same model with transformers' own attention, to compare with."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def make_sequences() -> list[Tensor]:
    """Random tokens of the lengths ``LENGTHS``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 40, (length,), generator=generator) for length in LENGTHS]


def packed_inputs(sequences: list[Tensor]) -> dict[str, Any]:
    """Return the arguments of a forward pass over packed sequences."""
    lengths = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.cat(sequences)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "use_cache": False,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
