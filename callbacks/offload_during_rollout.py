"""Moves tensors that only the update needs to host memory while the engine uses the device."""

import logging
from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlightning.callbacks.throughput import log_metrics
from rlightning.errors import ConfigError
from rlightning.hooks import RunCallback
from rlightning.parallel.device import GIB
from rlightning.parallel.host_memory import HostMemory
from rlightning.protocols import HasOptimizer, HasOptimizers, HasRoles, Loop, StateDict, generates, has

log = logging.getLogger(__name__)


class OffloadDuringRollout(RunCallback):
    """Moves optimizer state, gradients or parameters to page-locked host memory during rollouts, and back.

    Optimizer state and gradients are offloaded when a rollout starts or weights are about to be sent, parameters after
    the engine has received them. Everything is restored before an update, an evaluation or a checkpoint. Tensors stay
    the same objects, so that torch's optimizers, the wrappers of Lightning, Fabric and accelerate, and FSDP2's shards
    are not affected. Tensors on the CPU are not moved.

    In a loop that is not Lightning's, the callback needs ``on_rollout_start`` or ``on_weight_sync_start``, and
    ``on_rollout_end``, or at the latest ``on_update_start``; for ``parameters`` also ``on_engine_wake`` after the
    engine has received the weights and ``on_engine_sleep`` when it has freed its memory. Optimizers are taken from
    ``loop.optimizers`` or ``loop.optimizer``, parameters from the optimizers and from ``module.parameters()``. At the
    end the loop calls ``teardown(loop, module, "fit")``. ``module.log_dict`` gets the metrics, if it exists.

    Args:
        optimizer: whether to move the optimizer's state.
        gradients: whether to move gradients; a loop that sets them to None has none to move.
        parameters: whether to move parameters, including those of frozen models in ``module.roles``. This requires an
            engine that reports when it wakes and sleeps.

    Attributes:
        last: the metrics of the last offload and return, by name (docs/metrics.md).
    """

    device_type = "cuda"
    """Type of the devices whose tensors are offloaded; tensors on other devices stay there."""

    runs_in = "workers"

    def __init__(self, *, optimizer: bool = True, gradients: bool = True, parameters: bool = False) -> None:
        super().__init__()
        if not (optimizer or gradients or parameters):
            raise ConfigError(
                "OffloadDuringRollout with optimizer=False, gradients=False and parameters=False moves nothing. "
                "Set one of them, or drop the callback."
            )
        self.optimizer, self.gradients, self.parameters = optimizer, gradients, parameters
        self.last: dict[str, float] = {}
        self._state, self._weights = HostMemory(), HostMemory()
        self._is_engine_awake = False
        self._offload_seconds = 0.0

    def begin_run(self) -> None:
        """Reset the metrics of an earlier run."""
        self.last = {}

    def drop_step(self) -> None:
        """Treat the engine as asleep: after an interrupted step ``on_engine_sleep`` is not called."""
        self._is_engine_awake = False
        self._offload_seconds = 0.0

    @property
    def moved_each_step(self) -> frozenset[str]:
        """Parts of the memory plan that are offloaded in each step, such as ``"optimizer_state"``."""
        parts = {"optimizer_state"} if self.optimizer else set()
        return frozenset(parts | ({"parameters", "frozen_models"} if self.parameters else set()))

    # Moving tensors to the host

    def on_rollout_start(self, trainer: Loop, module: object, prompts: object) -> None:
        """Offload optimizer state and gradients."""
        if generates(module) and self.is_needed(trainer, module):
            self._offload_state(trainer, module)

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Offload optimizer state and gradients, and restore the parameters, which are about to be sent."""
        self._weights.give_back()
        if self.is_needed(trainer, module):
            self._offload_state(trainer, module)

    def on_engine_wake(self, trainer: Loop, module: object) -> None:
        """Offload the parameters, since the engine has received them."""
        self._is_engine_awake = True
        if self.parameters and self.is_needed(trainer, module):
            self._offload_parameters(trainer, module)

    def is_needed(self, trainer: Loop, module: object) -> bool:
        """Return whether to offload tensors now: always True here; a subclass may offload only if memory is short."""
        return True

    # Moving tensors back

    def on_engine_sleep(self, trainer: Loop, module: object) -> None:
        """Move the offloaded tensors back to the device."""
        self._is_engine_awake = False
        self._restore(module)

    def on_rollout_end(self, trainer: Loop, module: object, batch: object) -> None:
        """Move the offloaded tensors back, unless an engine is awake: :meth:`on_engine_sleep` does it then."""
        if not self._is_engine_awake:
            self._restore(module)

    def on_validation_end(self, trainer: Loop, pl_module: object) -> None:
        """Move the offloaded tensors back, as after a rollout."""
        self.on_rollout_end(trainer, pl_module, None)

    on_test_end = on_predict_end = on_validation_end

    def on_update_start(self, trainer: Loop, module: object, batch: object) -> None:
        """Move the offloaded tensors back if they are still on the host."""
        self._restore(module)

    def on_save_checkpoint(self, trainer: Loop, pl_module: object, checkpoint: StateDict) -> None:
        """Move the offloaded tensors back before they are saved."""
        self._restore(None)  # no module: nothing is logged in the middle of a save

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Move the offloaded tensors back to their device; log an error if it lacks the memory."""
        super().on_exception(trainer, module, exception)
        try:
            self.teardown(trainer, module, "fit")
        except torch.OutOfMemoryError:
            log.error("%.1f GiB stay on the host: the engine still has their memory.", self.num_bytes / GIB)

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """Move the offloaded tensors back, and free the host memory."""
        super().teardown(trainer, module, stage)
        self._weights.close()
        self._state.close()

    # Implementation

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are on the host now."""
        return self._state.num_bytes + self._weights.num_bytes

    def _offload_state(self, trainer: Loop, module: object) -> None:
        begun = perf_counter()
        if self.optimizer:
            self._state.take(_optimizer_state(trainer), self.device_type)
        if self.gradients:
            gradients = (p.grad for p in _parameters(trainer, module) if p.grad is not None)
            self._state.take(gradients, self.device_type)
        self._offload_seconds += perf_counter() - begun

    def _offload_parameters(self, trainer: Loop, module: object) -> None:
        begun = perf_counter()
        self._weights.take(_parameters(trainer, module), self.device_type)
        self._offload_seconds += perf_counter() - begun

    def _restore(self, module: object) -> None:
        num_bytes = self.num_bytes
        if num_bytes:
            begun = perf_counter()
            self._weights.give_back()
            self._state.give_back()
            self.last = {
                "memory/offloaded_gib": num_bytes / GIB,
                "time/offload": self._offload_seconds,
                "time/restore": perf_counter() - begun,
            }
            log_metrics(module, self.last)
        self._offload_seconds = 0.0


def _optimizers(trainer: Loop) -> Iterator[Optimizer]:
    """Yield the loop's optimizers without the wrappers of Lightning, Fabric and accelerate."""
    found: Sequence[Optimizer] | Optimizer | None = trainer.optimizers if has(trainer, HasOptimizers) else None
    if not found and has(trainer, HasOptimizer):
        found = trainer.optimizer
    for optimizer in found if isinstance(found, Sequence) else [found] if found is not None else ():
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        yield optimizer


def _optimizer_state(trainer: Loop) -> Iterator[Tensor]:
    for optimizer in _optimizers(trainer):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _parameters(trainer: Loop, module: object) -> Iterator[Tensor]:
    """Yield the parameters of the optimizers, the module and its roles; some are yielded more than once."""
    for optimizer in _optimizers(trainer):
        for group in optimizer.param_groups:
            yield from group["params"]
    for owner in (module, *(module.roles.values() if has(module, HasRoles) else ())):
        if hasattr(owner, "parameters"):
            yield from owner.parameters()
