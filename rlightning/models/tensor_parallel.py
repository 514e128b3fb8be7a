"""Tensor parallelism: layers are split by transformers' plan for the model, and the vocabulary over all ranks."""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.counts import matches_plan, read_setting

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm of [1, T, heads, D], of which a rank has some heads: each rank's gradient is a part of the sum. Marking the
    # dimension of heads as sharded makes DTensor add the parts; otherwise they would silently be wrong.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
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
    parallelize_module(policy.base_model, mesh, plan_styles(policy))
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


def plan_styles(policy: PreTrainedModel) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel style of each module to be split, by its name within the base model.

    Raises a ConfigError if a module between split modules is missing in the plan.
    """
    plan = policy.config.get_text_config().base_model_tp_plan
    assert plan is not None
    styles = {
        name: _STYLES[style]()
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
