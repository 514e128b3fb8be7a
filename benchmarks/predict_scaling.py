"""A prediction of steps on 8 to 1,024 GPUs, from what was measured on a few.

    python benchmarks/predict_scaling.py --steps runs/benchmarks/weak_scaling/table.csv \\
      --collectives runs/benchmarks/collectives/table.csv --model 0.6b --tokens 163840

The same work a GPU on each number of GPUs, an engine a rank, as of weak_scaling.py. Nothing is fitted to the measured
steps of more than one GPU: they stand beside what is predicted for them, to show how far off it is. A step is

    generate   one GPU's seconds, and what the slowest of N engines takes longer: the expected greatest of N normally
               distributed ones, with the deviation that one GPU's steps have; then rank 0 sends the trajectories
    update     one GPU's seconds, and of FSDP's all-gathers and reduce-scatters what is not hidden: those before the
               first layer and after the last, and what takes longer than a micro-batch's arithmetic
    sync       one GPU's seconds, and all-gathers of the weights for the engines
    rest       one GPU's seconds, and the collectives of the host processes

A collective takes a latency, which grows with the number of ranks along a line through the measured ones, and its bytes
at the measured bandwidth. Beyond --gpus-per-node there is the network, whose bandwidth and latency are arguments:
assumptions, not measured. "hsdp" shards within a node and sums gradients between nodes.

Writes --out/table.md, table.csv and scaling.svg. Not in it: failures, slow hosts, other jobs on the network, what rank
0 computes for a trajectory, and that the optimizer's step gets shorter with shards.
"""

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from draw import Line, draw
from launch import BENCHMARKS, Rows, finish
from make_model import SHAPES

BYTES_PER_TOKEN = 16
"""Of a trajectory: its id in 8, its log-probability and weight version in 4 each."""
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
class Work:
    """What one GPU does in a step.

    Attributes:
        step: measured on one GPU; the rewards are in its rest.
        deviation: of its generation's seconds.
        tokens: trained on.
        num_microbatches: of them.
        layer: parameters of one layer.
        num_layers: of the model.
        others: its other parameters.
        is_reduced_once: gradients are reduced after the last micro-batch alone.
        is_kept: layers stay gathered between forward and backward.
    """

    step: Step
    deviation: float
    tokens: int
    num_microbatches: int
    layer: int
    num_layers: int
    others: int
    is_reduced_once: bool = False
    is_kept: bool = False


class Links:
    """Seconds of collectives on any number of GPUs.

    Args:
        rows: of collectives.py.
        gpus_per_node: that are linked as the measured ones are.
        bandwidth: bytes a second of the network, a GPU.
        latency: seconds of one hop through it.
    """

    def __init__(self, rows: Sequence[dict[str, str]], gpus_per_node: int, bandwidth: float, latency: float) -> None:
        self.gpus_per_node, self.bandwidth, self.latency = gpus_per_node, bandwidth, latency
        self._seconds: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            if row["dtype"] != "bfloat16":  # its bandwidth is that of float32
                self._seconds[row["operation"]][int(row["GPUs"])][int(row["bytes"])] = float(row["us"]) / 1e6
        if not self._seconds:
            raise SystemExit("There are no measured collectives.")

    def seconds(self, operation: str, size: float, num_gpus: int) -> float:
        """Of one call on so many bytes in all, on neighbouring GPUs of as few nodes as there can be."""
        if num_gpus == 1:
            return 0.0
        within = min(num_gpus, self.gpus_per_node)
        num_nodes = math.ceil(num_gpus / self.gpus_per_node)
        share = (num_gpus - 1) / num_gpus
        # A ring passes each rank of a node, and then goes on to the next node.
        node_hops = self.latency + (within - 1) * self._hop(operation)
        latency = self._latency(operation, within) + (num_nodes - 1) * node_hops
        transfer = share * size / self._bandwidth(operation)
        if num_nodes > 1:
            transfer = max(transfer, share * size / self.bandwidth)
        return latency + transfer

    def all_reduce_between_nodes(self, size: float, num_nodes: int) -> float:
        """Seconds of summing so many bytes over nodes, a GPU of each, by trees."""
        hops = 2 * math.ceil(math.log2(num_nodes))
        return hops * self.latency + 2 * (num_nodes - 1) / num_nodes * size / self.bandwidth

    def _smallest(self, operation: str) -> dict[int, float]:
        """Seconds of the smallest size, by the number of ranks."""
        return {ranks: by_size[min(by_size)] for ranks, by_size in sorted(self._seconds[operation].items())}

    def _hop(self, operation: str) -> float:
        """Seconds that a rank more adds to the latency."""
        (first, least), *_, (last, most) = [*self._smallest(operation).items()] * 2
        return max((most - least) / (last - first), 0.0) if last > first else 0.0

    def _latency(self, operation: str, num_ranks: int) -> float:
        first, least = next(iter(self._smallest(operation).items()))
        return least + self._hop(operation) * (num_ranks - first)

    def _bandwidth(self, operation: str) -> float:
        """Bytes that a rank receives a second, by the largest size on the most ranks."""
        ranks, by_size = max(self._seconds[operation].items())
        size = max(by_size)
        return (ranks - 1) / ranks * size / max(by_size[size] - by_size[min(by_size)], 1e-9)


