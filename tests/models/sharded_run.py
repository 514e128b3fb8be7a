"""Loads models in shards and compares them with whole ones; run on every rank."""

import logging
import math
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import make_sequences, packed_inputs
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlightning.errors import ConfigError
from rlightning.models import layers, load_policy, output_layer, packed_logprobs
from rlightning.models.sharded_policy import load_sharded_policy
from rlightning.optim.optimizer import clip_gradients
from rlightning.parallel.sharding import Sharding, local_tensor
from rlightning.types import RolloutBatch
from rlightning.types.supports import Supports


def compare(
    folder: str, sizes: tuple[int, int, int], *, gradient_checkpointing: bool = False, compiles_layers: bool = False
) -> dict[str, Any]:
    """Weights, buffers, log-probabilities and gradients of a sharded model, against the whole one."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    log = RecordLog()
    try:
        sharded = load_sharded_policy(folder, Sharding(mesh, torch.device("cpu")))
    except ConfigError as error:
        return {"error": str(error)}
    if compiles_layers:
        layers.BACKEND = "aot_eager"  # all of torch.compile but for the code it writes
        layers.compile_layers(sharded)
    if gradient_checkpointing:
        layers.checkpoint_layers(sharded, 1)
    whole = load_policy(folder)
    weights: dict[str, Any] = dict(sharded.named_parameters())
    expected = dict(whole.named_parameters())
    found: dict[str, Any] = {"log": log.close(), "names": list(weights) == list(expected)}
    found["weights"] = all(torch.equal(weights[name].full_tensor(), weight) for name, weight in expected.items())
    buffers = dict(sharded.named_buffers())
    found["buffers"] = all(torch.equal(buffers[name], buffer) for name, buffer in whole.named_buffers())
    found["share"] = sum(local_bytes(weight) for weight in weights.values()) / sum(w.nbytes for w in expected.values())
    batch = RolloutBatch.of_sequences([torch.cat(make_sequences()).tolist()])
    # of every other token, itself and tokens of all parts of the vocabulary
    (sample,) = batch.completions
    wide = range(0, whole.config.vocab_size, 7)
    rows = [{token, *wide} if place % 2 else set() for place, token in enumerate(sample.token_ids)]
    sample.supports = Supports(chain.from_iterable(rows), map(len, rows))
    results = []
    for model in (whole, sharded):
        with torch.no_grad():
            before, _ = packed_logprobs(model, batch, temperature=0.7)
        keeps = {"keeps_logits": model is sharded}
        logprobs, entropy = packed_logprobs(model, batch, temperature=0.7, needs_entropy_grad=True, **keeps)
        ((logprobs * torch.arange(len(logprobs))).sum() + entropy.sum()).backward()
        results.append((before, logprobs.detach(), entropy.detach()))
    inputs = packed_inputs([batch.token_ids])
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (whole, sharded)]
    found["logits"] = ((logits[0] - logits[1]).norm() / logits[0].norm()).item()
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["shards after no_grad"] = all(isinstance(weight, DTensor) for weight in sharded.parameters())
    found["logprobs"] = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    found["gradients"] = max(
        ((weights[name].grad.full_tensor() - weight.grad).norm() / weight.grad.norm()).item()
        for name, weight in expected.items()
        if weight.grad is not None
    )
    return found


def route(folder: str) -> list[str]:
    """Dtypes of the last layer's router under autocast: of its weights, gathered, and of its scores."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    policy = load_sharded_policy(folder, Sharding(mesh, torch.device("cpu"), compute_dtype=torch.bfloat16))
    found: list[str] = []
    policy.model.layers[-1].mlp.gate.register_forward_hook(
        lambda router, _, results: found.extend(map(str, (router.weight.dtype, results[0].dtype)))
    )
    with torch.autocast("cpu", torch.bfloat16):
        policy(**packed_inputs(make_sequences())).logits.sum().backward()
    return found


def clip(rank: int) -> dict[str, Any]:
    """Clip the gradients of parameters on three meshes; then with one that is not finite on rank 1 alone."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    split = [Shard(0), Replicate()]
    parameters: list[Any] = [
        nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh["shard"], [Shard(0)])),
        nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh["shard", "tensor_parallel"], split)),
        nn.Parameter(distribute_tensor(torch.zeros(1), mesh["shard"], [Shard(0)])),
        nn.Parameter(torch.zeros(2)),
    ]
    found = {}
    for name, bad in (("finite", 1.0), ("not finite", math.nan)):
        for parameter, value in zip(parameters, (1.0, 1.0, 2.0, 4.0), strict=True):
            parameter.grad = torch.full_like(parameter, value)
        if rank == 1:
            local_tensor(parameters[0].grad)[0, 0] *= bad
        norm, is_finite = clip_gradients(parameters, 1.3)
        left = [None if p.grad is None else local_tensor(p.grad).flatten().tolist() for p in parameters]
        found[name] = {"norm": norm.item(), "is_finite": bool(is_finite), "left": left}
    return found


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of this rank's shard of a tensor."""
    assert isinstance(tensor, DTensor)
    return local_tensor(tensor).nbytes


class RecordLog(logging.Handler):
    """Messages of the package until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.logger = logging.getLogger("rlightning")
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def close(self) -> list[str]:  # type: ignore[override]
        """The messages."""
        self.logger.removeHandler(self)
        return self.messages


def compare_all(folder: Path, cases: list[Any], routed: str) -> dict[str, Any]:
    """Compare each of ``cases``: model folder, [replicate, shard, tensor_parallel], arguments; then clip and route."""
    output_layer.CHUNK_BYTES = 10 * 41 * 4  # some chunks of ten tokens
    dist.init_process_group("gloo")
    results = [compare(model, tuple(sizes), **arguments) for model, sizes, arguments in cases]
    others = {"clip": clip(dist.get_rank()), "route": route(routed)}
    dist.destroy_process_group()
    return {"results": results, **others}
