"""Tensor parallelism: layers are split by transformers' plan for the model, and the vocabulary over all ranks.

Parameters are DTensors, which FSDP, checkpoints and weight syncs read. Layers compute with this rank's part of them, as
plain tensors: dispatching each operation of a layer on DTensors takes some 20 ms of the host's time, in which a GPU
does nothing. The collectives are those of Megatron-LM (arXiv:1909.08053, section 3): a sum of the outputs of layers
split by rows, and a sum of the gradients of the inputs of layers split by columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.counts import matches_plan, read_setting
from rlightning.parallel.sharding import local_tensor


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks of a group; the gradient, equal on all of them, is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """Returns a tensor that is equal on all ranks of a group, and sums its gradient over them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class ColumnLinear(nn.Linear):
    """A linear layer that computes this rank's part of the outputs from inputs that are equal on all ranks.

    Attributes:
        group: the ranks that have the other parts.
    """

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., outputs of this rank] for inputs [..., I]."""
        bias = None if self.bias is None else local_tensor(self.bias)
        whole: Tensor = _SumGradients.apply(input, self.group)  # type: ignore[no-untyped-call]
        return linear(whole, local_tensor(self.weight), bias)


class RowLinear(nn.Linear):
    """A linear layer that sums, over the ranks, what each computes from its part of the inputs.

    Attributes:
        group: the ranks that have the other parts.
    """

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., O], equal on all ranks, for this rank's part of the inputs."""
        total: Tensor = _SumOverRanks.apply(linear(input, local_tensor(self.weight)), self.group)  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + local_tensor(self.bias)


