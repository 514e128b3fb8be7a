"""Makes the arithmetic task: a tokenizer, a random Qwen3 of about a million parameters, and problems.

    python examples/arithmetic/make_task.py runs/arithmetic

writes ``model/`` (a Hugging Face folder with random weights), ``sft.jsonl`` (problems with solutions),
``train.jsonl`` and ``heldout.jsonl`` (problems with answers). A problem is two numbers of up to two digits, added or
subtracted. No held-out problem is among the others.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_HELDOUT = 500
NUM_SFT = 4000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokens = ["<pad>", "<eos>", *"0123456789+-="]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(seed: int, vocab_size: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def make_problems(seed: int) -> list[dict[str, str]]:
    """Every problem once, in random order."""
    problems = [
        {"prompt": f"{a}{operator}{b}=", "answer": str(a + b if operator == "+" else a - b)}
        for a in range(100)
        for b in range(100)
        for operator in "+-"
    ]
    random.Random(seed).shuffle(problems)
    return problems


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the task's files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the split")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(arguments.seed, len(tokenizer)).save_pretrained(folder / "model")
    problems = make_problems(arguments.seed)
    heldout, rest = problems[:NUM_HELDOUT], problems[NUM_HELDOUT:]
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "train.jsonl", rest)
    write_jsonl(folder / "sft.jsonl", ({**row, "completion": row["answer"]} for row in rest[:NUM_SFT]))


if __name__ == "__main__":
    main()
