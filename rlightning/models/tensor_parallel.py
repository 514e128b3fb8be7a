"""Tensor parallelism: layers are split by transformers' plan for the model, and the vocabulary over all ranks.

Parameters are DTensors, which FSDP, checkpoints and weight syncs read. Layers compute with this rank's part of them, as
plain tensors: on DTensors, the host takes some 20 ms to dispatch the operations of one layer, in which a GPU has
nothing to do. As in Megatron-LM (arXiv:1909.08053, section 3) a layer that is split by rows sums its outputs over the
ranks, and one that is split by columns the gradient of its inputs; here each layer sums its own, where Megatron-LM sums
once for all layers with the same inputs.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.counts import matches_plan, read_setting
from rlightning.parallel.sharding import local_tensor
from rlightning.torch_internals import stack_over_ranks, sum_over_ranks


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks of a group; the gradient, equal on all of them, is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_ranks(part, group)

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
        return sum_over_ranks(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Joins the ranks' parts of the last dimension; of the gradient, equal on all ranks, a rank takes its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return stack_over_ranks(part, group).movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(grad, ctx.group).contiguous(), None


def _own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), -1)[group.rank()]


class _SplitLinear(nn.Linear):
    """Base of linear layers of which each rank of ``group`` has a part."""

    group: dist.ProcessGroup


class ColumnLinear(_SplitLinear):
    """A linear layer that computes this rank's part of the outputs from inputs that are equal on all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., outputs of this rank] for inputs [..., I]."""
        bias = None if self.bias is None else local_tensor(self.bias)
        whole: Tensor = _SumGradients.apply(input, self.group)  # type: ignore[no-untyped-call]
        return linear(whole, local_tensor(self.weight), bias)


class GatheredColumnLinear(ColumnLinear):
    """A linear layer whose outputs are computed in parts, and gathered on all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., O], equal on all ranks, for inputs [..., I]."""
        whole: Tensor = _Gather.apply(super().forward(input), self.group)  # type: ignore[no-untyped-call]
        return whole


class RowLinear(_SplitLinear):
    """A linear layer that sums, over the ranks, what each computes from its part of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., O], equal on all ranks, for this rank's part of the inputs."""
        total: Tensor = _SumOverRanks.apply(linear(input, local_tensor(self.weight)), self.group)  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + local_tensor(self.bias).to(total.dtype)


class SplitRowLinear(RowLinear):
    """A linear layer that takes its rank's part of inputs that are equal on all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., O], equal on all ranks, for inputs [..., I]."""
        whole: Tensor = _SumGradients.apply(input, self.group)  # type: ignore[no-untyped-call]
        return super().forward(_own_part(whole, self.group))


_LINEAR: dict[str, tuple[type[_SplitLinear], int]] = {
    "colwise": (ColumnLinear, 0),
    "colwise_gather_output": (GatheredColumnLinear, 0),
    "rowwise": (RowLinear, 1),
    "rowwise_split_input": (SplitRowLinear, 1),
}
"""By the style in transformers' plan, the class of a linear layer, and the dimension in which its weight is split."""
_HEAD_STYLE = "replicated_with_grad_allreduce"
"""Style of a layer that works on this rank's heads with parameters that are equal on all ranks."""


def split_linear(layer: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Split a linear layer over the ranks of ``mesh``, in place."""
    kind, dimension = _LINEAR[style]
    _distribute(layer, mesh, {"weight": Shard(dimension), "bias": Replicate() if dimension else Shard(0)})
    layer.__class__ = kind
    vars(layer)["group"] = mesh.get_group()


def sum_parameter_gradients(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Have a layer that works on this rank's heads only, such as a norm, sum the gradients of its parameters.

    The parameters are equal on all ranks; of each gradient a rank computes the part of its heads.
    """
    group, names = mesh.get_group(), [name for name, _ in layer.named_parameters(recurse=False)]
    plain = copy.deepcopy(layer)  # computes with what it is given in the place of its parameters
    _distribute(layer, mesh, dict.fromkeys(names, Replicate()))

    def run(*args: object, **kwargs: object) -> object:
        parameters = {name: local_tensor(layer.get_parameter(name)) for name in names}
        summed = {name: _SumGradients.apply(own, group) for name, own in parameters.items()}  # type: ignore[no-untyped-call]
        return functional_call(plain, summed, args, kwargs)

    layer.forward = run


def _distribute(layer: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        parts = distribute_tensor(parameter.data, mesh, [placements[name]])
        layer.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))


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
    unknown = sorted(
        (style, name) for name, style in plan.items() if style not in {*_LINEAR, _HEAD_STYLE, *_VOCABULARY}
    )
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
    for name, style in plan_styles(policy).items():
        layer = policy.base_model.get_submodule(name)
        if style == _HEAD_STYLE:
            sum_parameter_gradients(layer, mesh)
        else:
            split_linear(layer, style, mesh)
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


def plan_styles(policy: PreTrainedModel) -> dict[str, str]:
    """Return the style in transformers' plan of each module to be split, by its name within the base model.

    Raises a ConfigError if a module between split modules is missing in the plan, or cannot be split.
    """
    plan = policy.config.get_text_config().base_model_tp_plan
    assert plan is not None
    styles = {
        name: style
        for pattern, style in plan.items()
        if style not in _VOCABULARY
        for name, _ in policy.base_model.named_modules()
        if matches_plan(name, pattern)
    }
    check_coverage(policy, set(styles))
    for name, style in styles.items():
        layer = policy.base_model.get_submodule(name)
        if style in _LINEAR and type(layer) is not nn.Linear:
            raise ConfigError(
                f"{type(policy).__name__} cannot be tensor parallel: its '{name}' is a {type(layer).__name__}, which "
                "cannot be split, as nn.Linear can. Use tensor_parallel_size=1."
            )
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
