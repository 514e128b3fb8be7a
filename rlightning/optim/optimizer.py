"""Constructs a model's AdamW: parameter groups, learning rate schedule, and clipping by the global gradient norm."""

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlightning.errors import ConfigError, check_rules, did_you_mean
from rlightning.optim import OptimizerStates, StoredMomentsAdamW, fetch_all
from rlightning.parallel.saved_weights import check_optimizer_state
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import StateDict
from rlightning.torch_internals import AdamW, norms, scale_tensors

log = logging.getLogger(__name__)

LRSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """The settings of a model's optimizer and learning rate schedule.

    Attributes:
        lr: the peak of the learning rate.
        weight_decay: weight decay of the parameters to which it applies (:func:`does_decay`).
        betas: AdamW's betas.
        warmup_steps: rollout steps over which the learning rate rises; the first has ``1 / warmup_steps`` of the peak.
        lr_schedule: the schedule afterwards: constant, or a linear or cosine decay to 0 at the last step.
        max_grad_norm: norm to which the model's gradients are clipped.
        optimizer_states: format of the moments between steps: 8, 4 or 2 bytes a parameter.
    """

    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 0
    lr_schedule: LRSchedule = "constant"
    max_grad_norm: float = 1.0
    optimizer_states: OptimizerStates = "float32"

    def __post_init__(self) -> None:
        """Raise a ConfigError for unknown names and for values with which nothing would be learned."""
        lr, decay, betas, states = self.lr, self.weight_decay, self.betas, self.optimizer_states
        check_rules(
            {
                f"lr={lr} must be at least 0. Try 1e-6": lr >= 0,
                f"lr={lr} must be finite. Try 1e-6": lr < math.inf,
                f"weight_decay={decay} must be at least 0. Use 0 for none": decay >= 0,
                f"weight_decay={decay} must be finite. Use 0 for none": decay < math.inf,
                f"betas={list(betas)} must be in [0, 1). Try [0.9, 0.999]": all(0 <= beta < 1 for beta in betas),
                f"warmup_steps={self.warmup_steps} must be at least 0. Use 0 for none": self.warmup_steps >= 0,
                f"max_grad_norm={self.max_grad_norm} must be above 0. Use .inf for no limit": self.max_grad_norm > 0,
            }
        )
        if states not in (known := get_args(OptimizerStates)):
            raise ConfigError(f"optimizer_states='{states}' is unknown. {did_you_mean(states, known)}")


