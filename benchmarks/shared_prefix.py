"""Forward and backward over groups whose completions share their prompt: each sequence alone, and the prompt once.

    python benchmarks/shared_prefix.py
    python benchmarks/shared_prefix.py --model 4b --cases 8192x8x1024 --groups 2 --checkpointing
    python benchmarks/shared_prefix.py --device cpu --model tiny --cases 256x4x32 --microbatch-tokens 2048

A case is prompt tokens x completions x completion tokens. Micro-batches are cut as an update cuts them, by
--microbatch-tokens; attention, memory and seconds are those of an update without its optimizer's step. W, the last
case, has prompts too short to be shared: there the two rows should not differ. Medians of the passes after the first.
"""

import sys
import time
from statistics import median
from typing import Any

import numpy as np
from launch import BENCHMARKS, benchmark_parser, finish, format_table, prepare, say
from synthetic import count_graphs

CASES = ("8192x8x1024", "16384x8x1024", "100x8x1024")


def make_sequences(case: str, num_groups: int, vocabulary: int) -> list[list[int]]:
    """Random tokens, of which those of a group begin alike."""
    num_prompt, num_completions, num_new = (int(number) for number in case.split("x"))
    rng = np.random.default_rng(0)
    sequences: list[list[int]] = []
    for _ in range(num_groups):
        prompt = rng.integers(vocabulary, size=num_prompt).tolist()
        sequences += [[*prompt, *rng.integers(vocabulary, size=num_new).tolist()] for _ in range(num_completions)]
    return sequences


def measure(arguments: Any, module: Any, case: str, *, is_shared: bool) -> dict[str, Any]:
    """Seconds and memory of forward and backward over all groups of a case."""
    import torch
    from probes import reset_peak

    from rlightning.models import packed_logprobs
    from rlightning.parallel.device import memory_use, synchronize
    from rlightning.types import RolloutBatch

    num_prompt = int(case.split("x")[0])
    batch = RolloutBatch.of_sequences(make_sequences(case, arguments.groups, module.vocab_size))
    starts = batch.to_tokens(batch.cu_seqlens[:-1], axis="N")
    batch.is_sampled = torch.arange(batch.num_tokens) - starts >= num_prompt
    batch.shares_prefixes = is_shared
    device, seconds, computed = module.device, [], 0

    def run() -> int:
        computed = 0
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for sequences in module.split_microbatches(batch, arguments.microbatch_tokens):
                microbatch = module.to_microbatch(batch, sequences)
                logprobs, _ = packed_logprobs(module.loaded_actor, microbatch)
                logprobs.mean().backward()
                computed += microbatch.num_tokens if microbatch.shared is None else microbatch.shared.unique.numel()
        synchronize(device)
        module.loaded_actor.zero_grad()
        return computed

    reset_peak(device)
    for _ in range(arguments.steps):
        synchronize(device)
        begun = time.perf_counter()
        computed = run()
        seconds.append(time.perf_counter() - begun)
    if arguments.profile:
        with torch.profiler.profile() as profile:
            run()
        order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        name = f"operations-{case}-{'once' if is_shared else 'each'}.txt"
        (arguments.out / name).write_text(profile.key_averages().table(sort_by=order, row_limit=25))
    use = memory_use(device)
    return {
        "case": case,
        "prefix": "once" if is_shared else "each",
        "s": median(seconds[1:]),
        "tokens": batch.num_tokens,
        "computed": computed,
        "peak, GiB": use.peak / 2**30 if use else None,
        "graphs": count_graphs(),
    }


def main() -> None:
    """Measure each case both ways."""
    parser = benchmark_parser(__doc__ or "", "shared_prefix", steps=4)
    parser.add_argument("--cases", nargs="+", default=CASES, help="prompt x completions x new tokens")
    parser.add_argument("--groups", type=int, default=4, help="of a case (4)")
    parser.add_argument("--microbatch-tokens", type=int, default=32768, help="of a micro-batch (32768)")
    parser.add_argument("--checkpointing", action="store_true", help="compute each layer's activations twice")
    parser.add_argument("--profile", action="store_true", help="write each row's operations by time")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first does not count, at least 2 are needed")
    prepare(arguments)
    sys.path[:0] = [str(BENCHMARKS.parent)]
    from rlightning.algorithms import GRPO

    module = GRPO(
        arguments.model,
        rewards="synthetic.coin",
        compile=arguments.device == "cuda",
        gradient_checkpointing=arguments.checkpointing,
    )
    module.configure_model()
    module.to(arguments.device)
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        for is_shared in (False, True):
            rows.append(measure(arguments, module, case, is_shared=is_shared))
            rows[-1]["x each"] = rows[-1]["s"] / rows[-1 - is_shared]["s"]
            say(format_table(rows).splitlines()[-1])
    finish(arguments, rows)


if __name__ == "__main__":
    main()
