"""What host_side.py measures: each thing that the host does with the completions of a step, and what it is given."""

import asyncio
import pickle
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import rewards
import torch
from make_model import make_tokenizer

from rlightning.module.batching import assign_minibatches, balance, split_microbatches
from rlightning.module.metrics import rollout_metrics
from rlightning.objectives import group_advantages
from rlightning.report.trajectories import summary_rows, trajectory_table, write_trajectories
from rlightning.rewards import RewardRunner
from rlightning.rollout.engine import make_samples
from rlightning.rollout.model_files import ModelFiles
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns

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


def make_completions(size: Size, *, texts: bool = False) -> list[list[Sample]]:
    """Completions, a list a prompt, each with arrays of its own and, with ``texts``, four letters a token."""
    random = np.random.default_rng(2)
    ids = random.integers(VOCABULARY, size=3 * size.num_tokens)
    logprobs = -random.random(3 * size.num_tokens, np.float32)
    text = "".join(random.choice(list("abcdefgh "), 12 * size.num_tokens))
    flat = []
    for i, n in enumerate(size.lengths):
        start = i % size.num_tokens
        written = text[4 * start : 4 * (start + n)] if texts else ""
        arrays = (array("q", ids[start : start + n].tobytes()), array("f", logprobs[start : start + n].tobytes()))
        flat.append(Sample(*arrays, array("i", [0]) * n, written, "length" if i % 2 else "stop"))
    return [flat[first : first + SAMPLES_PER_PROMPT] for first in range(0, len(flat), SAMPLES_PER_PROMPT)]


def make_batch(size: Size, *, texts: bool = False) -> RolloutBatch:
    """A batch with rewards of 0, 1 and 2, and advantages."""
    batch = RolloutBatch.pack(single_turns(make_prompts(size), make_completions(size, texts=texts)))
    batch.rewards = (torch.arange(batch.num_trajectories) * 7 % 3).float()
    batch.scores = {"even": batch.rewards}
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
            flat = SimpleNamespace(logprobs=one.logprobs.tolist(), start_indices=starts)
            arrays = {"token_ids": one.token_ids.tolist(), "logprobs": flat}
            texts = {"text": one.text, "finish_reason": one.finish_reason}
            outputs.append(SimpleNamespace(**texts, **arrays, stop_reason=None))
        requests.append(SimpleNamespace(outputs=outputs, num_cached_tokens=0))
    return requests


# The parts


def engine_messages(size: Size) -> Work:
    """In the engine's process: vLLM's outputs to pickled messages."""
    from rlightning.rollout.vllm.server import VLLMServer  # imports vLLM, which no other part needs

    requests = make_outputs(size)

    class Engine:
        vllm_config = SimpleNamespace(lora_config=None)

        async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
            return Collector(requests[int(request_id) % len(requests)])

    class Collector:
        def __init__(self, output: Any) -> None:
            self.output = output

        async def get(self) -> Any:
            return self.output

    async def serve() -> None:
        server: Any = VLLMServer(Engine())  # type: ignore[arg-type]
        server.versions.activate(0, ())
        for _ in range(size.num_prompts):
            outputs = await server.generate([1], {"n": SAMPLES_PER_PROMPT})
            pickle.dumps((1, "ok", outputs), pickle.HIGHEST_PROTOCOL)

    return Work(lambda: asyncio.run(serve()), sum(size.lengths))


def trainer_messages(size: Size) -> Work:
    """In the trainer's process: messages to completions, with their texts."""
    messages, files = [], ModelFiles(make_tokenizer(), (), {})
    some = Size(min(size.num_completions, NUM_REQUESTS * SAMPLES_PER_PROMPT), size.num_tokens)
    for group in make_completions(some, texts=True):
        fields = ("token_ids", "logprobs", "weight_versions")
        outputs = [{name: np.asarray(getattr(one, name)) for name in fields} | {"end": None} for one in group]
        messages.append(pickle.dumps((1, "ok", outputs), pickle.HIGHEST_PROTOCOL))

    def read() -> list[list[Sample]]:
        read = (pickle.loads(messages[i % len(messages)]) for i in range(size.num_prompts))
        return [make_samples(files, [1], outputs) for _, _, outputs in read]

    return Work(read, sum(size.lengths))


def pack(size: Size) -> Work:
    """``RolloutBatch.pack``."""
    prompts, completions = make_prompts(size), make_completions(size)
    groups = single_turns(prompts, completions)
    return Work(lambda: RolloutBatch.pack(groups), RolloutBatch.pack(groups).num_tokens)


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


def cut(size: Size) -> Work:
    """``split_minibatches`` and ``split_microbatches``: who goes where, without moving anything."""
    lengths = size.lengths

    def run() -> None:
        assign_minibatches(size.num_prompts, NUM_MINIBATCHES, seed=0)
        split_microbatches(lengths, MICROBATCH_TOKENS)

    return Work(run, sum(lengths))


def select_minibatches(size: Size) -> Work:
    """``select`` of each of four minibatches, one at a time."""
    batch = make_batch(size)

    def run() -> None:
        for dealt in assign_minibatches(size.num_prompts, NUM_MINIBATCHES, seed=0)[0]:
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
    """``summary_rows``, advantages among them."""
    batch = make_batch(size, texts=True)
    return Work(lambda: summary_rows(batch, 1), batch.num_tokens)


def parquet(size: Size) -> Work:
    """``write_trajectories`` of the batch's table."""
    batch = make_batch(size, texts=True)
    made, path = trajectory_table(batch, 1), Path(tempfile.mkdtemp()) / "rows.parquet"

    def run() -> None:
        write_trajectories(made, path)
        path.unlink()

    return Work(run, batch.num_tokens)


def score(size: Size, function: Callable[..., Any]) -> Work:
    """``RewardRunner.score`` on a tenth of the completions, with one worker, which has been started."""
    few = Size(max(size.num_prompts // CALLS_SHARE, 1) * SAMPLES_PER_PROMPT, size.num_tokens)
    batch = make_batch(few, texts=True)
    runner = RewardRunner([function], num_workers=1)
    runner.score(batch.trajectories[:1])
    return Work(lambda: runner.score(batch.trajectories), batch.num_tokens)


def sync_rewards(size: Size) -> Work:
    """A sync reward function."""
    return score(size, rewards.trivial_reward)


def async_rewards(size: Size) -> Work:
    """An async reward function."""
    return score(size, rewards.trivial_async_reward)


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
