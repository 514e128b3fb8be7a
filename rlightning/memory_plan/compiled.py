"""Bytes that a compiled layer keeps for its backward: torch.compile's own decision, made on tensors without memory.

The compiler computes again in the backward what is cheap to compute, such as norms, activation functions and casts, and
keeps what is not, such as products of matrices. Which is which follows from the layer's graph, by the same partitioner.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call


def bytes_kept_by_compiled(layer: nn.Module, hidden_states: Tensor, arguments: dict[str, Any]) -> int:
    """Of one layer, its result included and its inputs not.

    Args:
        layer: whose parameters are fake tensors.
        hidden_states: [1, T, E], a fake tensor.
        arguments: that the layer takes beside them, tensors among them fake too.
    """
    num_bytes = 0

    def count(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        nonlocal num_bytes
        results: Any = gm.graph.output_node().args[0]
        nodes = [node for node in results if isinstance(node, torch.fx.Node)]
        given = {storage_of(node) for node in gm.graph.nodes if node.op == "placeholder"}
        sizes = {storage_of(node): node.meta["val"].untyped_storage().nbytes() for node in nodes if is_tensor(node)}
        num_bytes = sum(size for storage, size in sizes.items() if storage not in given)
        return boxed_nop(gm, example_inputs)

    def run(weights: dict[str, Tensor], hidden: Tensor, others: dict[str, Any]) -> Any:
        return functional_call(layer, weights, (hidden,), others)

    compiled = aot_function(
        run,
        fw_compiler=count,
        bw_compiler=boxed_nop,  # type: ignore[arg-type]  # typed for fewer inputs than it takes
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    compiled(weights, hidden_states.detach().requires_grad_(), arguments)
    return num_bytes


def is_tensor(node: torch.fx.Node) -> bool:
    """Whether a node of a graph stands for a tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def storage_of(node: torch.fx.Node) -> int | None:
    """What tells a node's memory from that of others; None if it has none."""
    return node.meta["val"].untyped_storage()._cdata if is_tensor(node) else None
