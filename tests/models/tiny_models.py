"""Models of a few thousand parameters, of several architectures, and sequences to pack."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

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
LENGTHS = [7, 1, 5, 12]


def save_tiny(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> str:
    """Write a model of the architecture ``kind``, with norms that are not all ones, into a folder."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | config), dtype=dtype)
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
    """What a forward pass over packed sequences takes."""
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
