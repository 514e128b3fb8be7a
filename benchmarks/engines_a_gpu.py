"""Tokens/s of one or several vLLM engines that share a GPU and the same work.

    python benchmarks/engines_a_gpu.py --engines 1 2 3
    python benchmarks/engines_a_gpu.py --scheduler vllm rlightning

An engine samples a token for all of its sequences in a step, and its core, a Python process, has work to do for each of
them. Where the core takes longer than the GPU, the GPU waits, and two engines with half of the sequences each may
be faster than one. --sequences prompts of 128 tokens are completed by --max-new-tokens each, with log-probabilities as
rlightning asks for them; the engines begin together, and the time is that until the last has ended. A core's scheduler
is vLLM's own or rlightning's (rlightning/rollout/vllm/scheduler.py).

Prints one table: the best of --repetitions.
"""

import argparse
import json
import os
import signal
import time
from contextlib import suppress
from itertools import product
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

from launch import PROMPT_TOKENS, benchmark_parser, finish, prepare, say

SCHEDULERS = {"vllm": None, "rlightning": "rlightning.rollout.vllm.scheduler.make_scheduler"}


def serve(
    arguments: argparse.Namespace, scheduler: str, share: int, cache_bytes: int, begin: Any, end: Any, offset: int
) -> None:
    """An engine in a process of its own: its part of the work, as often as is asked for."""
    os.setsid()
    try:
        work(arguments, scheduler, share, cache_bytes, begin, end, offset)
    except BaseException:
        begin.abort()  # nobody is to wait for this engine
        end.abort()
        raise


def work(
    arguments: argparse.Namespace, scheduler: str, share: int, cache_bytes: int, begin: Any, end: Any, offset: int
) -> None:
    """Start the engine and complete the prompts, with the others."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    is_cuda = arguments.device == "cuda"
    engine = LLM(
        arguments.model,
        dtype="bfloat16" if is_cuda else "float32",
        max_model_len=PROMPT_TOKENS + arguments.max_new_tokens,
        max_num_seqs=share,
        kv_cache_memory_bytes=cache_bytes,
        enforce_eager=not is_cuda,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        scheduler_cls=SCHEDULERS[scheduler],
        **arguments.engine,
    )
    params = SamplingParams(
        max_tokens=arguments.max_new_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = [{"prompt_token_ids": [1 + (offset + i) // 8 % 200] * PROMPT_TOKENS} for i in range(share)]
    engine.generate(prompts[:8], params, use_tqdm=False)
    for _ in range(arguments.repetitions):
        begin.wait()
        engine.generate(prompts, params, use_tqdm=False)
        end.wait()


def measure(arguments: argparse.Namespace, scheduler: str, num_engines: int) -> dict[str, Any]:
    """One line."""
    context = get_context("spawn")
    begin, end = context.Barrier(num_engines + 1), context.Barrier(num_engines + 1)
    share = -(-arguments.sequences // num_engines)
    cache = int(arguments.cache_gib * 2**30) // num_engines
    engines = [
        context.Process(target=serve, args=(arguments, scheduler, share, cache, begin, end, i * share))
        for i in range(num_engines)
    ]
    for engine in engines:
        engine.start()
    best, end_of_it = float("inf"), "ok"
    try:
        for _ in range(arguments.repetitions):
            begin.wait(arguments.timeout)
            started = time.perf_counter()
            end.wait(arguments.timeout)
            best = min(best, time.perf_counter() - started)
    except BrokenBarrierError:
        end_of_it = f"an engine failed (see its output), or took longer than --timeout {arguments.timeout:g}"
    finally:
        for engine in engines:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid or 0, signal.SIGKILL)  # with its core
            engine.join()
    tokens = num_engines * share * arguments.max_new_tokens
    return {
        "scheduler": scheduler,
        "engines": num_engines,
        "sequences": share,
        "s": best if end_of_it == "ok" else None,
        "tokens/s": tokens / best if end_of_it == "ok" else None,
        "end": end_of_it,
    }


def main() -> None:
    """Measure each number of engines with each scheduler."""
    parser = benchmark_parser(__doc__ or "", "engines_a_gpu", steps=0)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="that share the GPU (1 2)")
    parser.add_argument(
        "--scheduler", nargs="+", choices=SCHEDULERS, default=["rlightning"], help="of the cores (rlightning)"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's engine ({})"
    )
    parser.add_argument("--sequences", type=int, default=512, help="of all engines (512)")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of each (1024)")
    parser.add_argument("--cache-gib", type=float, default=70.0, help="KV cache of all engines (70)")
    parser.add_argument("--repetitions", type=int, default=2, help="of which the best counts (2)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds to wait for a start or an end (240)")
    arguments = parser.parse_args()
    prepare(arguments)
    rows = []
    for scheduler, num_engines in product(arguments.scheduler, arguments.engines):
        rows.append(measure(arguments, scheduler, num_engines))
        say(str(rows[-1]))
    finish(arguments, rows)


if __name__ == "__main__":
    main()
