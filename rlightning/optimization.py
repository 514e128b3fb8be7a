"""The optimizer, its learning rate, and one guarded step of it."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rlightning.distributed import platform
from rlightning.errors import ConfigError
from rlightning.models.shards import local_tensor, with_local_tensor

log = logging.getLogger(__name__)

LRSchedule = Literal["constant", "linear", "cosine"]


def check_trainer(trainer: Trainer) -> None:
    """Refuse what Lightning would apply to the wrong thing, or to nothing: the module optimizes by hand."""
    if trainer.precision in ("16-mixed", "16-true"):
        raise ConfigError(
            f"trainer.precision={trainer.precision} needs a scaled loss, which this step's is not. Use bf16-mixed."
        )
    if trainer.precision == "bf16-true":
        log.warning(
            "trainer.precision=bf16-true keeps the weights themselves in bfloat16, which rounds off updates below "
            "1/256 of a weight or so: at a small lr nothing is learned. Use bf16-mixed."
        )
    check_step_options(
        accumulate_grad_batches=trainer.accumulate_grad_batches, gradient_clip_val=trainer.gradient_clip_val
    )


def check_step_options(*, accumulate_grad_batches: int, gradient_clip_val: float | None) -> None:
    """Refuse the Trainer's options that the module's own optimizer steps make meaningless."""
    rule = "has no effect here: the model steps its optimizer itself"
    if accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate_grad_batches} {rule}. "
            "Lower model.max_tokens_per_microbatch: micro-batches are accumulated by themselves."
        )
    if gradient_clip_val is not None:
        raise ConfigError(
            f"trainer.gradient_clip_val={gradient_clip_val} {rule}. Set model.max_grad_norm={gradient_clip_val}."
        )


def check_optimizer(
    *, lr: float, weight_decay: float, betas: tuple[float, float], warmup_steps: int, max_grad_norm: float
) -> None:
    """Refuse numbers with which nothing would be learned, before anything is loaded."""
    rules = {
        f"lr={lr} must be at least 0. Try 1e-6": lr >= 0,
        f"weight_decay={weight_decay} must be at least 0. Use 0 for none": weight_decay >= 0,
        f"betas={list(betas)} must be in [0, 1). Try [0.9, 0.999]": all(0 <= beta < 1 for beta in betas),
        f"warmup_steps={warmup_steps} must be at least 0. Use 0 for none": warmup_steps >= 0,
        f"max_grad_norm={max_grad_norm} must be above 0. Use .inf for no limit": max_grad_norm > 0,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"{rule}.")


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    is_state_on_host: bool = False,
) -> AdamW:
    """AdamW, fused where parameters are on a GPU or sharded; one-dimensional ones (norms, biases) do not decay.

    Args:
        parameters: plain or sharded; those that need no gradient are left out.
        lr: the peak of the learning rate.
        weight_decay: of matrices.
        betas: AdamW's.
        is_state_on_host: keep its state in the host's memory between steps.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    is_fused = any(p.is_cuda or isinstance(p, DTensor) for p in trained)
    return (HostStateAdamW if is_state_on_host else AdamW)(groups, lr=lr, betas=betas, fused=is_fused)


