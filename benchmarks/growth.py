"""How a step's cost grows with the tokens of a sequence and with the sequences of a step, phase by phase.

    python benchmarks/growth.py
    python benchmarks/growth.py --lengths 1024 4096 --sequences 64 256 --repeats 2

One run on one GPU, whose engine and trainer are set up for the largest size; each step has a size of its own: first the
fewest sequences at every length, then more sequences at the shortest. A length is a prompt of 128 tokens and its
completion. Two steps of the first size warm up.

Prints microseconds a token by phase, which are level where cost is linear. "update grows" is the update's cost a token
over that of the first size; "by attention" is how it would grow if every operation took the same time: attention's
products grow with the square of the length, the rest is linear. "KV cache" is what all sequences at their full length
need at once: what goes beyond the engine's share has to wait.
"""

from statistics import median
from typing import Any

from launch import (
    GIB,
    PHASES,
    PROMPT_TOKENS,
    RUN_TIMEOUT,
    Job,
    Rows,
    Run,
    benchmark_parser,
    callback,
    finish,
    fit,
    grpo_config,
    prepare,
)

WARM_UP = 2


def plan_sizes(lengths: list[int], sequences: list[int]) -> list[tuple[int, int]]:
    """Sequences a step and tokens of each: a cross that meets in the smallest."""
    first = [(min(sequences), length) for length in sorted(lengths)]
    return first + [(count, min(lengths)) for count in sorted(sequences) if count > min(sequences)]


def cache_bytes(config: Any, tokens: int) -> int:
    """Of keys and values in the engine, in its usual dtype of 2 bytes."""
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return int(2 * 2 * config.num_hidden_layers * heads * size * tokens)


def summarise(run: Run, sizes: list[tuple[int, int]], model: str) -> Rows:
    """A row a size: medians over its steps."""
    import torch
    from transformers import AutoConfig

    from rlightning.models.counts import sequence_flops

    config = AutoConfig.from_pretrained(model).get_text_config()
    peaks = [row for row in run.read_trace("peaks") if row["phase"] == "update"]
    steps = list(enumerate(run.metrics(), start=1))[WARM_UP:]
    table: Rows = []
    for number, (count, length) in enumerate(sizes):
        chosen = [(step, row) for step, row in steps if (step - WARM_UP - 1) % len(sizes) == number]
        if not chosen:
            continue
        rows = [row for _, row in chosen]
        tokens = [row["throughput/tokens_per_second"] * row["time/step"] for row in rows]

        def cost(name: str, rows: Any = rows, tokens: Any = tokens) -> float:
            return float(
                median(1e6 * row.get(f"time/{name}", 0.0) / num for row, num in zip(rows, tokens, strict=True))
            )

        rest = [row["time/step"] - sum(row.get(f"time/{phase}", 0.0) for phase in PHASES) for row in rows]
        needed = sequence_flops(config, torch.tensor([length]), torch.tensor([length - PROMPT_TOKENS])).item() / length
        allocated = [float(peak["allocated"]) for peak in peaks if int(peak["step"]) in dict(chosen)]
        table.append(
            {
                "sequences": count,
                "tokens each": length,
                "tokens": median(tokens),
                "step, s": median(row["time/step"] for row in rows),
                **{f"{phase}, us": cost(phase) for phase in ("generate", "update", "reward")},
                "sync, s": median(row.get("time/sync", 0.0) for row in rows),
                "other, us": median(1e6 * seconds / num for seconds, num in zip(rest, tokens, strict=True)),
                "update MFU": median(mfu)
                if (mfu := [row.get("throughput/update_mfu", 0.0) for row in rows])[0]
                else None,
                "update grows": cost("update"),
                "by attention": needed,
                "KV cache, GiB": cache_bytes(config, count * length) / GIB,
                "update, GiB": max(allocated, default=0.0) / GIB,
                "steps": len(rows),
            }
        )
    for name in ("update grows", "by attention"):
        first = table[0][name] if table else 1.0
        for line in table:
            line[name] = line[name] / first
    return table


def main() -> None:
    """Run all sizes and tabulate."""
    usual: dict[str, Any] = {"samples": 8, "microbatch_tokens": 32768, "utilization": 0.5}
    parser = benchmark_parser(__doc__ or "", "growth", steps=0, **usual)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens (1024 4096 16384)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024], help="a step (64 256 1024)")
    parser.add_argument("--repeats", type=int, default=1, help="steps of each size (1)")
    parser.add_argument("--limit", type=float, default=RUN_TIMEOUT, help="seconds: what is done by then counts (900)")
    arguments = parser.parse_args()
    if min(arguments.lengths) <= PROMPT_TOKENS:
        parser.error(f"--lengths {min(arguments.lengths)}: prompts have {PROMPT_TOKENS} tokens, so give more than that")
    if any(count % arguments.samples for count in arguments.sequences):
        parser.error(f"--sequences {arguments.sequences}: give multiples of --samples {arguments.samples}")
    sizes = plan_sizes(arguments.lengths, arguments.sequences)
    schedule = [sizes[0]] * WARM_UP + sizes * arguments.repeats
    arguments.steps = len(schedule)
    prepare(arguments)
    config = grpo_config(
        arguments,
        prompts_per_step=max(arguments.sequences) // arguments.samples,
        samples_per_prompt=arguments.samples,
        model={"max_tokens_per_microbatch": arguments.microbatch_tokens, "validate_first": False, "kl_coef": 0.0},
        rollout={
            "max_new_tokens": max(arguments.lengths) - PROMPT_TOKENS,
            "gpu_memory_utilization": arguments.utilization,
        },
        callbacks=[
            callback(
                "synthetic.Schedule",
                sizes=[[count // arguments.samples, length - PROMPT_TOKENS] for count, length in schedule],
            ),
            callback("device_poll.DevicePeaks"),
            callback("EmptyCacheAfterUpdate"),
        ],
    )
    run = fit(Job("run", config), arguments, [0], timeout=arguments.limit)
    rows = summarise(run, sizes, arguments.model)
    end = f"Ended with exit code {run.exit_code} after {len(run.metrics())} steps: {run.folder / 'run.log'}"
    notes = [end] if run.exit_code else []
    finish(arguments, rows, notes)


if __name__ == "__main__":
    main()
