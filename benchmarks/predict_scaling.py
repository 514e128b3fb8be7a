"""A prediction of steps on 8 to 1,024 GPUs, from what was measured on a few.

    python benchmarks/predict_scaling.py --steps runs/benchmarks/weak_scaling/table.csv \\
      --collectives runs/benchmarks/collectives/table.csv --collector runs/benchmarks/collector/table.csv

The same work a GPU on each number of GPUs, an engine a rank, as of weak_scaling.py. Nothing is fitted to the measured
steps of more than one GPU: they stand beside what is predicted for them, to show how far off it is. A step is

    generate   one GPU's seconds, and what the slowest of N engines takes longer: the expected greatest of N normally
               distributed ones, with the deviation that one GPU's steps have; or what rank 0's collector computes
               meanwhile, if that is more; then rank 0 packs the trajectories and sends them
    update     one GPU's seconds, what FSDP itself adds to them (with --meshes), and what is not hidden of its
               collectives: those before the first layer and after the last, and what takes longer than a
               micro-batch's arithmetic
    sync       one GPU's seconds, and all-gathers of the weights for the engines
    rest       one GPU's seconds, and the collectives of the host processes

A collective takes a latency, which grows with the number of ranks along a line through the measured ones, and beside it
the seconds that its bytes have taken on the most ranks measured. Beyond --gpus-per-node there is the network, whose
bandwidth and latency are arguments: assumptions, not measured. "hsdp" shards within a node and sums gradients between
nodes. --meshes, of meshes.py, adds a table of its updates: "arithmetic" is one GPU's seconds with as many layers
checkpointed, "collectives" the seconds of all of them, hidden or not.

Writes --out/table.md, table.csv and scaling.svg. Not in it: failures, slow hosts, other jobs on the network, what
it takes rank 0 to read what engines send, and that the optimizer's step gets shorter with shards.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from draw import Line, draw
from launch import Rows, finish, format_table
from links import Links
from make_model import SHAPES

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""Of a parameter, reduced in float32 and gathered in bfloat16."""
GATHER_BYTES = 256 << 20
"""Of one all-gather of a weight sync; as in rlightning/parallel/gathering.py."""
HOST_COLLECTIVES = 30
"""Of a step with engines, counted on two ranks: decisions, counts, metrics, and who has which trajectories."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step by phase."""

    generate: float
    update: float
    sync: float
    rest: float

    @property
    def total(self) -> float:
        """The step's seconds."""
        return self.generate + self.update + self.sync + self.rest


@dataclass(frozen=True)
class Trajectories:
    """A GPU's trajectories in a step.

    Attributes:
        count: of them.
        deviation: of the seconds in which an engine samples them.
        collect: seconds of rank 0's CPU time for one, while engines sample.
        pack: the same when they have.
        size: bytes of one.
    """

    count: int
    deviation: float
    collect: float
    pack: float
    size: float


@dataclass(frozen=True)
class Update:
    """A GPU's update.

    Attributes:
        seconds: on one GPU.
        num_microbatches: of the update.
        num_layers: of the model.
        layer: parameters of one layer.
        others: its other parameters.
        is_reduced_once: gradients are reduced after the last micro-batch alone.
        is_kept: layers stay gathered between forward and backward.
        fsdp_share: of the seconds, that FSDP adds on one GPU.
    """

    seconds: float
    num_microbatches: int
    num_layers: int
    layer: int
    others: int
    is_reduced_once: bool
    is_kept: bool
    fsdp_share: float

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.num_layers * self.layer + self.others


def greatest_normal(count: int) -> float:
    """The expected greatest of so many standard normal values: of the integral of 1 - cdf^count, less that below 0."""
    normal, width = NormalDist(), 0.01
    places = (width * (number + 0.5) for number in range(-1000, 1000))
    return width * sum((1 if place > 0 else 0) - normal.cdf(place) ** count for place in places)


def generation_seconds(one: float, trajectories: Trajectories, links: Links, num_gpus: int) -> float:
    """Until the trajectories of so many GPUs are with their ranks."""
    sampled = one + trajectories.deviation * greatest_normal(num_gpus)
    total = num_gpus * trajectories.count
    sent = links.seconds("scatter (host)", total * trajectories.size, num_gpus)
    sent += (total - trajectories.count) * trajectories.pack
    return max(sampled, total * trajectories.collect) + sent


def collective_seconds(update: Update, links: Links, num_gpus: int, shard_size: int) -> Iterator[tuple[float, float]]:
    """Of each micro-batch the seconds of all its collectives, and of those that no arithmetic can hide.

    Embedding and output layer are gathered once, and gradients are summed over copies of the model once.
    """
    num_copies = num_gpus // shard_size

    def gather(parameters: int) -> float:
        return links.seconds("all-gather", WEIGHT_BYTES * parameters, shard_size)

    def reduce(parameters: int, is_last: bool) -> float:
        if update.is_reduced_once and not is_last:
            return 0.0
        size = GRADIENT_BYTES * parameters
        over_copies = links.all_reduce(size / shard_size, num_copies, shard_size) if is_last and num_copies > 1 else 0.0
        return links.seconds("reduce-scatter", size, shard_size) + over_copies

    for number in range(update.num_microbatches):
        is_first, is_last = number == 0, number == update.num_microbatches - 1
        gathers_of_a_layer = int(is_first) if update.is_kept else 2
        before = gather(update.others) * is_first + gather(update.layer) * min(gathers_of_a_layer, 1)
        after = reduce(update.others, is_last)
        layers = update.num_layers * (gathers_of_a_layer * gather(update.layer) + reduce(update.layer, is_last))
        yield gather(update.others) * is_first + layers + after, before + after


