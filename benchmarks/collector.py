"""What rank 0's collector computes for a trajectory, without engines: the limit of a run's trajectories a second.

    python benchmarks/collector.py --prompts 64 512 --max-new-tokens 512

A sampler that has its samples already takes the engines' place. "collect" is the CPU time of the process from a prompt
to its trajectories by the environment SingleTurn, of the rounds "least" to "most"; "sampler alone" that of the same
requests and trajectories without environments and collector. "pack" is that of pickling them for their ranks, "unpack"
that of a rank that receives them; "KB" is what is sent. What comes from engines of other processes has to be read too,
which is not in it. On a CPU; medians of rounds.
"""

import argparse
import asyncio
import pickle
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from launch import BENCHMARKS, PROMPT_TOKENS, Rows, finish
from make_model import make_tokenizer

ROUNDS = 9


def make_samples(num_tokens: int, count: int) -> list[Any]:
    """Samples of one prompt."""
    from rlightning.types import Sample

    return [
        Sample(
            token_ids=array("q", range(num_tokens)),
            logprobs=array("f", [-1.0]) * num_tokens,
            weight_versions=array("i", [0]) * num_tokens,
            text="x" * num_tokens,
            finish_reason="length",
        )
        for _ in range(count)
    ]


class ReadySampler:
    """Answers each request at once.

    Args:
        groups: of samples, one a request.
    """

    def __init__(self, groups: Sequence[list[Any]]) -> None:
        self.groups = iter(groups)

    async def sample(self, token_ids: Any, sampling: Any, **settings: Any) -> list[Any]:
        """The next group."""
        return next(self.groups)


class NoWeights:
    """Weights that are never sent."""

    def sync_weights(self) -> None:
        """Called when they would be."""

    def needs_sync(self) -> bool:
        """Never."""
        return False


def cpu_seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """What a piece of work returns, and the CPU time of the process."""
    begun = process_time()
    return work(), process_time() - begun


async def sample_alone(sampler: ReadySampler, prompts: Sequence[Any], sampling: Any) -> list[list[Any]]:
    """The trajectories of prompts, one request each, without an environment."""
    from rlightning.types.trajectory import single_turns

    samples = await asyncio.gather(*(sampler.sample(prompt.token_ids, sampling) for prompt in prompts))
    return single_turns(prompts, samples)


def measure(num_prompts: int, num_samples: int, num_tokens: int) -> dict[str, Any]:
    """One round's seconds of CPU time, and the bytes."""
    from rlightning.environments.collector import rare_garbage_collection
    from rlightning.rollout import Sampling
    from rlightning.rpc.client import LoopThread
    from rlightning.types import Prompt

    prompts = [Prompt(i, "x" * PROMPT_TOKENS, list(range(PROMPT_TOKENS)), {}) for i in range(num_prompts)]
    sampling = Sampling(max_new_tokens=num_tokens)

    def make_sampler() -> ReadySampler:
        return ReadySampler([make_samples(num_tokens, num_samples) for _ in range(num_prompts)])

    # Once more than is measured: whichever comes first in a round pays for the process's memory.
    collect_groups(make_sampler(), prompts, num_samples, sampling)
    sampler, loop = make_sampler(), LoopThread("alone")  # a thread, as in the collector: it has memory of its own
    with rare_garbage_collection():  # as in the collector, which packs and unpacks
        _, alone = cpu_seconds(lambda: loop.run(sample_alone(sampler, prompts, sampling)))
    loop.close()
    groups, collect = collect_groups(make_sampler(), prompts, num_samples, sampling)
    with rare_garbage_collection():
        data, pack = cpu_seconds(lambda: pickle.dumps(groups, pickle.HIGHEST_PROTOCOL))
        _, unpack = cpu_seconds(lambda: pickle.loads(data))
    return {"collect": collect, "alone": alone, "pack": pack, "unpack": unpack, "bytes": len(data)}


def collect_groups(sampler: Any, prompts: Sequence[Any], num_samples: int, sampling: Any) -> tuple[Any, float]:
    """The trajectories of prompts by a collector, and the CPU time."""
    from rlightning.environments.collector import Collector
    from rlightning.environments.runner import EnvironmentRunner
    from rlightning.rollout.in_flight import InFlight

    runner = EnvironmentRunner(sampler, make_tokenizer(), max_length=PROMPT_TOKENS + sampling.max_new_tokens)
    collector = Collector(runner, InFlight(0), NoWeights())
    try:
        return cpu_seconds(lambda: collector.generate([(one, 0) for one in prompts], num_samples, sampling, None))
    finally:
        collector.close()


def main() -> None:
    """Measure each number of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="at once (64 512)")
    parser.add_argument("--samples", type=int, default=8, help="of each (8)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of each completion (512)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/collector"), help="gets the tables")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(BENCHMARKS.parent)]
    rows: Rows = []
    for num_prompts in arguments.prompts:
        rounds = [measure(num_prompts, arguments.samples, arguments.max_new_tokens) for _ in range(ROUNDS)]
        count = num_prompts * arguments.samples
        collect, alone, pack, unpack, size = (median(one[name] for one in rounds) for name in rounds[0])
        row = {"trajectories": count, "tokens": arguments.max_new_tokens}
        row |= {
            "collect, us": 1e6 * collect / count,
            "least": 1e6 * min(one["collect"] for one in rounds) / count,
            "most": 1e6 * max(one["collect"] for one in rounds) / count,
            "sampler alone, us": 1e6 * alone / count,
            "pack, us": 1e6 * pack / count,
            "unpack, us": 1e6 * unpack / count,
        }
        rows.append(row | {"KB": size / count / 1e3, "trajectories/s": count / (collect + pack)})
    finish(arguments, rows)


if __name__ == "__main__":
    main()