def greatest_normal(count: int) -> float:
    """The expected greatest of so many standard normal values, by Blom's approximation (0 of one)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def exposed_update(work: Work, links: Links, num_gpus: int, shard_size: int) -> float:
    """Seconds of an update's collectives that its arithmetic does not hide."""
    num_nodes = num_gpus // shard_size

    def gather(parameters: int) -> float:
        return links.seconds("all-gather", WEIGHT_BYTES * parameters, shard_size)

    def reduce(parameters: int) -> float:
        seconds = links.seconds("reduce-scatter", GRADIENT_BYTES * parameters, shard_size)
        if num_nodes > 1:
            seconds += links.all_reduce_between_nodes(GRADIENT_BYTES * parameters / shard_size, num_nodes)
        return seconds

    ends = gather(work.others) + gather(work.layer)
    gathers = work.num_layers * gather(work.layer) * (1 if work.is_kept else 2) + gather(work.others)
    reduces, last = work.num_layers * reduce(work.layer) + reduce(work.others), reduce(work.others)
    arithmetic = work.step.update / work.num_microbatches
    exposed = 0.0
    for number in range(1, work.num_microbatches + 1):
        is_reduced = number == work.num_microbatches or not work.is_reduced_once
        unhidden = ends + (last if is_reduced else 0.0)
        exposed += unhidden + max(gathers + (reduces if is_reduced else 0.0) - unhidden - arithmetic, 0.0)
    return exposed