def split_columns(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split a linear layer by its outputs, in place (:class:`ColumnLinear`)."""
    _replace(layer, mesh, ColumnLinear, weight=Shard(0), bias=Shard(0))


def split_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split a linear layer by its inputs, in place (:class:`RowLinear`)."""
    _replace(layer, mesh, RowLinear, weight=Shard(1), bias=Replicate())


def _replace(layer: nn.Module, mesh: DeviceMesh, kind: type[ColumnLinear | RowLinear], **placements: Placement) -> None:
    if type(layer) is not nn.Linear:
        raise ConfigError(
            f"a layer of class {type(layer).__name__} cannot be split by tensor parallelism, only nn.Linear. "
            "Use tensor_parallel_size=1."
        )
    _distribute(layer, mesh, placements)
    layer.__class__ = kind
    vars(layer)["group"] = mesh.get_group()


def sum_parameter_gradients(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Have a layer that works on this rank's heads only, such as a norm, sum the gradients of its parameters.

    The parameters are equal on all ranks; of each gradient a rank computes the part of its heads.
    """
    group, names = mesh.get_group(), [name for name, _ in layer.named_parameters(recurse=False)]
    _distribute(layer, mesh, dict.fromkeys(names, Replicate()))
    forward = layer.forward

    def run(*args: object, **kwargs: object) -> object:
        parameters = {name: local_tensor(layer.get_parameter(name)) for name in names}
        # In the instance's dictionary they come before the parameters, which nn.Module looks up elsewhere.
        vars(layer).update({name: _SumGradients.apply(own, group) for name, own in parameters.items()})  # type: ignore[no-untyped-call]
        try:
            return forward(*args, **kwargs)
        finally:
            for name in names:
                del vars(layer)[name]

    layer.forward = run


def _distribute(layer: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        parts = distribute_tensor(parameter.data, mesh, [placements[name]])
        layer.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))


_STYLES: dict[str, Callable[[nn.Module, DeviceMesh], object]] = {
    "colwise": split_columns,
    "rowwise": split_rows,
    "colwise_gather_output": lambda layer, mesh: parallelize_module(
        layer, mesh, ColwiseParallel(output_layouts=Replicate())
    ),
    "rowwise_split_input": lambda layer, mesh: parallelize_module(
        layer, mesh, RowwiseParallel(input_layouts=Replicate())
    ),
    "replicated_with_grad_allreduce": sum_parameter_gradients,
}
"""How a module is split, by the style in transformers' plan."""
_VOCABULARY = {"embedding_rowwise"}
"""Styles in a model's plan that :func:`cut_vocabulary` replaces, for every model."""


def check_tensor_parallel(model: str, config: PreTrainedConfig, size: int) -> None:
    """Raise a ConfigError that names the violated rule if a model cannot be split over ``size`` ranks."""
    if size == 1:
        return
    plan = read_setting(config, "base_model_tp_plan")
    way_out = "Use tensor_parallel_size=1."
    prefix = f"tensor_parallel_size={size} does not fit model='{model}' ({config.model_type}):"
    if not plan:
        raise ConfigError(f"{prefix} transformers ships no plan for it. {way_out}")
    unknown = sorted((style, name) for name, style in plan.items() if style not in _STYLES.keys() | _VOCABULARY)
    if unknown:
        style, name = unknown[0]
        raise ConfigError(f"{prefix} its plan asks for '{style}' of '{name}', which is not supported. {way_out}")
    heads = config.get_text_config().num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = read_setting(config, name) or heads
        if count % size:
            raise ConfigError(f"{prefix} its {name}={count} cannot be split over {size} ranks. Use a divisor of it.")


def parallelize(policy: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the policy's matrices over ``mesh`` as DTensors; activations between layers stay replicated.

    The policy must be on the meta device, and checked by :func:`check_tensor_parallel`; the mesh has one dimension,
    this rank's tensor-parallel group.
    """
    for name, split in plan_styles(policy).items():
        split(policy.base_model.get_submodule(name), mesh)
    cut_vocabulary(policy, mesh)


def cut_vocabulary(policy: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split embedding and output layer over the ranks of ``mesh`` by rows of the vocabulary; the last rank has fewer
    rows if their number is not divisible.

    :func:`~rlightning.models.output_layer.chunked_logprobs` uses a rank's part of the output layer; otherwise the layer
    returns all logits.
    """
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding) and head is not None
    is_tied = head.weight is embedding.weight
    embedding.weight = nn.Parameter(distribute_tensor(embedding.weight, mesh, [Shard(0)]))
    embedding.register_forward_pre_hook(lambda _, inputs: DTensor.from_local(inputs[0], mesh, [Replicate()]))
    # Not RowwiseParallel, whose asynchronous sum is a tensor subclass for which the first layer would be compiled.
    embedding.register_forward_hook(lambda _, inputs, found: found.redistribute(placements=[Replicate()]).to_local())
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if is_tied:
        head.weight = embedding.weight


def plan_styles(policy: PreTrainedModel) -> dict[str, Callable[[nn.Module, DeviceMesh], object]]:
    """Return the function that splits each module to be split, by the module's name within the base model.

    Raises a ConfigError if a module between split modules is missing in the plan.
    """
    plan = policy.config.get_text_config().base_model_tp_plan
    assert plan is not None
    styles = {
        name: _STYLES[style]
        for pattern, style in plan.items()
        if style not in _VOCABULARY
        for name, _ in policy.base_model.named_modules()
        if matches_plan(name, pattern)
    }
    check_coverage(policy, set(styles))
    return styles


def check_coverage(policy: PreTrainedModel, planned: set[str]) -> None:
    """Raise a ConfigError if a module has layers that the tensor-parallel plan splits, and a parameter that the plan
    lacks, such as a norm of attention heads.

    Each rank would apply the whole parameter to its part of the activations, and compute only a part of its gradient.
    ``planned`` are the names of the modules to split, within the base model.
    """
    parents = {name.rpartition(".")[0] for name in planned}
    for name, _ in policy.base_model.named_parameters():
        owners = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if any(owner in parents for owner in owners) and not any(owner in planned for owner in owners):
            raise ConfigError(
                f"{type(policy).__name__} cannot be tensor parallel: its '{name}' works on parts of cut layers, and "
                "transformers' plan does not say how. Use tensor_parallel_size=1."
            )