class HostStateAdamW(AdamW):
    """AdamW whose state is in the host's memory; a step brings it to the device, some parameters at a time."""

    bytes_at_a_time = 1 << 30
    """How much of the state is on the device at a time, unless one parameter's is more."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As AdamW's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameters in self._portions(group["params"]):
                    on_host = self._bring(parameters)
                    self.param_groups = [{**group, "params": parameters}]
                    super().step()
                    self._put_back(parameters, on_host)
        finally:
            self.param_groups = groups
        for device in {parameter.device for group in groups for parameter in group["params"]}:
            platform.synchronize_stream(device)  # what reads the state on the host does not wait for copies
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's, but that the state goes straight to the host."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                is_moment = isinstance(value, Tensor) and value.ndim > 0
                # AdamW counts its steps where it computes
                self.state[parameter][name] = _on_host(value, parameter) if is_moment else value.to(parameter.device)

    def _portions(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        portion: list[Tensor] = []
        num_bytes = 0
        for parameter in parameters:
            size = 2 * local_tensor(parameter).nbytes
            if portion and num_bytes + size > self.bytes_at_a_time:
                yield portion
                portion, num_bytes = [], 0
            portion.append(parameter)
            num_bytes += size
        if portion:
            yield portion

    def _bring(self, parameters: Sequence[Tensor]) -> dict[tuple[Tensor, str], Tensor]:
        """Copy moments to their parameters' device; those on the host, to be written to again."""
        on_host = {}
        for parameter, name, moment in self._moments(parameters):
            if moment.device != parameter.device:
                on_host[parameter, name] = moment
                copied = local_tensor(moment).to(parameter.device, non_blocking=True)
                self.state[parameter][name] = with_local_tensor(moment, copied)
        return on_host

    def _put_back(self, parameters: Sequence[Tensor], on_host: dict[tuple[Tensor, str], Tensor]) -> None:
        for parameter, name, moment in self._moments(parameters):
            if parameter.device.type == "cpu":
                continue
            local = local_tensor(moment)
            if (parameter, name) not in on_host:
                on_host[parameter, name] = _on_host(moment, parameter)
            kept = on_host[parameter, name]
            local_tensor(kept).copy_(local, non_blocking=True)
            self.state[parameter][name] = kept

    def _moments(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, str, Tensor]]:
        """Each parameter's moments and their names; not its count of steps, a scalar that stays where it is."""
        return [(p, name, value) for p in parameters for name, value in self.state[p].items() if value.ndim]


def _on_host(moment: Tensor, parameter: Tensor) -> Tensor:
    """A copy of ``moment`` in host memory, page-locked if its parameter is on a GPU."""
    local = local_tensor(moment)
    copied = torch.empty(local.shape, dtype=local.dtype, pin_memory=parameter.is_cuda)
    return with_local_tensor(moment, copied.copy_(local))


def make_lr_schedule(optimizer: AdamW, schedule: LRSchedule, *, warmup_steps: int, max_steps: int) -> LambdaLR:
    """Linear warm-up, then the schedule, both counted in rollout steps.

    Args:
        optimizer: whose learning rate is the peak.
        schedule: constant, or down to 0 at ``max_steps`` in a straight line or half a cosine wave.
        warmup_steps: the first step has ``1 / warmup_steps`` of the peak.
        max_steps: -1 if unlimited.
    """
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

    return LambdaLR(optimizer, factor)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
    """Scale gradients down to a global norm; drop them where they are not finite.

    Args:
        parameters: plain or sharded. If they are sharded, all ranks have to call this.
        max_norm: of all gradients together, over all shards.

    Returns:
        The norm before, and whether it was finite; plain scalars, equal on the ranks that share the parameters. Dropped
        gradients make the optimizer's step change nothing.
    """
    with_gradients = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    norm = global_norm(gradients)
    is_finite = norm.isfinite()
    if is_finite:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor.to(gradients[0].device))
    else:
        log.warning("The gradients' norm is %s: this optimizer step is skipped.", norm.item())
        for parameter in with_gradients:
            parameter.grad = None
    return norm, is_finite


@torch.no_grad()
def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, whole ones and shards, on whatever meshes.

    torch's own ``clip_grad_norm_`` takes one mesh only. With tensor parallelism there are two: embeddings and most
    norms are not cut by it.

    Returns:
        A plain scalar, float32 unless a tensor is of a wider type; 0 for no tensors.
    """
    # tensors by the groups of ranks over which their shards are spread
    spread: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for tensor in tensors:
        where = None
        if isinstance(tensor, DTensor):
            dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
            where = tensor.device_mesh, dims
        spread.setdefault(where, []).append(local_tensor(tensor))
    total = torch.zeros(())
    for where, parts in spread.items():
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        squares = torch.stack(torch._foreach_norm(parts, 2, dtype=dtype)).square().sum()
        if where is not None:
            mesh, split_dims = where
            squares = squares.to(mesh.device_type)  # gradients that are kept on the host are summed on the device
            for dim in split_dims:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total = total.to(squares.device) + squares
    return total.sqrt()
