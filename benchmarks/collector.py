"""What rank 0's collector computes for a trajectory, without engines: the limit of a run's trajectories a second.

    python benchmarks/collector.py --prompts 64 512 --max-new-tokens 512

A sampler that has its samples already takes the engines' place. "collect" is the CPU time of the process from a prompt
to its trajectories, "pack" that of pickling them for their ranks, "unpack" that of a rank that receives them; "KB" is
what is sent. What comes from engines of other processes has to be read too, which is not in it. On a CPU; medians of
rounds.
"""

import argparse
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

ROUNDS = 5


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


def measure(num_prompts: int, num_samples: int, num_tokens: int) -> dict[str, Any]:
    """One round's seconds of CPU time, and the bytes."""
    from rlightning.environments.collector import Collector, rare_garbage_collection
    from rlightning.environments.runner import EnvironmentRunner
    from rlightning.rollout import Sampling
    from rlightning.rollout.in_flight import InFlight
    from rlightning.types import Prompt

    sampler = ReadySampler([make_samples(num_tokens, num_samples) for _ in range(num_prompts)])
    runner = EnvironmentRunner(sampler, make_tokenizer(), max_length=PROMPT_TOKENS + num_tokens)
    collector = Collector(runner, InFlight(0), NoWeights())
    prompts = [(Prompt(i, "x" * PROMPT_TOKENS, list(range(PROMPT_TOKENS)), {}), 0) for i in range(num_prompts)]
    try:
        groups, collect = cpu_seconds(
            lambda: collector.generate(prompts, num_samples, Sampling(max_new_tokens=num_tokens), None)
        )
    finally:
        collector.close()
    with rare_garbage_collection():  # as in the collector, which packs and unpacks
        data, pack = cpu_seconds(lambda: pickle.dumps(groups, pickle.HIGHEST_PROTOCOL))
        _, unpack = cpu_seconds(lambda: pickle.loads(data))
    return {"collect": collect, "pack": pack, "unpack": unpack, "bytes": len(data)}


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
        collect, pack, unpack, size = (median(one[name] for one in rounds) for name in rounds[0])
        row = {"trajectories": count, "tokens": arguments.max_new_tokens}
        row |= {
            "collect, us": 1e6 * collect / count,
            "pack, us": 1e6 * pack / count,
            "unpack, us": 1e6 * unpack / count,
        }
        rows.append(row | {"KB": size / count / 1e3, "trajectories/s": count / (collect + pack)})
    finish(arguments, rows)


if __name__ == "__main__":
    main()
