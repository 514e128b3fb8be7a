"""The update alone, without an engine: seconds, tokens/s, MFU and memory of one or more variants, and profiles of them.

    python benchmarks/update.py --model 0.6b 1.7b --microbatch-tokens 16384 32768
    python benchmarks/update.py --try compile=false "gradient_checkpointing=true trainer.precision=bf16-true" --profile
    python benchmarks/update.py --tokens 131072 --try "" compile=false -- --model.entropy_coef 0.01
    python benchmarks/update.py --alike 0 0.5
    python benchmarks/update.py --without "" flash_attn

A run is `rlightning fit` as it is, but that completions of random tokens take the engine's place. Every combination of
--model, --strategy, --microbatch-tokens, --alike, --without and --try is a variant; --alike is the share of groups
whose rewards are all equal, which an update skips; --without names a package that cannot be imported, as if it were
not installed; a --try is a list of KEY=VALUE, where a key without a section is one of the algorithm's. All are forks
of one process, which has done the imports. A variant starts when the one before has ended, has a log of its own, and
may fail. A step is 60 prompts x 8 completions x (128 + 1,024) tokens, or 553,000 tokens; with --variable each
completion ends at random, and there are as many as make --tokens.

Prints a line a variant when it is done, and at last the table: medians of the updates after the warm-up, in which the
device was waited for. "MFU" and "MFU, 6N" are defined in docs/performance.md. "graphs" is how many torch.compile has
made, "later" how many of them after the warm-up, which should be none: the reasons are in the variant's run.log. With
--profile two further, shorter updates are profiled: `kernels.md` has the kernels by time and the GPU's idle gaps,
`host.txt` the operations; `kernels.json.gz` and `host.json.gz` are for https://ui.perfetto.dev.
"""

import argparse
import ctypes
import itertools
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from kernels import describe, read_trace
from launch import (
    BENCHMARKS,
    GIB,
    PROMPT_TOKENS,
    Job,
    Run,
    benchmark_parser,
    callback,
    finish,
    fit,
    format_table,
    grpo_config,
    prepare,
    say,
    write_run,
)

SAMPLES = 8
PROFILED_MICROBATCHES = 3
PR_SET_PDEATHSIG = 1
"""Linux's number for: send me a signal when my parent ends."""
NO_FORK = ("Cannot re-initialize CUDA in forked subprocess", "CUDA error: initialization error")
"""What CUDA says in a fork of a process that has used it."""


def make_job(arguments: argparse.Namespace, name: str, strategy: str, microbatch_tokens: int, alike: float) -> Job:
    """One variant, but for the options that it tries."""
    from synthetic import mean_length

    tokens = PROMPT_TOKENS + mean_length(arguments.max_new_tokens, is_variable=arguments.variable)
    num_profiled = 2 if arguments.profile else 0
    steps = arguments.steps + num_profiled
    callbacks = [
        callback(
            "synthetic.SyntheticRollout",
            max_new_tokens=arguments.max_new_tokens,
            is_variable=arguments.variable,
            short_steps=num_profiled,
            short_tokens=PROFILED_MICROBATCHES * microbatch_tokens,
        ),
        callback("synthetic.SetRewards", alike=alike),
        callback("synthetic.UpdateTrace"),
    ]
    if arguments.profile:
        callbacks += [
            callback("synthetic.ProfileUpdate", step=steps - 1, name="kernels", has_host=False),
            callback("synthetic.ProfileUpdate", step=steps, name="host", has_host=True),
        ]
    config = grpo_config(
        arguments,
        prompts_per_step=max(round(arguments.tokens / tokens / SAMPLES), 1),
        samples_per_prompt=SAMPLES,
        model={
            "max_tokens_per_microbatch": microbatch_tokens,
            "rewards": ["synthetic.coin"],
            "validate_first": False,
            "kl_coef": 0.0,
        },
        callbacks=callbacks,
    )
    config["rollout"] = None
    config["trainer"] |= {"max_steps": steps, "strategy": strategy, "enable_progress_bar": False}
    return Job(name, config)


def write_options(tried: str) -> list[str]:
    """A --try as options of `rlightning fit`."""
    pairs = shlex.split(tried)
    return [f"--{pair}" if "." in pair.partition("=")[0] else f"--model.{pair}" for pair in pairs]


def fork(work: Callable[[], None], log: Path, timeout: float) -> int:
    """Do a piece of work in a fork of this process, which must not have used the GPU.

    Args:
        work: what to do.
        log: gets what it writes.
        timeout: seconds after which it is killed, with the processes that it has started.

    Returns:
        Its exit code; 124 if it took too long.
    """

    def main() -> None:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process be killed, the GPU gets free
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                work()
            except Exception:
                traceback.print_exc()
                sys.exit(1)
            finally:
                sys.stdout.flush()

    process = get_context("fork").Process(target=main)
    process.start()
    try:
        process.join(max(timeout, 1.0))
        exit_code = 124 if process.is_alive() else process.exitcode
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return exit_code if exit_code is not None else 1


