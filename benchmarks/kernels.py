"""What a GPU did in a stretch of time: kernels by time, idle gaps, and where the host waited, from a profiler's trace.

    python benchmarks/kernels.py trace.json.gz

The trace is one that torch.profiler exports. Prints three tables: groups of kernels, single kernels, and the longest
gaps in which the GPU had nothing to do, with what ran before and after.
"""

import argparse
import gzip
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launch import Rows, format_table, say

KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
GROUPS = {
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|_mm_|::mm",
    "optimizer and norms of gradients": r"multi_tensor|adam|foreach",
    "compiled reductions": r"triton_(red|per)",
    "compiled elementwise": r"triton_",
    "collectives": r"nccl",
    "copies": r"memcpy|memset|copy_|\bcat|index|gather|scatter",
    "eager reductions": r"reduce|softmax|norm",
    "other eager": r"",
}
"""By the first pattern that a kernel's name has."""
WAITS = ("Synchronize", "cudaMemcpy")
MIN_GAP = 10.0
"""Microseconds; kernels that are queued are apart by less."""


class Kernel(NamedTuple):
    """One piece of work of the GPU; times in microseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Trace:
    """What of a trace is looked at.

    Attributes:
        kernels: by their start.
        waits: calls of the host that wait for the GPU, by name, with their number and microseconds.
    """

    kernels: list[Kernel]
    waits: dict[str, tuple[int, float]]

    @property
    def span(self) -> float:
        """Microseconds from the first kernel's start to the last one's end."""
        return max(k.start + k.duration for k in self.kernels) - self.kernels[0].start if self.kernels else 0.0

    def gaps(self) -> list[tuple[float, str, str]]:
        """Microseconds in which nothing ran on any stream, with the kernels before and after."""
        found, end, last = [], float("inf"), ""
        for kernel in self.kernels:
            if kernel.start > end:
                found.append((kernel.start - end, last, kernel.name))
            if end == float("inf") or kernel.start + kernel.duration > end:
                end, last = kernel.start + kernel.duration, kernel.name
        return found


def read_trace(path: Path) -> Trace:
    """Read a file that torch.profiler exported."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    kernels = [Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in KINDS]
    waits: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") == "cuda_runtime" and any(wait in event["name"] for wait in WAITS):
            count, micros = waits.get(event["name"], (0, 0.0))
            waits[event["name"]] = (count + 1, micros + float(event["dur"]))
    return Trace(sorted(kernels, key=lambda kernel: kernel.start), waits)


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name, flags=re.IGNORECASE))


def tabulate(trace: Trace, names: dict[str, str]) -> Rows:
    """A row for each value of ``names``, kernels' names or their groups, by time."""
    micros: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for kernel in trace.kernels:
        micros[names[kernel.name]] += kernel.duration
        calls[names[kernel.name]] += 1
    return [
        {
            "what": name[:100].replace("|", "/"),
            "ms": time / 1e3,
            "share of time": time / trace.span,
            "calls": calls[name],
            "us a call": time / calls[name],
        }
        for name, time in sorted(micros.items(), key=lambda item: -item[1])
    ]


def describe(trace: Trace, top: int = 25) -> str:
    """The tables, as Markdown."""
    if not trace.kernels:
        return "No work of a GPU is in the trace.\n"
    names = {kernel.name: kernel.name for kernel in trace.kernels}
    gaps = trace.gaps()
    idle = sum(gap for gap, _, _ in gaps)
    micros = sum(gap for gap, _, _ in gaps if gap >= MIN_GAP)
    longest = sorted((gap for gap in gaps if gap[0] >= MIN_GAP), reverse=True)
    waits = [f"{name} {count} times, {micros / 1e3:.1f} ms" for name, (count, micros) in sorted(trace.waits.items())]
    return "\n".join(
        [
            f"{trace.span / 1e3:.1f} ms from the first kernel to the end of the last; idle for {idle / 1e3:.1f} ms "
            f"({idle / trace.span:.1%}), {micros / 1e3:.1f} ms of it in {len(longest)} gaps of "
            f"{MIN_GAP:.0f} us and more.",
            f"The host waited: {', '.join(waits) or 'never'}.",
            "",
            format_table(tabulate(trace, {name: group_of(name) for name in names})),
            format_table(tabulate(trace, names)[:top]),
            format_table(
                [
                    {"gap, us": gap, "after": a[:60].replace("|", "/"), "before": b[:60].replace("|", "/")}
                    for gap, a, b in longest[:8]
                ]
            ),
        ]
    )


def main() -> None:
    """Describe a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--top", type=int, default=25, help="kernels that are listed (25)")
    arguments = parser.parse_args()
    say(describe(read_trace(arguments.trace), arguments.top))


if __name__ == "__main__":
    main()
