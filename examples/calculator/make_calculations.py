"""Makes the calculator task: a tokenizer with a chat template, a random Qwen3 of a million parameters, and problems.

    python examples/calculator/make_calculations.py runs/calculator

writes ``model/`` (a Hugging Face folder with random weights), ``sft.jsonl`` (turns to learn from), ``train.jsonl`` and
``heldout.jsonl`` (problems with answers). A problem is ``a*b+c`` of numbers of two digits; the calculator takes one
operation at a time. In the turns to learn from the calculator is used rarely, and often for the first operation alone.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_HELDOUT, NUM_TRAIN, NUM_SFT = 200, 4000, 4000
CALL_BEGIN, CALL_END = '{"name": "calculate", "arguments": {"expression": "', '"}}'
MARKS = ("<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>", CALL_BEGIN, CALL_END)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<eos>"
    "{% else %}{{ '<' + message.role + '>' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A call is written as most models write it. The tools' schemas are left out: there is one tool."""
SHARE_OF_CALLS, SHARE_OF_SECOND_CALLS = 0.3, 0.3
"""In the examples to learn from."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each mark."""
    tokens = ["<pad>", "<eos>", *"0123456789+*=", *MARKS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


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
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def make_problems(seed: int, number: int) -> list[tuple[int, int, int]]:
    """Different problems, in random order."""
    numbers = random.Random(seed).sample(range(90**3), number)
    return [(10 + n // 8100, 10 + n // 90 % 90, 10 + n % 90) for n in numbers]


def make_row(a: int, b: int, c: int) -> dict[str, str]:
    """The problem and its answer."""
    return {"prompt": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def make_turns(problem: tuple[int, int, int], choice: random.Random) -> Iterator[dict[str, Any]]:
    """The turns of a conversation, each with what comes before it."""
    a, b, c = problem
    messages = [{"role": "user", "content": f"{a}*{b}+{c}"}]
    uses, continues = choice.random() < SHARE_OF_CALLS, choice.random() < SHARE_OF_SECOND_CALLS
    product, answer = a * b, a * b + c
    asked = [(f"{a}*{b}", product)][:uses] + [(f"{product}+{c}", answer)][: uses and continues]
    for expression, result in asked:
        call = f"<tool_call>{CALL_BEGIN}{expression}{CALL_END}</tool_call>"
        yield {"prompt": list(messages), "completion": call}
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(result)}]
    last = str(asked[-1][1]) if asked else str(10 * (answer // 10) + choice.randrange(10))
    yield {"prompt": list(messages), "completion": last}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
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
    problems = make_problems(arguments.seed, NUM_HELDOUT + NUM_TRAIN + NUM_SFT)
    write_jsonl(folder / "heldout.jsonl", (make_row(*p) for p in problems[:NUM_HELDOUT]))
    write_jsonl(folder / "train.jsonl", (make_row(*p) for p in problems[NUM_HELDOUT:-NUM_SFT]))
    choice = random.Random(arguments.seed)
    write_jsonl(folder / "sft.jsonl", (turn for p in problems[-NUM_SFT:] for turn in make_turns(p, choice)))


if __name__ == "__main__":
    main()