def does_decay(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter of a module: not to biases, norm gains and other vectors.

    The number of dimensions does not decide this: biases may have a row for each expert, a norm of queries a row for
    each head.
    """
    is_norm = "norm" in type(module).__name__.lower() or "norm" in name
    is_excluded = bool(vars(parameter).get("_no_weight_decay"))  # set by transformers' state space models
    return not (is_norm or "bias" in name or is_excluded or parameter.ndim < 2)


Split = tuple[list[nn.Parameter], list[nn.Parameter]]
"""Parameters with weight decay, and parameters without."""


def split_by_decay(network: nn.Module, *, but: Collection[nn.Parameter] = ()) -> Split:
    """Return the trained parameters with weight decay, and those without, in order; those in ``but`` are left out."""
    decays: dict[nn.Parameter, bool] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in but:
                decays.setdefault(parameter, does_decay(module, name, parameter))
    return [p for p, does in decays.items() if does], [p for p, does in decays.items() if not does]


def make_optimizer(settings: AdamWSettings, *splits: Split, is_state_on_host: bool = False, name: str = "") -> AdamW:
    """Return AdamW for a model, fused if parameters are on a GPU or sharded.

    Args:
        settings: learning rate, betas and the like.
        splits: pairs of parameters with and without weight decay, which become two groups; a group cannot contain both
            sharded and whole parameters.
        is_state_on_host: keep the state in host memory between steps.
        name: name of the groups, for the metrics.
    """
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay} | ({"name": name} if name else {})
        for split in splits
        for parameters, decay in zip(split, (settings.weight_decay, 0.0), strict=True)
    ]
    is_fused = any(p.is_cuda or isinstance(p, DTensor) for group in groups for p in group["params"])
    arguments: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "fused": is_fused}
    optimizer: AdamW
    if settings.optimizer_states != "float32" or is_state_on_host:
        optimizer = StoredMomentsAdamW(
            groups, states=settings.optimizer_states, is_state_on_host=is_state_on_host, **arguments
        )
    else:
        optimizer = AdamW(groups, **arguments)
        optimizer.register_load_state_dict_pre_hook(fetch_all)  # for checkpoints of runs with other optimizer states
    optimizer.register_load_state_dict_pre_hook(keep_settings, prepend=True)
    return optimizer


PROGRESS = ("params", "num_steps")
"""Keys of an optimizer's groups that a checkpoint restores; others, such as ``lr``, come from the configuration."""


def keep_settings(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Return a checkpoint's optimizer state dict with this run's settings, such as ``lr``, in place of the saved ones.

    Raises:
        ConfigError: the saved parameter groups have other sizes than the optimizer's.
    """
    check_optimizer_state(state_dict, optimizer)
    groups = [
        {**saved, **{name: value for name, value in own.items() if name not in PROGRESS}}
        for saved, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}


class ConfiguredLR(LambdaLR):
    """A learning rate schedule that resumes at a checkpoint's step, with the shape of this run's configuration."""

    def add_groups(self) -> None:
        """Apply the first group's schedule to parameter groups that were added to the optimizer after construction."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
            self.lr_lambdas.append(self.lr_lambdas[0])
            group["lr"] = group["initial_lr"] * self.lr_lambdas[0](self.last_epoch)
            self._last_lr.append(group["lr"])

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the number of finished steps, and set the learning rate of this run's schedule at that step."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = [
            base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def make_lr_schedule(optimizer: Optimizer, settings: AdamWSettings, *, max_steps: int) -> ConfiguredLR:
    """Return a schedule of linear warm-up and decay, both counted in rollout steps.

    The peak is the learning rate of each of the optimizer's groups. ``max_steps`` is -1 for a run of unlimited length.
    """
    schedule, warmup_steps = settings.lr_schedule, settings.warmup_steps
    if schedule != "constant" and max_steps <= warmup_steps:
        raise ConfigError(
            f"lr_schedule='{schedule}' needs to know where it ends, after warmup_steps={warmup_steps}, but "
            f"trainer.max_steps={max_steps}. Set trainer.max_steps, or use lr_schedule='constant'."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(max_steps - warmup_steps, 1))
        match schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))

    return ConfiguredLR(optimizer, factor)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip gradients in place to a global norm, or set them to None if it is not finite; return the norm.

    Args:
        parameters: plain or sharded; for sharded ones this is a collective.
        max_norm: maximum norm of all gradients together, over all shards.

    Returns:
        The norm before clipping, and whether it was finite; plain scalars, equal on the ranks that share the
        parameters. With dropped gradients the optimizer's step changes nothing.
    """
    with_gradients = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    norm = global_norm(gradients)
    is_finite = norm.isfinite()
    if is_finite:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            scale_tensors([local_tensor(gradient) for gradient in gradients], factor.to(gradients[0].device))
    else:
        log.warning("The gradients' norm is %s: this optimizer step is skipped.", norm.item())
        for parameter in with_gradients:
            parameter.grad = None
    return norm, is_finite


@torch.no_grad()
def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors together; a collective if some are sharded, over any meshes.

    torch's ``clip_grad_norm_`` supports one mesh only. With tensor parallelism there are two: norm layers are not
    split.

    Returns:
        A plain scalar, float32 unless a tensor has a wider dtype; 0 without tensors.
    """
    # tensors by the groups of ranks over which their shards are spread
    spread: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for tensor in tensors:
        where = None
        if isinstance(tensor, DTensor):
            dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
            where = tensor.device_mesh, dims
        spread.setdefault(where, []).append(local_tensor(tensor))
    total: Tensor | None = None
    for where, parts in spread.items():
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        squares = torch.stack(norms(parts, dtype)).square().sum()
        if where is not None:
            mesh, split_dims = where
            squares = squares.to(mesh.device_type)  # norms of gradients on the host are summed on the device
            for dim in split_dims:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total = squares if total is None else total.to(squares.device) + squares
    return torch.zeros(()) if total is None else total.sqrt()
