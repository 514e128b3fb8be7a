"""Attention over packed sequences, forward and backward: kernels, and what shared key/value heads change.

    python benchmarks/attention_kernels.py
    python benchmarks/attention_kernels.py --heads 32 --key-heads 8 --length 4096

Ways: "varlen, repeated" is varlen_attn with as many key/value heads as query heads, copied; "varlen, shared" gives it
the fewer ones; "cuDNN" is PyTorch's private binding of cuDNN's kernels, which varlen_attn knows of and does not use.

Prints one table: milliseconds of a forward and of forward and backward together, the TFLOP/s of both (causal, so half
of the square), seconds of the first call and of a first call with another number of tokens, in which a plan may be
made, and the relative errors of the result and of the keys' gradient against float32. A way that fails says why.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from launch import benchmark_parser, finish, say
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlightning.models.attention import SHARED_HEADS
from rlightning.parallel.device import synchronize

Way = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def repeated(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """[T, H, D] by varlen_attn on copied heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))


def shared(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """[T, H, D] by varlen_attn on the heads as they are."""
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **SHARED_HEADS)


class _CuDNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        found = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, bounds, bounds, longest, longest, True, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, bounds, found[0], found[1], found[6], found[7])
        ctx.longest = longest
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, sums, seed, offset = ctx.saved_tensors
        n = ctx.longest
        arguments = (grad.contiguous(), q, k, v, out, sums, seed, offset, None, bounds, bounds, n, n, 0.0, True)
        return (*torch.ops.aten._cudnn_attention_backward(*arguments), None, None)


def cudnn(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """[T, H, D] by cuDNN on copied heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return _CuDNN.apply(q, k, v, bounds, longest)


WAYS: dict[str, Way] = {"varlen, repeated": repeated, "varlen, shared": shared, "cuDNN": cudnn}


def make_inputs(arguments: argparse.Namespace, num_sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and bounds of equal sequences."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = num_sequences * arguments.length
    q, k, v = (
        torch.randn(tokens, heads, arguments.head_size, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (arguments.heads, arguments.key_heads, arguments.key_heads)
    )
    return q, k, v, torch.arange(num_sequences + 1, device="cuda", dtype=torch.int32) * arguments.length


def time_calls(call: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Milliseconds of a call in the mean, the device waited for."""
    call()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repetitions):
        call()
    synchronize(device)
    return 1000 * (time.perf_counter() - begun) / repetitions


def reference(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Result and gradient of the keys for the first sequence, in float32, where the loss is the sum of the result."""
    q, k, v = (x[:length].detach().float().transpose(0, 1).requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    (grad,) = torch.autograd.grad(out.sum(), k)
    return out[0].transpose(0, 1), grad.transpose(0, 1)


def measure(arguments: argparse.Namespace, way: Way) -> dict[str, Any]:
    """One line."""
    length, count = arguments.length, max(arguments.tokens // arguments.length, 2)
    firsts: list[float] = []
    for num_sequences in (count - 1, count):
        q, k, v, bounds = make_inputs(arguments, num_sequences)
        synchronize(q.device)
        begun = time.perf_counter()
        out = way(q, k, v, bounds, length)
        _, grad, _ = torch.autograd.grad(out.sum(), (q, k, v))
        synchronize(q.device)
        firsts.append(time.perf_counter() - begun)
    exact_out, exact_grad = reference(q, k, v, length)

    def both() -> None:
        torch.autograd.grad(way(q, k, v, bounds, length).sum(), (q, k, v))

    def forward() -> None:
        with torch.no_grad():
            way(q, k, v, bounds, length)

    ahead, whole = (time_calls(call, q.device, arguments.repetitions) for call in (forward, both))
    pairs = count * length * (length + 1) / 2
    operations = 4 * arguments.heads * arguments.head_size * pairs
    return {
        "forward, ms": ahead,
        "with backward, ms": whole,
        "TFLOP/s": 3.5 * operations / whole / 1e9,
        "first, s": firsts[0],
        "other size, s": firsts[1],
        "error": float((out.detach()[:length] - exact_out).norm() / exact_out.norm()),
        "error of gradient": float((grad[:length] - exact_grad).norm() / exact_grad.norm()),
        "end": "ok",
    }


def main() -> None:
    """Measure each way."""
    parser = benchmark_parser(__doc__ or "", "attention_kernels", steps=0, model=None)
    parser.add_argument("--tokens", type=int, default=32256, help="of a micro-batch, about (32256)")
    parser.add_argument("--length", type=int, default=1152, help="of each sequence (1152)")
    parser.add_argument("--heads", type=int, default=16, help="of queries (16)")
    parser.add_argument("--key-heads", type=int, default=8, help="of keys and values (8)")
    parser.add_argument("--head-size", type=int, default=128, help="(128)")
    parser.add_argument("--repetitions", type=int, default=20, help="(20)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    blank = dict.fromkeys(
        ("forward, ms", "with backward, ms", "TFLOP/s", "first, s", "other size, s", "error", "error of gradient")
    )
    for name, way in WAYS.items():
        try:
            row = measure(arguments, way)
        except (RuntimeError, TypeError, ValueError) as error:
            row = blank | {"end": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
        rows.append({"way": name, **row})
        say(str(rows[-1]))
    finish(arguments, rows)


if __name__ == "__main__":
    main()
