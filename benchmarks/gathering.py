"""Seconds to gather all shards of a model into a flat bucket, and by ``full_tensor()`` for each weight.

    torchrun --nproc-per-node 2 benchmarks/gathering.py
    torchrun --nproc-per-node 2 benchmarks/gathering.py --device cpu --layers 8 --hidden 512

The model is a stack of layers with the weights of a Qwen3 layer (attention of one head a 128 columns, a gated MLP of
three times the width) in float32, sharded by FSDP2; what is gathered is bfloat16. Prints the median of the rounds after
the first and, on a GPU, the memory that gathering took beyond the bucket.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlightning.parallel.barrier import barrier
from rlightning.parallel.device import memory_use, reset_peak
from rlightning.rollout.weights import WeightBucket

ROUNDS = 6


def make_layer(hidden: int, device: torch.device) -> nn.Module:
    """Seven linears and two norms, without a forward pass."""
    shapes = [(hidden, hidden), (hidden // 2, hidden), (hidden // 2, hidden), (hidden, hidden)]
    shapes += [(3 * hidden, hidden), (3 * hidden, hidden), (hidden, 3 * hidden)]
    linears = [nn.Linear(columns, rows, bias=False, device=device) for rows, columns in shapes]
    return nn.Sequential(*linears, nn.RMSNorm(hidden, device=device), nn.RMSNorm(hidden, device=device))


def measure(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of a round, all ranks together."""
    seconds = []
    for _ in range(ROUNDS):
        barrier("round begins", device=device)
        start = time.perf_counter()
        work()
        barrier("round ends", device=device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def main() -> None:
    """Measure and say so, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--bucket-bytes", type=int, default=2 << 30)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.ModuleList()
    for _ in range(arguments.layers):
        model.append(fully_shard(make_layer(arguments.hidden, device), mesh=mesh))
    weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
    bucket = WeightBucket(
        [(name, tuple(weight.shape)) for name, weight in weights], torch.bfloat16, device, arguments.bucket_bytes
    )

    def flat() -> None:
        for _ in bucket.fill(weights):
            pass

    def one_by_one() -> None:
        for _, weight in weights:
            assert isinstance(weight, DTensor)
            weight.to(torch.bfloat16).full_tensor()

    before = memory_use(device)
    reset_peak(device)
    in_bucket = measure(flat, device)
    after = memory_use(device)
    by_weight = measure(one_by_one, device)
    num_bytes = 2 * sum(weight.numel() for _, weight in weights)
    if dist.get_rank() == 0:
        extra = f", {(after.peak - before.allocated) / 2**20:.0f} MiB beyond the bucket" if before and after else ""
        sys.stdout.write(
            f"{num_bytes / 1e9:.2f} GB in bfloat16, {len(weights)} weights, {dist.get_world_size()} ranks: "
            f"flat {in_bucket:.4f} s ({num_bytes / in_bucket / 1e9:.1f} GB/s){extra}; "
            f"full_tensor() of each {by_weight:.4f} s\n"
        )
    bucket.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