def fork_fit(arguments: argparse.Namespace, job: Job, timeout: float, without: str) -> Run:
    """Fit a job in a fork, in a folder of its own below ``--out``, without a package if one is named."""
    folder, command = write_run(arguments, job)

    def work() -> None:
        if without:
            sys.modules[without] = None  # Python's own way to have its import fail
        from rlightning.cli.lightning_cli import RLCLI

        RLCLI(command)

    begun = time.perf_counter()
    exit_code = fork(work, folder / "run.log", timeout)
    return Run(job, folder, exit_code, time.perf_counter() - begun)


def run_variant(arguments: argparse.Namespace, job: Job, timeout: float, without: str) -> Run:
    """Fit a job in a fork; in a process of its own, where a library used the GPU before there were forks.

    That one has all packages, so a variant without one fails there.
    """
    run = fork_fit(arguments, job, timeout, without)
    if not without and run.exit_code and any(reason in run.read_log() for reason in NO_FORK):
        return fit(job, arguments, [0])
    return run


def summarise(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """The numbers of a variant's line; None where it did not come so far."""
    updates = run.read_trace("update")[: arguments.steps]
    counted = updates[arguments.warm_up :]
    rows = [{name: float(value) for name, value in row.items() if value} for row in counted]
    seconds = [row["seconds"] for row in rows]
    graphs = [int(row["graphs"]) for row in updates]

    def middle(name: str) -> float | None:
        return median(row[name] for row in rows) if rows and name in rows[0] else None

    def most(name: str) -> float | None:
        return max(row[name] for row in rows) / GIB if rows else None

    return {
        "update, s": middle("seconds"),
        "min": min(seconds, default=None),
        "tokens/s": median(row["tokens"] / row["seconds"] for row in rows) if rows else None,
        "MFU": middle("mfu"),
        "MFU, 6N": middle("six_n_mfu"),
        "peak, GiB": most("peak"),
        "reserved": most("reserved"),
        "graphs": graphs[-1] if graphs else None,
        "later": graphs[-1] - graphs[arguments.warm_up - 1] if rows else None,
        "first, s": float(updates[0]["seconds"]) if updates else None,
        "run, s": run.seconds,
        "end": run.end,
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    usual: dict[str, Any] = {"model": ["0.6b"], "microbatch_tokens": [32768], "max_new_tokens": 1024, "warm_up": 2}
    parser = benchmark_parser(__doc__ or "", "update", steps=5, **usual)
    parser.add_argument("--strategy", nargs="+", default=["auto"], help="auto, fsdp2 (auto)")
    parser.add_argument("--alike", type=float, nargs="+", default=[0.0], help="share of groups to skip (0)")
    parser.add_argument("--try", nargs="+", default=[""], dest="tries", metavar="KEYS", help="see above")
    parser.add_argument("--without", nargs="+", default=[""], metavar="PACKAGE", help="that is not installed (none)")
    parser.add_argument("--tokens", type=int, default=551000, help="a step, about (551000)")
    parser.add_argument("--variable", action="store_true", help="completions end at random")
    parser.add_argument("--profile", action="store_true", help="two further, shorter steps")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one variant (300)")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of all: what is late is left out (570)")
    arguments = parser.parse_args()
    if not 0 < arguments.warm_up < arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up} of --steps {arguments.steps}: at least one step each is needed")
    return arguments


def main() -> None:
    """Run the variants."""
    arguments = parse_arguments()
    deadline = time.monotonic() + arguments.limit
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(BENCHMARKS.parent)]
    # The second counts GPUs without using them, after which there could be no forks.
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    import torch._dynamo  # noqa: F401  before the forks, as the next two
    from transformers import Qwen3ForCausalLM  # noqa: F401

    import rlightning.cli.lightning_cli  # noqa: F401

    rows: list[dict[str, Any]] = []
    lists = [arguments.model, arguments.strategy, arguments.microbatch_tokens, arguments.alike]
    lists += [arguments.without, arguments.tries]
    for number, chosen in enumerate(itertools.product(*lists), start=1):
        model, strategy, microbatch_tokens, alike, without, tried = chosen
        named = argparse.Namespace(**vars(arguments) | {"model": model})
        prepare(named)
        named.options = [*arguments.options, *write_options(tried)]
        job = make_job(named, str(number), strategy, microbatch_tokens, alike)
        variant = {"model": Path(model).name, "strategy": strategy, "micro-batch": microbatch_tokens}
        variant |= {"alike": alike, "without": without, "tried": tried}
        left = deadline - time.monotonic()
        if left < 20:
            say(f"{number}: {variant} is left out, as --limit is over")
            continue
        run = run_variant(named, job, min(arguments.timeout, left), without)
        rows.append(variant | summarise(run, arguments))
        seconds, first = rows[-1]["update, s"], rows[0]["update, s"]
        rows[-1]["x first"] = seconds / first if seconds and first else None
        say(format_table(rows).splitlines()[-1])
        for path in run.folder.glob("kernels.json.gz"):
            text = describe(read_trace(path))
            (run.folder / "kernels.md").write_text(text)
            say(text)
    finish(arguments, rows)


if __name__ == "__main__":
    main()
