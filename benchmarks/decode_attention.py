"""vLLM's attention kernels by themselves, each sequence one token further, over a paged KV cache.

    python benchmarks/decode_attention.py
    python benchmarks/decode_attention.py --sequences 16 --lengths 1024 8192

Ways: "FlashAttention 3" as vLLM launches it in CUDA graphs, where its kernel may split a sequence into 32 parts;
"unsplit", the same with one part (`attention_config: {flash_attn_max_num_splits_for_cuda_graph: 1}`); and "Triton",
vLLM's own kernel (`attention_config: {backend: TRITON_ATTN}`). A CUDA graph holds one launch for each of --layers.

Prints one table: microseconds of a layer, the keys and values read in TB/s, and the relative error against float32.
A way that fails says why. On vLLM 0.24.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from launch import benchmark_parser, finish, say
from torch import Tensor

from rlightning.parallel.device import synchronize


@dataclass
class Batch:
    """Sequences of one length, whose blocks lie anywhere in the cache."""

    query: Tensor
    """[N, H, D]"""
    cache: Tensor
    """[blocks, 2, tokens of a block, Hk, D]: keys and values"""
    table: Tensor
    """[N, blocks of a sequence]"""
    lengths: Tensor
    bounds: Tensor
    longest: int

    def shared_arguments(self) -> dict[str, Any]:
        """What every kernel wants to know."""
        keys, values = self.cache.unbind(1)
        return {
            "q": self.query,
            "k": keys,
            "v": values,
            "out": torch.empty_like(self.query),
            "cu_seqlens_q": self.bounds,
            "max_seqlen_q": 1,
            "seqused_k": self.lengths,
            "max_seqlen_k": self.longest,
            "softmax_scale": self.query.shape[-1] ** -0.5,
            "causal": True,
            "block_table": self.table,
        }


def make_batch(arguments: argparse.Namespace, length: int) -> Batch:
    """Random queries, keys and values."""
    generator = torch.Generator("cuda").manual_seed(0)
    count, blocks = arguments.sequences, -(-length // arguments.block)
    shape = (count * blocks, 2, arguments.block, arguments.key_heads, arguments.head_size)
    return Batch(
        torch.randn(count, arguments.heads, arguments.head_size, device="cuda", generator=generator).bfloat16(),
        torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16),
        torch.randperm(count * blocks, device="cuda", generator=generator, dtype=torch.int32).view(count, blocks),
        torch.full((count,), length, device="cuda", dtype=torch.int32),
        torch.arange(count + 1, device="cuda", dtype=torch.int32),
        length,
    )


def flash(batch: Batch, splits: int) -> Callable[[], Tensor]:
    """FlashAttention 3, its tiles scheduled ahead for all layers, as vLLM does."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    _, _, block, key_heads, size = batch.cache.shape
    metadata = get_scheduler_metadata(
        batch_size=len(batch.lengths),
        max_seqlen_q=1,
        max_seqlen_k=batch.longest,
        num_heads_q=batch.query.shape[1],
        num_heads_kv=key_heads,
        headdim=size,
        cache_seqlens=batch.lengths,
        cu_seqlens_q=batch.bounds,
        page_size=block,
        causal=True,
        num_splits=splits,
    )
    shared = batch.shared_arguments()
    return lambda: flash_attn_varlen_func(**shared, scheduler_metadata=metadata, fa_version=3, num_splits=splits)


def triton(batch: Batch) -> Callable[[], Tensor]:
    """vLLM's kernel in Triton."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    shared = batch.shared_arguments()
    scale = torch.ones(1, device="cuda").expand(len(batch.lengths), batch.cache.shape[3])

    def call() -> Tensor:
        unified_attention(**shared, window_size=(-1, -1), softcap=0, q_descale=None, k_descale=scale, v_descale=scale)
        return shared["out"]

    return call


WAYS: dict[str, Callable[[Batch], Callable[[], Tensor]]] = {
    "FlashAttention 3": lambda batch: flash(batch, splits=32),
    "unsplit": lambda batch: flash(batch, splits=1),
    "Triton": triton,
}


def reference(batch: Batch) -> Tensor:
    """[H, D] of the first sequence, in float32."""
    keys, values = (
        batch.cache[batch.table[0].long(), part].flatten(0, 1)[: batch.longest].float().transpose(0, 1)
        for part in (0, 1)
    )
    query = batch.query[0].float()[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)[:, 0]


def time_graph(call: Callable[[], Tensor], device: torch.device, layers: int, repetitions: int) -> float:
    """Microseconds of a call in a CUDA graph: the least of several replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(layers):
            call()
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        synchronize(device)
        times.append(1000 * begin.elapsed_time(end) / layers)
    return min(times)


def measure(arguments: argparse.Namespace, length: int, way: str) -> dict[str, Any]:
    """One line."""
    row = {"sequences": arguments.sequences, "tokens each": length, "way": way}
    try:
        batch = make_batch(arguments, length)
        call = WAYS[way](batch)
        exact = reference(batch)
        error = float((call()[0] - exact).norm() / exact.norm())
        microseconds = time_graph(call, batch.query.device, arguments.layers, arguments.repetitions)
    except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError) as failure:
        reason = f"{type(failure).__name__}: {str(failure).strip()[:120]}".splitlines()[0]
        return row | {"us": None, "TB/s": None, "error": None, "end": reason}
    read = 4 * arguments.sequences * length * arguments.key_heads * arguments.head_size
    return row | {"us": microseconds, "TB/s": read / microseconds / 1e6, "error": error, "end": "ok"}


def main() -> None:
    """Measure each way at each length."""
    parser = benchmark_parser(__doc__ or "", "decode_attention", steps=0, model=None)
    parser.add_argument("--sequences", type=int, default=512, help="(512)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[192, 320, 640, 1024], help="(192 320 640 1024)")
    parser.add_argument("--heads", type=int, default=16, help="of queries (16)")
    parser.add_argument("--key-heads", type=int, default=8, help="of keys and values (8)")
    parser.add_argument("--head-size", type=int, default=128, help="(128)")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of the cache (16)")
    parser.add_argument("--layers", type=int, default=28, help="launches of a graph (28)")
    parser.add_argument("--repetitions", type=int, default=5, help="(5)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for length in arguments.lengths:
        for way in WAYS:
            rows.append(measure(arguments, length, way))
            say(str(rows[-1]))
    finish(arguments, rows)


if __name__ == "__main__":
    main()