def update_seconds(update: Update, links: Links, num_gpus: int, shard_size: int) -> float:
    """An update on so many GPUs: its arithmetic, and the collectives that this does not hide."""
    seconds = update.seconds * (1 + update.fsdp_share)
    arithmetic = seconds / update.num_microbatches
    for every, unhidden in collective_seconds(update, links, num_gpus, shard_size):
        seconds += unhidden + max(every - unhidden - arithmetic, 0.0)
    return seconds


def predict(
    one: Step, update: Update, trajectories: Trajectories, links: Links, num_gpus: int, shard_size: int
) -> Step:
    """A step on so many GPUs, of which so many share one copy of the weights, from one GPU's."""
    if num_gpus == 1:
        return one
    weights = WEIGHT_BYTES * update.parameters
    num_gathers = math.ceil(weights / GATHER_BYTES)
    return Step(
        generate=generation_seconds(one.generate, trajectories, links, num_gpus),
        update=update_seconds(update, links, num_gpus, shard_size),
        sync=one.sync + num_gathers * links.seconds("all-gather", weights / num_gathers, shard_size),
        rest=one.rest + HOST_COLLECTIVES * links.seconds("gather of objects (host)", 1024, num_gpus),
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_steps(path: Path) -> tuple[dict[int, Step], float]:
    """The steps that weak_scaling.py measured, by the number of GPUs, and the deviation of one GPU's generation."""
    steps, deviations = {}, {}
    for row in read_csv(path):
        num_gpus, total = int(row["GPUs"]), float(row["step, s"])
        generate, update, sync = (float(row[f"{phase}, s"]) for phase in ("generate", "update", "sync"))
        steps[num_gpus] = Step(generate, update, sync, total - generate - update - sync)
        deviations[num_gpus] = float(row["generate's deviation"])
    if 1 not in steps:
        raise SystemExit(f"{path} has no row of one GPU, from which the others are predicted.")
    return steps, deviations[1]


def count_parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Of one layer, and of embedding and output layer; norms, which are few, are left out."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = 2 * hidden * shape["head_dim"] * heads + 3 * hidden * shape["intermediate_size"]
    return layer, shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)


def read_trajectories(path: Path, count: int, deviation: float) -> Trajectories:
    """What collector.py measured with the most trajectories."""
    row = read_csv(path)[-1]
    collect, pack, size = (float(row[name]) for name in ("collect, us", "pack, us", "KB"))
    return Trajectories(count, deviation, collect / 1e6, pack / 1e6, size * 1e3)


