"""What agents cost: a step whose environment waits, the endpoint against direct sampling, and idle sessions.

    python benchmarks/agents.py --model 0.6b
    python benchmarks/agents.py --device cpu --model tiny --prompts 8 --part waiting endpoint
    python benchmarks/agents.py --device cpu --model tiny --part idle --sessions 2000

"waiting": trajectories of --turns turns whose environment takes 0.05 to 2 s a turn (drawn from a seed), the same
without waiting, and two alone. "bound" is the larger of the slowest trajectory (the longest that one waits for its
environment, and what it takes to sample its turns alone) and what all take without waiting: a step cannot take less.
"of wait" leaves the slowest trajectory's own sampling out. Of the trajectory that ended last there is what it waited
for: the environment, the engine, and anything else, such as the trainer's event loop. "endpoint": the same completions
of one turn, sampled by the trainer and by an agent with OpenAI's client, in as many sessions at once and --workers
processes. "idle": agents that ask once in the trainer's process and then do nothing for --idle seconds; the memory that
it has more than at the rollout's begin, and its CPU time, of the seconds in which all were idle.

Prints a table a part; medians of the steps after the first, of "idle" the only step.
"""

import argparse
from statistics import median
from typing import Any

from agent_work import trajectories
from launch import (
    PROMPT_TOKENS,
    Job,
    Rows,
    Run,
    benchmark_parser,
    callback,
    finish,
    fit,
    format_table,
    grpo_config,
    prepare,
    say,
)

PARTS = ("waiting", "endpoint", "idle")
GUESS = "rlightning.environments.StepEnvironment"


def make_job(arguments: argparse.Namespace, name: str, environment: dict[str, Any] | None, **changes: Any) -> Job:
    """A run with an environment, or None: of one turn."""
    options = {"prompts": arguments.prompts, "samples": arguments.samples, "max_new_tokens": arguments.new_tokens}
    options |= changes
    config = grpo_config(
        arguments,
        prompts_per_step=options["prompts"],
        samples_per_prompt=options["samples"],
        model={"validate_first": False},
        rollout={"max_new_tokens": options["max_new_tokens"], "gpu_memory_utilization": 0.4}
        | ({"engine": {"max_model_len": options["max_model_len"]}} if "max_model_len" in options else {}),
        callbacks=[
            callback("agent_work.HostTrace"),
            callback("CompletionsTable", every_n_steps=1, num_console=0, num_logged=0),
        ],
    )
    config["trainer"]["max_steps"] = options.get("steps", arguments.steps)
    if environment is not None:
        config["environment"] = environment
    return Job(name, config)


def waiting_game(arguments: argparse.Namespace, longest: float) -> dict[str, Any]:
    """An environment whose turns take up to so many seconds."""
    game = {"environment": "agent_work.Waits", "arguments": {"num_turns": arguments.turns, "longest": longest}}
    return {"class_path": GUESS, "init_args": game}


def agent(num_workers: int | None, idle: float = 0.0) -> dict[str, Any]:
    """An agent that asks once."""
    settings = {
        "agent": "agent_work.ask_once",
        "arguments": {"idle": idle},
        "max_trajectories": 1 << 16,
        "endpoint": {"max_connections": 1 << 18},
        "num_workers": num_workers,
    }
    return {"class_path": "rlightning.environments.AgentProgram", "init_args": settings}


def generating(run: Run) -> float:
    """Median seconds of a step's generation, after the first."""
    steps = run.metrics()
    return median(row["time/generate"] for row in steps[1:] or steps)


def measure_waiting(arguments: argparse.Namespace) -> Rows:
    """A row: seconds with and without waiting, and their bound."""
    runs = {}
    few = {"prompts": 1, "samples": 2}
    for name, longest, changes in (("waits", 2.0, {}), ("does not wait", 0.0, {}), ("alone", 0.0, few)):
        job = make_job(arguments, name, waiting_game(arguments, longest), **changes)
        runs[name] = fit(job, arguments, [0]).require_success()
    rows = trajectories(runs["waits"].folder)
    rows = [row for row in rows if row["step"] > 1] or rows
    steps = [[row for row in rows if row["step"] == step] for step in {row["step"] for row in rows}]
    longest_wait = median(max(map(waited, step)) for step in steps)
    seconds, together, alone = (generating(runs[name]) for name in ("waits", "does not wait", "alone"))
    last = [max(step, key=lambda row: sum(shares(row))) for step in steps]
    environment, engine, rest = (median(column) for column in zip(*map(shares, last), strict=True))
    return [
        {
            "trajectories": arguments.prompts * arguments.samples,
            "turns": arguments.turns,
            "generate, s": seconds,
            "without waiting, s": together,
            "longest wait, s": longest_wait,
            "a trajectory alone, s": alone,
            "of bound": seconds / max(longest_wait + alone, together),
            "of wait": seconds / max(longest_wait, together),
            "the last: environment, s": environment,
            "engine, s": engine,
            "else, s": rest,
        }
    ]