def predict(work: Work, links: Links, num_gpus: int, shard_size: int) -> Step:
    """A step on so many GPUs, of which so many share one copy of the weights."""
    one = work.step
    if num_gpus == 1:
        return one
    parameters = work.num_layers * work.layer + work.others
    num_gathers = math.ceil(WEIGHT_BYTES * parameters / GATHER_BYTES)
    sent = BYTES_PER_TOKEN * work.tokens * num_gpus
    return Step(
        generate=one.generate
        + work.deviation * greatest_normal(num_gpus)
        + links.seconds("scatter (host)", sent, num_gpus),
        update=one.update + exposed_update(work, links, num_gpus, shard_size),
        sync=one.sync + num_gathers * links.seconds("all-gather", WEIGHT_BYTES * parameters / num_gathers, shard_size),
        rest=one.rest + HOST_COLLECTIVES * links.seconds("gather of objects (host)", 1024, num_gpus),
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_steps(path: Path) -> dict[int, tuple[Step, float]]:
    """The steps that weak_scaling.py measured, by the number of GPUs, with the deviation of their generation."""
    steps = {}
    for row in read_csv(path):
        generate, update, sync = (float(row[f"{phase}, s"]) for phase in ("generate", "update", "sync"))
        step = Step(generate, update, sync, float(row["step, s"]) - generate - update - sync)
        steps[int(row["GPUs"])] = step, float(row["generate's deviation"])
    return steps


def make_work(arguments: argparse.Namespace, step: Step, deviation: float) -> Work:
    """One GPU's share, with the sizes of the model."""
    from transformers import Qwen3Config

    from rlightning.models.counts import build_empty
    from rlightning.models.layers import decoder_layers

    policy = build_empty(Qwen3Config(**SHAPES[arguments.model]))
    layers = decoder_layers(policy)
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    return Work(
        step=step,
        deviation=deviation,
        tokens=arguments.tokens,
        num_microbatches=math.ceil(arguments.tokens / arguments.microbatch_tokens),
        layer=layer,
        num_layers=len(layers),
        others=sum(parameter.numel() for parameter in policy.parameters()) - layer * len(layers),
        is_reduced_once=not arguments.fsdp.get("reduce_every_microbatch", True),
        is_kept=not arguments.fsdp.get("reshard_after_forward", True),
    )


def tabulate(work: Work, links: Links, sizes: Sequence[int], measured: dict[int, tuple[Step, float]]) -> Rows:
    """A row for each number of GPUs and each way to shard over them, measured steps beside the predicted ones."""
    rows: Rows = []
    for num_gpus in sizes:
        shards = {"fsdp": num_gpus}
        if num_gpus > links.gpus_per_node:
            shards["hsdp"] = links.gpus_per_node
        for mesh, shard_size in shards.items():
            step = predict(work, links, num_gpus, shard_size)
            seen = measured.get(num_gpus)
            row: dict[str, Any] = {"GPUs": num_gpus, "mesh": mesh}
            for phase in ("generate", "update", "sync", "rest"):
                row[f"{phase}, s"] = getattr(step, phase)
                row[f"{phase}, measured"] = getattr(seen[0], phase) if seen else None
            row |= {"step, s": step.total, "step, measured": seen[0].total if seen else None}
            row |= {"efficiency": work.step.total / step.total}
            rows.append(row | {"efficiency, measured": work.step.total / seen[0].total if seen else None})
    return rows


def draw_efficiency(rows: Rows) -> str:
    """Efficiency against the number of GPUs as SVG."""
    columns = (("efficiency, measured", "fsdp"), ("efficiency", "fsdp"), ("efficiency", "hsdp"))
    labels = ("measured", "predicted, FSDP over all", "predicted, HSDP: a copy a node")
    lines = []
    for color, ((column, mesh), label) in enumerate(zip(columns, labels, strict=True)):
        chosen = [row for row in rows if row["mesh"] == mesh and row[column] is not None]
        lines.append(Line([(math.log2(row["GPUs"]), row[column]) for row in chosen], color, label))
    return draw(lines, title="Efficiency against one GPU", x_label="log2 of the number of GPUs")


def main() -> None:
    """Predict, beside what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True, help="the table.csv of weak_scaling.py")
    parser.add_argument("--collectives", type=Path, required=True, help="the table.csv of collectives.py")
    parser.add_argument("--model", choices=SHAPES, default="0.6b", help="of both (0.6b)")
    parser.add_argument("--tokens", type=int, default=163840, help="a step and GPU (163840)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384, help="max_tokens_per_microbatch (16384)")
    parser.add_argument("--fsdp", type=json.loads, default={}, metavar="JSON", help="arguments of FSDP ({})")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with the measured links between them (8)")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB/s of the network, a GPU (50)")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds of a hop through it (10)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 256, 1024], help="(8 16 64 256 1024)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/predict_scaling"), help="gets the tables")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(BENCHMARKS.parent)]
    measured = read_steps(arguments.steps)
    if 1 not in measured:
        parser.error(f"--steps {arguments.steps} has no row of one GPU, from which the others are predicted")
    collectives = read_csv(arguments.collectives)
    links = Links(collectives, arguments.gpus_per_node, 1e9 * arguments.bandwidth, arguments.latency / 1e6)
    rows = tabulate(make_work(arguments, *measured[1]), links, sorted({*measured, *arguments.gpus}), measured)
    (arguments.out / "scaling.svg").write_text(draw_efficiency(rows))
    finish(arguments, rows)


if __name__ == "__main__":
    main()
