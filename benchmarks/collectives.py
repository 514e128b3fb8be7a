"""Seconds and GB/s of collectives between devices and between their hosts' processes, and of copies between both.

    python benchmarks/collectives.py --gpus 2 4
    python benchmarks/collectives.py --device cpu --gpus 2

A row each number of GPUs, operation, dtype and size, which is that of the whole tensor: what all-gather gives, and what
reduce-scatter is given. The time is the slowest rank's, the median of some rounds, each of several calls without a wait
between them; at the smallest size it is the latency. "GB/s" is the size over it. "bus" is what each GPU sends or
receives a second, with (n - 1) / n of the size for all-gather and reduce-scatter, twice that for all-reduce, as NCCL's
own tests count. What the ranks' host processes tell each other goes over gloo. All ranks copy at the same time, each a
tensor of the size, from and to pinned memory.

Writes --out/table.md and table.csv. The sizes go up, so that --limit leaves out the largest, and what an earlier call
with the same --out has measured stays in the table.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import torch
import torch.distributed as dist
from launch import GIB, KeptRows, finish
from torch.multiprocessing import spawn

# Newer versions of torch warn of the old names.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = {
    "cuda": (1 << 10, 1 << 15, 1 << 20, 1 << 23, 1 << 26, 1 << 28, GIB),
    "cpu": (1 << 10, 1 << 16),
}
"""Bytes, by device."""
MOST_HOST_BYTES = 1 << 23
"""Larger ones the host processes do not exchange."""
KEYS = ("GPUs", "operation", "dtype", "bytes")
ROUNDS = 5


def collectives(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """The operations on a tensor of so many bytes, each with the share of it that a rank sends or receives."""
    num_ranks = dist.get_world_size()
    whole = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    part = whole[: len(whole) // num_ranks].clone()
    share = (num_ranks - 1) / num_ranks
    return {
        "all-gather": (lambda: all_gather(whole, part), share),
        "reduce-scatter": (lambda: reduce_scatter(part, whole), share),
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "broadcast": (lambda: dist.broadcast(whole, 0), 1.0),
    }


def host_collectives(size: int) -> dict[str, tuple[Callable[[], object], float]]:
    """The operations of the ranks' host processes, over gloo, on so many bytes in all; with the share of rank 0."""
    num_ranks = dist.get_world_size()
    gathered: list[object] = [None] * num_ranks
    thing = bytes(size // num_ranks)
    part = torch.zeros(size // num_ranks, dtype=torch.uint8)
    parts = [part.clone() for _ in range(num_ranks)] if dist.get_rank() == 0 else None
    share = (num_ranks - 1) / num_ranks
    return {
        "gather of objects (host)": (lambda: dist.all_gather_object(gathered, thing), share),
        "scatter (host)": (lambda: dist.scatter(part, parts), share),
    }


def copies(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Copies of so many bytes between this rank's device and the host."""
    host, there = torch.zeros(size, dtype=torch.uint8).pin_memory(), torch.zeros(size, dtype=torch.uint8, device=device)
    return {
        "host to device": lambda: there.copy_(host, non_blocking=True),
        "device to host": lambda: host.copy_(there, non_blocking=True),
    }


def time_call(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Seconds of a call on the slowest rank."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    seconds = []
    for _ in range(ROUNDS):
        wait()
        dist.all_reduce(torch.zeros(1))  # on the CPU: the ranks start together
        begun = perf_counter()
        for _ in range(num_calls):
            call()
        wait()
        seconds.append((perf_counter() - begun) / num_calls)
    slowest = torch.tensor(median(seconds))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def operations(size: int, device: torch.device) -> Iterator[tuple[str, str, Callable[[], object], float]]:
    """Each operation on so many bytes: its name, the dtype, the call, and the share of the bytes that a rank moves."""
    for name, dtype in DTYPES.items():
        for operation, (call, share) in collectives(size, dtype, device).items():
            yield operation, name, call, share
    if size <= MOST_HOST_BYTES:
        for operation, (call, share) in host_collectives(size).items():
            yield operation, "bytes", call, share
    if device.type == "cuda":
        for operation, call in copies(size, device).items():
            yield operation, "bytes", call, 1.0


def has_time(deadline: float) -> bool:
    """Whether rank 0's clock is before the deadline; the same answer on all ranks."""
    answer = torch.tensor(monotonic() < deadline)
    dist.broadcast(answer, 0)
    return bool(answer)


def measure(rank: int, num_ranks: int, store: str, arguments: argparse.Namespace) -> None:
    """Measure on one rank of a group; rank 0 keeps the rows."""
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    kept, deadline = KeptRows(arguments.out, *KEYS), monotonic() + arguments.limit
    for size in SIZES[arguments.device]:
        for operation, dtype, call, share in operations(size, device):
            if not has_time(deadline):
                break
            seconds = time_call(call, 20 if size <= 1 << 20 else 3, device)
            rate = size / seconds / 1e9
            if rank == 0:
                row = dict(zip(KEYS, (num_ranks, operation, dtype, size), strict=True))
                kept.put(row | {"us": 1e6 * seconds, "GB/s": rate, "bus": rate * share})
    dist.destroy_process_group()


def main() -> None:
    """Measure with each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4], help="of a group, or ranks on a CPU (2 4)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of each group's measurements (10)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/collectives"), help="gets the tables")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for num_ranks in arguments.gpus:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (num_ranks, f"{folder}/store", arguments), nprocs=num_ranks)
    finish(arguments, KeptRows(arguments.out, *KEYS).rows)


if __name__ == "__main__":
    main()
