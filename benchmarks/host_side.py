"""Seconds and memory of what the host does with the completions of a step: each part by itself, without a model.

    python benchmarks/host_side.py
    python benchmarks/host_side.py --sizes 1600x1000 16000x1000 --before ../a-checkout-of-another-commit

A size is COMPLETIONSxTOKENS. Completions have half to one and a half times as many tokens, prompts an eighth, and eight
completions a prompt. Each part and size has a process of its own, with one thread, in which it runs --repetitions times
after a small warm-up. What a part is given is made before, and counts neither as time nor as memory. ``--before``
measures another checkout's code in the same run, turn by turn.

Prints one table, a row a part: nanoseconds a token at each size (all tokens of its batch; the fastest repetition, which
other work on the machine disturbs least); growth, their ratio between the last size and the first, which is 1 where
cost is linear; and of the last size the seconds from the fastest repetition to the slowest, the most memory that the
part took beyond what it was given, and what its result keeps. All that was measured is in --out/measurements.csv.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from launch import finish, say, write_csv

from rlightning.balance import balance
from rlightning.callbacks.completions_table import completion_rows, write_parquet
from rlightning.data.packing import split_microbatches, split_minibatches
from rlightning.metrics import rollout_metrics
from rlightning.objectives import group_advantages
from rlightning.rewards import RewardRunner
from rlightning.rollout.vllm_engine import _completion
from rlightning.types import Completion, Prompt, RolloutBatch

SAMPLES_PER_PROMPT = 8
NUM_MINIBATCHES = 4
MICROBATCH_TOKENS = 16384
NUM_REQUESTS = 64
"""Engine outputs that differ; larger sizes go through them again."""
CALLS_SHARE = 10
"""Reward functions are called on one of so many completions."""
VOCABULARY = 151936


class Size(NamedTuple):
    """How much to measure with: ``num_completions`` of ``num_tokens`` each, on average."""

    num_completions: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_completions}x{self.num_tokens}"

    @property
    def num_prompts(self) -> int:
        """Groups."""
        return self.num_completions // SAMPLES_PER_PROMPT

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        spread = np.random.default_rng(0).uniform(0.5, 1.5, self.num_completions)
        return np.maximum(spread * self.num_tokens, 1).astype(int).tolist()


class Work(NamedTuple):
    """What is measured, and the tokens or the calls that it is about."""

    run: Callable[[], Any]
    num: int


# What the parts are given


def make_prompts(size: Size) -> list[Prompt]:
    """Prompts of an eighth of a completion's tokens."""
    num_tokens = max(size.num_tokens // 8, 1)
    ids = np.random.default_rng(1).integers(VOCABULARY, size=(size.num_prompts, num_tokens))
    return [Prompt(i, f"{i}: " + "why? " * num_tokens, row.tolist(), {"answer": str(i)}) for i, row in enumerate(ids)]


def make_completions(size: Size, *, texts: bool = False) -> list[list[Completion]]:
    """Completions, a list a prompt, each with arrays of its own and, with ``texts``, four letters a token."""
    random = np.random.default_rng(2)
    ids = random.integers(VOCABULARY, size=3 * size.num_tokens)
    logprobs = -random.random(3 * size.num_tokens, np.float32)
    text = "".join(random.choice(list("abcdefgh "), 12 * size.num_tokens))
    flat = []
    for i, n in enumerate(size.lengths):
        start = i % size.num_tokens
        written = text[4 * start : 4 * (start + n)] if texts else ""
        arrays = (ids[start : start + n].copy(), logprobs[start : start + n].copy(), np.zeros(n, np.int32))
        flat.append(Completion(written, *arrays, "length" if i % 2 else "stop"))
    return [flat[first : first + SAMPLES_PER_PROMPT] for first in range(0, len(flat), SAMPLES_PER_PROMPT)]


def make_batch(size: Size, *, texts: bool = False) -> RolloutBatch:
    """A batch with rewards of 0, 1 and 2, and advantages."""
    batch = RolloutBatch.pack(make_prompts(size), make_completions(size, texts=texts))
    batch.rewards = (torch.arange(batch.num_sequences) * 7 % 3).float()
    batch.reward_components = {"even": batch.rewards}
    batch.advantages = batch.to_tokens(group_advantages(batch.rewards, batch.group_ids))
    return batch


def make_outputs(size: Size) -> list[Any]:
    """What vLLM gives: a request's outputs as lists of Python numbers, with flat log-probabilities."""
    some = Size(min(size.num_completions, NUM_REQUESTS * SAMPLES_PER_PROMPT), size.num_tokens)
    requests = []
    for group in make_completions(some, texts=True):
        outputs = []
        for one in group:
            starts = np.arange(len(one.token_ids)).tolist()
            flat = SimpleNamespace(logprobs=one.logprobs.astype(float).tolist(), start_indices=starts)
            outputs.append(SimpleNamespace(**one._asdict() | {"token_ids": one.token_ids.tolist(), "logprobs": flat}))
        requests.append(SimpleNamespace(outputs=outputs))
    return requests


# The parts


def engine_messages(size: Size) -> Work:
    """In the engine's process: vLLM's outputs to pickled messages."""
    from rlightning.rollout.vllm_process import VLLMServer  # imports vLLM, which no other part needs

    requests = make_outputs(size)

    class Engine:
        async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            yield requests[int(request_id) % len(requests)]

    async def serve() -> None:
        server: Any = VLLMServer(Engine())  # type: ignore[arg-type]
        for _ in range(size.num_prompts):
            outputs = await server.generate([1], {"n": SAMPLES_PER_PROMPT})
            pickle.dumps((1, "ok", outputs), pickle.HIGHEST_PROTOCOL)

    return Work(lambda: asyncio.run(serve()), sum(size.lengths))


def trainer_messages(size: Size) -> Work:
    """In the trainer's process: messages to completions."""
    messages = []
    some = Size(min(size.num_completions, NUM_REQUESTS * SAMPLES_PER_PROMPT), size.num_tokens)
    for group in make_completions(some, texts=True):
        fields = ("text", "token_ids", "logprobs", "finish_reason")
        outputs = [{name: getattr(one, name) for name in fields} for one in group]
        messages.append(pickle.dumps((1, "ok", outputs), pickle.HIGHEST_PROTOCOL))

    def read() -> list[list[Completion]]:
        read = (pickle.loads(messages[i % len(messages)]) for i in range(size.num_prompts))
        return [[_completion(output, 3) for output in outputs] for _, _, outputs in read]

    return Work(read, sum(size.lengths))


def pack(size: Size) -> Work:
    """``RolloutBatch.pack``."""
    prompts, completions = make_prompts(size), make_completions(size)
    return Work(lambda: RolloutBatch.pack(prompts, completions), RolloutBatch.pack(prompts, completions).num_tokens)


def concatenate_one(size: Size) -> Work:
    """``RolloutBatch.concatenate`` of one batch, which is what a step without refills asks for twice."""
    batch = make_batch(size)
    return Work(lambda: RolloutBatch.concatenate([batch]), batch.num_tokens)


def concatenate_two(size: Size) -> Work:
    """``RolloutBatch.concatenate`` of two batches."""
    half = Size(size.num_prompts // 2 * SAMPLES_PER_PROMPT, size.num_tokens)
    batches = [make_batch(half), make_batch(half)]
    return Work(lambda: RolloutBatch.concatenate(batches), 2 * batches[0].num_tokens)


def balance_one_rank(size: Size) -> Work:
    """``balance``, with nobody to share with."""
    batch = make_batch(size)
    return Work(lambda: balance(batch), batch.num_tokens)


def deal(num_groups: int) -> list[list[int]]:
    """Groups to minibatches."""
    return split_minibatches(num_groups, NUM_MINIBATCHES, torch.Generator().manual_seed(0))


def cut(size: Size) -> Work:
    """``split_minibatches`` and ``split_microbatches``: who goes where, without moving anything."""
    lengths = size.lengths

    def run() -> None:
        deal(size.num_prompts)
        split_microbatches(lengths, MICROBATCH_TOKENS)

    return Work(run, sum(lengths))


def select_minibatches(size: Size) -> Work:
    """``select`` of each of four minibatches, one at a time."""
    batch = make_batch(size)

    def run() -> None:
        for dealt in deal(size.num_prompts):
            batch.select(torch.isin(batch.group_ids, torch.tensor(dealt)).nonzero()[:, 0])

    return Work(run, batch.num_tokens)


def select_microbatches(size: Size) -> Work:
    """``select`` of each micro-batch of 16,384 tokens, one at a time."""
    batch = make_batch(size)
    parts = split_microbatches(batch.lengths.tolist(), MICROBATCH_TOKENS)

    def run() -> None:
        for sequences in parts:
            batch.select(sequences)

    return Work(run, batch.num_tokens)


def advantages(size: Size) -> Work:
    """``group_advantages``, spread to the tokens."""
    batch = make_batch(size)
    assert batch.rewards is not None
    rewards = batch.rewards
    return Work(lambda: batch.to_tokens(group_advantages(rewards, batch.group_ids)), batch.num_tokens)


def metrics(size: Size) -> Work:
    """``rollout_metrics``."""
    batch = make_batch(size)
    return Work(lambda: rollout_metrics(batch, lambda tensor: tensor, lambda tensor: tensor), batch.num_tokens)


def rows(size: Size) -> Work:
    """``completion_rows``, advantages among them."""
    batch = make_batch(size, texts=True)
    return Work(lambda: completion_rows(batch, 1), batch.num_tokens)


def parquet(size: Size) -> Work:
    """``write_parquet`` of these rows."""
    batch = make_batch(size, texts=True)
    made, path = completion_rows(batch, 1), Path(tempfile.mkdtemp()) / "rows.parquet"

    def run() -> None:
        write_parquet(made, path)
        path.unlink()

    return Work(run, batch.num_tokens)


def trivial_reward(completion: str) -> float:
    """A sync one, which runs in worker processes."""
    return float(len(completion) % 2)


async def trivial_async_reward(completion: str) -> float:
    """An async one, which runs on the event loop."""
    return float(len(completion) % 2)


def rewards(size: Size, function: Callable[..., Any]) -> Work:
    """``RewardRunner.score`` on a tenth of the completions, with one worker, which has been started."""
    few = Size(max(size.num_prompts // CALLS_SHARE, 1) * SAMPLES_PER_PROMPT, size.num_tokens)
    batch = make_batch(few, texts=True)
    runner = RewardRunner([function], num_workers=1)
    runner.score(batch.prompts[:1], batch.completions[:1])
    return Work(lambda: runner.score(batch.prompts, batch.completions), batch.num_tokens)


def sync_rewards(size: Size) -> Work:
    """A sync reward function."""
    from host_side import trivial_reward  # a worker can import it, but not this script's __main__

    return rewards(size, trivial_reward)


def async_rewards(size: Size) -> Work:
    """An async reward function."""
    return rewards(size, trivial_async_reward)


PARTS: dict[str, Callable[[Size], Work]] = {
    "vLLM's outputs to messages": engine_messages,
    "messages to completions": trainer_messages,
    "pack": pack,
    "sync rewards, 1 in 10": sync_rewards,
    "async rewards, 1 in 10": async_rewards,
    "metrics": metrics,
    "concatenate one": concatenate_one,
    "concatenate two": concatenate_two,
    "balance, one rank": balance_one_rank,
    "advantages": advantages,
    "cut": cut,
    "select minibatches": select_minibatches,
    "select micro-batches": select_microbatches,
    "completion rows": rows,
    "rows to Parquet": parquet,
}


# Measuring


def measure(part: str, size: Size, repetitions: int) -> dict[str, Any]:
    """Prepare a part and run it; to be called in a process that nothing else is measured in."""
    PARTS[part](Size(2 * SAMPLES_PER_PROMPT, 4)).run()  # imports, and whatever is set up once
    run, num = PARTS[part](size)
    seconds, peak, kept = [], 0, 0
    for _ in range(repetitions):
        before = reset_peak()
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
        peak, kept = max(peak, memory("VmHWM") - before), memory("VmRSS") - before
        del result
    return {"part": part, "size": str(size), "tokens": num, "seconds": seconds, "peak": peak, "kept": kept}


def reset_peak() -> int:
    """Count the peak of resident memory anew; the bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again and not be seen
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, resident, or VmHWM, the most that was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux.")


def serve_measurements() -> None:
    """Measure what standard input asks for, line by line, each in a fork of this process, which has the imports."""
    for line in sys.stdin:
        part, num_completions, num_tokens, repetitions = json.loads(line)
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
            found = executor.submit(measure, part, Size(num_completions, num_tokens), repetitions).result()
        say(json.dumps(found))


class Checkout:
    """A process with the code of a checkout, which measures."""

    def __init__(self, folder: Path) -> None:
        paths = [str(folder.resolve()), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ | variables | {"VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, part: str, size: Size, repetitions: int) -> dict[str, Any]:
        """See :func:`measure`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([part, *size, repetitions]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"'{part}' at {size} failed.")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


# Telling


def summarise(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A part's line, from its measurements by size."""
    last = measured[-1]
    ns = {f"ns at {one['size']}": min(one["seconds"]) / one["tokens"] * 1e9 for one in measured}
    return {
        "part": last["part"],
        **ns,
        "growth": ns[f"ns at {last['size']}"] / ns[f"ns at {measured[0]['size']}"],
        "s": f"{min(last['seconds']):.3g} to {max(last['seconds']):.3g}",
        "peak, GiB": last["peak"] / 2**30,
        "peak, B": last["peak"] / last["tokens"],
        "kept, B": last["kept"] / last["tokens"],
    }


def compare(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A part's line in the table of two checkouts."""
    seconds = [min(one["seconds"]) for one in (before, now)]
    row: dict[str, Any] = {"part": now["part"], "before, s": seconds[0], "now, s": seconds[1]}
    row["times faster"] = seconds[0] / seconds[1]
    for what in ("peak", "kept"):
        row[f"{what} before, B"], row[f"{what} now, B"] = before[what] / before["tokens"], now[what] / now["tokens"]
    return row


def parse_size(text: str) -> Size:
    """``10000x1000``."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) % SAMPLES_PER_PROMPT:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not COMPLETIONSxTOKENS with a multiple of {SAMPLES_PER_PROMPT} completions, such as 8000x1000"
        )
    return Size(*map(int, numbers))


def main() -> None:
    """Measure every part at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["10000x1000", "30000x1000", "100000x1000"]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[*map(parse_size, sizes)], help=" ".join(sizes))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="all")
    parser.add_argument("--repetitions", type=int, default=3, help="of each part at each size (3)")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/host_side"), help="gets tables")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_measurements()
        return
    checkouts = {"now": Checkout(Path(__file__).parent.parent)}
    if arguments.before is not None:
        checkouts = {"before": Checkout(arguments.before), **checkouts}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for part in arguments.parts:
        for size in arguments.sizes:
            for name, checkout in checkouts.items():
                found[name].append(checkout.measure(part, size, arguments.repetitions))
    for checkout in checkouts.values():
        checkout.close()
    arguments.out.mkdir(parents=True, exist_ok=True)
    everything = [{"code": name} | one for name, measured in found.items() for one in measured]
    write_csv(arguments.out / "measurements.csv", everything)
    num = len(arguments.sizes)
    by_part = {name: [m[i : i + num] for i in range(0, len(m), num)] for name, m in found.items()}
    if arguments.before is None:
        table = [summarise(measured) for measured in by_part["now"]]
    else:
        table = [compare(b[-1], n[-1]) for b, n in zip(by_part["before"], by_part["now"], strict=True)]
    finish(arguments, table)


if __name__ == "__main__":
    main()
