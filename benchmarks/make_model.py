"""Makes a language model of a real shape with random weights, and a tokenizer that reads any text byte by byte.

    python benchmarks/make_model.py 0.6b runs/models/0.6b

What a step costs depends on a model's shape and not on what it knows, and random weights need no download.
"""

import argparse
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    # For a CPU. More tokens than the tokenizer knows, as in the others.
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "14b": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}
"""Qwen3's, by their number of parameters."""


def make_tokenizer() -> Any:
    """One token a byte; token 0 ends a sequence. A random model samples others too, which have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<eos>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def is_made(folder: Path) -> bool:
    """Whether a whole model is there."""
    return (folder / "tokenizer.json").is_file()


def make_model(shape: str, folder: Path) -> Path:
    """Write weights (bfloat16) and tokenizer as a Hugging Face folder, unless they are there already.

    Args:
        shape: one of :data:`SHAPES`.
        folder: gets them.
    """
    if not is_made(folder):
        import torch  # `--help` of a benchmark does without these
        from transformers import AutoModelForCausalLM, Qwen3Config

        config = Qwen3Config(**SHAPES[shape], bos_token_id=None, eos_token_id=0)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)  # last: it says that the folder is whole
    return folder


def main() -> None:
    """Write the model named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.shape, arguments.folder)


if __name__ == "__main__":
    main()
