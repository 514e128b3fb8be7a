"""Time and memory of reading and tokenising a large prompt set, at a first and at a second start.

    python benchmarks/prompts.py --rows 40000

Each start is a process of its own with an empty or a filled cache. Memory is what the process holds beyond what it held
before it read the set: of its own ("anonymous"), with the mapped pages of files that it has touched ("resident"), and
at its peak, child processes not counted.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 5000


def write_inputs(folder: Path, num_rows: int, num_words: int) -> None:
    """Write the rows, and a byte-level tokenizer with merges that were trained on some of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    random.seed(0)
    words = ["".join(random.choices("etaoinshrdlucm", k=random.randint(2, 9))) for _ in range(WORDS)]
    with (folder / "train.jsonl").open("w") as file:
        for row in range(num_rows):
            text = f"{row}: " + " ".join(random.choices(words, k=num_words))
            file.write(json.dumps({"prompt": text, "answer": str(row), "source": "synthetic"}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator((" ".join(random.choices(words, k=50)) for _ in range(500)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def memory() -> dict[str, int]:
    """This process's memory in KiB, by Linux's names."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {name.rstrip(":"): int(size) for name, size, *_ in (line for line in lines if line[-1:] == ["kB"])}


def start(folder: Path) -> dict[str, float]:
    """Read and tokenise the set as a run's start does, and take some steps' prompts."""
    import datasets  # noqa: F401  so that its own memory and time are not counted
    from transformers import AutoTokenizer

    from rlightning.data.formatting import PromptFormat, build_prompts
    from rlightning.data.sources import read_rows
    from rlightning.data.stream import PromptStream

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer(["warm up"] * 8)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = memory(), time.perf_counter()
    prompts = build_prompts(read_rows(str(folder / "train.jsonl")), tokenizer, PromptFormat())
    stream = PromptStream(prompts)
    seconds, after = time.perf_counter() - began, memory()
    began = time.perf_counter()
    taken = [prompt for _ in range(10) for prompt in stream.take(64)]
    step = (time.perf_counter() - began) / 10
    rows = len(prompts)
    return {
        "rows": rows,
        "tokens a row": round(sum(len(prompt.token_ids) for prompt in taken) / len(taken), 1),
        "start, s": round(seconds, 2),
        "µs a row": round(seconds / rows * 1e6, 1),
        "anonymous, B a row": round((after["RssAnon"] - before["RssAnon"]) * 1024 / rows),
        "resident, B a row": round((after["VmRSS"] - before["VmRSS"]) * 1024 / rows),
        "peak, B a row": round((after["VmHWM"] - before["VmRSS"]) * 1024 / rows),
        "ms for 64 prompts": round(step * 1e3, 2),
    }


def main() -> None:
    """Write the inputs, start twice, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--words", type=int, default=70, help="of a prompt; about two tokens each")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        sys.stdout.write(json.dumps(start(arguments.folder), ensure_ascii=False) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), arguments.rows, arguments.words)
        environment = os.environ | {"HF_DATASETS_CACHE": f"{name}/cache"}
        for place in ("first", "second"):
            command = [sys.executable, __file__, "--folder", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            sys.stdout.write(f"{place} start: {done.stdout}")


if __name__ == "__main__":
    main()