def waited(row: dict[str, Any]) -> float:
    """Seconds that a trajectory's environment took."""
    return float(dict(row["metrics"])["waited"])


def shares(row: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds that a trajectory waited for its environment, for the engine, and for anything else."""
    timings = dict(row["timings"])
    return waited(row), timings["engine"], timings["environment"] - waited(row)


def measure_endpoint(arguments: argparse.Namespace) -> Rows:
    """A row each: tokens/s of generation, sampled by the trainer and through the endpoint."""
    rows: Rows = []
    longest = PROMPT_TOKENS + arguments.new_tokens  # or the endpoint's engine would be one for the model's longest
    for name, environment in (("direct", None), ("endpoint", agent(arguments.workers))):
        run = fit(make_job(arguments, name, environment, max_model_len=longest), arguments, [0]).require_success()
        steps = run.metrics()[1:] or run.metrics()
        num_sequences = arguments.prompts * arguments.samples
        tokens = median(row["completion/length"] for row in steps) * num_sequences
        rate = tokens / generating(run)
        first = rows[0]["tokens/s"] if rows else rate
        rows.append(
            {"sampled": name, "sessions": num_sequences, "tokens": tokens, "tokens/s": rate, "x direct": rate / first}
        )
    return rows


def measure_idle(arguments: argparse.Namespace) -> Rows:
    """A row: memory and CPU time of sessions that do nothing."""
    changes = {"prompts": arguments.sessions // 4, "samples": 4, "max_new_tokens": 8, "steps": 1}
    run = fit(make_job(arguments, "idle", agent(0, arguments.idle), **changes), arguments, [0]).require_success()
    trace = [{name: float(value) for name, value in row.items()} for row in run.read_trace("host")]
    last = trace[-1]["seconds"]
    idle = [row for row in trace if last - arguments.idle * 0.8 < row["seconds"] < last - arguments.idle * 0.2]
    return [
        {
            "sessions": arguments.sessions,
            "memory, MiB": (max(row["rss"] for row in trace) - trace[0]["rss"]) / (1 << 20),
            "a session, KiB": (max(row["rss"] for row in trace) - trace[0]["rss"]) / 1024 / arguments.sessions,
            "CPU, s a second": (idle[-1]["cpu"] - idle[0]["cpu"]) / (idle[-1]["seconds"] - idle[0]["seconds"]),
        }
    ]


MEASURES = {"waiting": measure_waiting, "endpoint": measure_endpoint, "idle": measure_idle}


def main() -> None:
    """Run the parts, then print their tables."""
    parser = benchmark_parser(__doc__ or "", "agents", steps=3)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), dest="parts", help="(all)")
    parser.add_argument("--prompts", type=int, default=64, help="a step (64)")
    parser.add_argument("--samples", type=int, default=8, help="trajectories of each (8)")
    parser.add_argument("--turns", type=int, default=8, help="of a trajectory that waits (8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="the longest turn (64)")
    parser.add_argument("--workers", type=int, help="processes of agents; 0: the trainer's (by the number of cores)")
    parser.add_argument("--sessions", type=int, default=2000, help="that are idle (2000)")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds, from 2 on (30)")
    arguments = parser.parse_args()
    if arguments.idle < 2:
        parser.error(f"--idle {arguments.idle:g}: it takes 2 seconds to measure anything.")
    prepare(arguments)
    tables = []
    for part in arguments.parts:
        rows = MEASURES[part](arguments)
        say(format_table(rows))
        tables.append(format_table(rows))
    finish(arguments, [], tables)


if __name__ == "__main__":
    main()