def read_updates(path: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """The rows of meshes.py that have come to their updates, by model and mesh.

    "passes" is what an update computes, in forward passes: one, two backward, and one of each checkpointed layer.
    """
    updates: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in read_csv(path) if path is not None else []:
        if row["update, s"]:
            seconds, rate = float(row["update, s"]), float(row["tokens/s a GPU"])
            checkpointed, layers = map(int, row["checkpointed"].split(" of "))
            one = {"seconds": seconds, "tokens": seconds * rate, "passes": 3 + checkpointed / layers}
            one |= {"GPUs": float(row["GPUs"]), "micro-batches": float(row["micro-batches"])}
            updates[row["model"]][row["mesh"]] = one
    return updates


def make_update(
    fsdp: dict[str, Any], model: str, seconds: float, num_microbatches: int, updates: dict[str, dict[str, float]]
) -> Update:
    """One GPU's update by a model of make_model.py, whose updates on meshes were measured, or not."""
    layer, others = count_parameters(SHAPES[model])
    rates = [updates[mesh]["tokens"] / updates[mesh]["seconds"] for mesh in ("one", "one-fsdp") if mesh in updates]
    return Update(
        seconds=seconds,
        num_microbatches=num_microbatches,
        num_layers=SHAPES[model]["num_hidden_layers"],
        layer=layer,
        others=others,
        is_reduced_once=not fsdp.get("reduce_every_microbatch", True),
        is_kept=not fsdp.get("reshard_after_forward", True),
        fsdp_share=rates[0] / rates[1] - 1 if len(rates) == 2 else 0.0,
    )


def tabulate_updates(links: Links, updates: dict[str, dict[str, dict[str, float]]]) -> Rows:
    """The updates of meshes.py, predicted from one GPU's beside the measured ones."""
    rows: Rows = []
    for model, by_mesh in updates.items():
        for mesh in ("fsdp", "hsdp"):
            if mesh not in by_mesh or "one" not in by_mesh:
                continue
            one, measured = by_mesh["one"], by_mesh[mesh]
            num_gpus, tokens = int(measured["GPUs"]), measured["tokens"]
            seconds = one["seconds"] * tokens / one["tokens"] * measured["passes"] / one["passes"]
            update = make_update({}, model, seconds, int(measured["micro-batches"]), by_mesh)
            shard_size = num_gpus if mesh == "fsdp" else 2
            predicted = update_seconds(update, links, num_gpus, shard_size)
            every = sum(seconds for seconds, _ in collective_seconds(update, links, num_gpus, shard_size))
            row = {"model": model, "GPUs": num_gpus, "mesh": mesh, "arithmetic, s": seconds}
            rows.append(row | {"collectives, s": every, "update, s": predicted, "measured": measured["seconds"]})
    return rows


def tabulate(
    update: Update, trajectories: Trajectories, links: Links, sizes: Sequence[int], measured: dict[int, Step]
) -> Rows:
    """A row for each number of GPUs and each way to shard over them, measured steps beside the predicted ones."""
    rows: Rows = []
    one = measured[1]
    for num_gpus in sizes:
        shards = {"fsdp": num_gpus}
        if num_gpus > links.gpus_per_node:
            shards["hsdp"] = links.gpus_per_node
        for mesh, shard_size in shards.items():
            step = predict(one, update, trajectories, links, num_gpus, shard_size)
            seen = measured[num_gpus].total if num_gpus in measured else None
            row: dict[str, Any] = {"GPUs": num_gpus, "mesh": mesh}
            row |= {f"{name}, s": seconds for name, seconds in asdict(step).items()}
            row |= {"step, s": step.total, "measured": seen, "efficiency": one.total / step.total}
            rows.append(row | {"measured efficiency": one.total / seen if seen else None})
    return rows


def draw_efficiency(rows: Rows, idle_host: Rows) -> str:
    """Efficiency against the number of GPUs as SVG, with a copy of the model on each node.

    Args:
        rows: of :func:`tabulate`.
        idle_host: the same, if trajectories took rank 0 no time.
    """
    curves = (
        ("measured", "measured efficiency", rows),
        ("predicted", "efficiency", rows),
        ("predicted, without rank 0's work on trajectories", "efficiency", idle_host),
    )
    lines = []
    for color, (label, column, chosen) in enumerate(curves):
        by_size = {row["GPUs"]: row[column] for row in chosen if row[column] is not None}  # "hsdp" is the last
        lines.append(Line([(math.log2(size), value) for size, value in by_size.items()], color, label))
    return draw(lines, title="Efficiency against one GPU", x_label="log2 of the number of GPUs")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True, help="the table.csv of weak_scaling.py")
    parser.add_argument("--collectives", type=Path, required=True, help="the table.csv of collectives.py")
    parser.add_argument("--collector", type=Path, required=True, help="the table.csv of collector.py: its last row")
    parser.add_argument("--meshes", type=Path, help="the table.csv of meshes.py")
    parser.add_argument("--model", choices=SHAPES, default="0.6b", help="of the steps (0.6b)")
    parser.add_argument("--tokens", type=int, default=163840, help="of a step and GPU (163840)")
    parser.add_argument("--trajectories", type=int, default=256, help="of a step and GPU (256)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384, help="max_tokens_per_microbatch (16384)")
    parser.add_argument("--fsdp", type=json.loads, default={}, metavar="JSON", help="arguments of FSDP ({})")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with the measured links between them (8)")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB/s of the network, a GPU (50)")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds of a hop through it (10)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 256, 1024], help="(8 16 64 256 1024)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/predict_scaling"), help="gets the tables")
    return parser.parse_args()


def main() -> None:
    """Predict, beside what was measured."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measured, deviation = read_steps(arguments.steps)
    links = Links(
        read_csv(arguments.collectives), arguments.gpus_per_node, 1e9 * arguments.bandwidth, arguments.latency / 1e6
    )
    updates = read_updates(arguments.meshes)
    model, num_microbatches = arguments.model, math.ceil(arguments.tokens / arguments.microbatch_tokens)
    update = make_update(arguments.fsdp, model, measured[1].update, num_microbatches, updates.get(model, {}))
    trajectories = read_trajectories(arguments.collector, arguments.trajectories, deviation)
    sizes = sorted({*measured, *arguments.gpus})
    rows = tabulate(update, trajectories, links, sizes, measured)
    idle_host = tabulate(update, replace(trajectories, collect=0.0, pack=0.0, size=0.0), links, sizes, measured)
    seen = [
        {"GPUs": size} | {f"{name}, s": one for name, one in asdict(step).items()} for size, step in measured.items()
    ]
    (arguments.out / "scaling.svg").write_text(draw_efficiency(rows, idle_host))
    finish(arguments, rows, ["Measured:\n", format_table(seen), format_table(tabulate_updates(links, updates))])


if __name__ == "__main__":
    main()
