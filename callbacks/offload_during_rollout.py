"""What only the update needs, moved to host memory while the engine needs the device."""

import logging
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlightning.callbacks.throughput import log_metrics
from rlightning.errors import ConfigError
from rlightning.hooks import RunCallback
from rlightning.parallel.device import GIB
from rlightning.parallel.host_memory import HostMemory
from rlightning.protocols import HasOptimizer, HasOptimizers, HasRoles, Loop, generates, has

log = logging.getLogger(__name__)


class OffloadDuringRollout(RunCallback):
    """Moves optimizer state, gradients or parameters to page-locked host memory during rollouts, and back.

    Optimizer state and gradients leave when a rollout starts or weights are about to be sent, parameters once the
    engine has them. All of it is back before anything trains, evaluates or saves. Tensors stay the objects that they
    are: torch's optimizers, Lightning's and Fabric's wrappers of them, accelerate's, and FSDP2's shards go on as if
    nothing had happened. Tensors on the CPU stay where they are.

    From a loop that is not Lightning's it needs ``on_rollout_start`` or ``on_weight_sync_start``, and
    ``on_rollout_end``, or at the latest ``on_update_start``; for ``parameters`` also ``on_engine_wake`` once the engine
    has the weights and ``on_engine_sleep`` when it has given its memory back. It takes the optimizers from
    ``loop.optimizers`` or ``loop.optimizer``, the parameters from them and from ``module.parameters()``. At the end the
    loop calls ``teardown(loop, module, "fit")``. ``module.log_dict`` gets the metrics, where there is one.

    Args:
        optimizer: move the optimizer's state.
        gradients: move gradients; a loop that sets them to None has none to move.
        parameters: move parameters, those of frozen models in ``module.roles`` too. Only an engine that says when it
            wakes and sleeps makes them leave.

    Attributes:
        last: the metrics of the last offload and return, by name (docs/metrics.md).
    """

    device_type = "cuda"
    """Tensors elsewhere stay as they are."""

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
        """Forget what was moved in the run before."""
        self.last = {}

    def drop_step(self) -> None:
        """The engine of a step that was cut short has not said that it sleeps, and never will."""
        self._is_engine_awake = False
        self._offload_seconds = 0.0

    @property
    def moved_each_step(self) -> frozenset[str]:
        """The parts of a phase that a memory plan leaves out while an engine is awake."""
        parts = {"optimizer_state"} if self.optimizer else set()
        return frozenset(parts | ({"parameters", "frozen_models"} if self.parameters else set()))

    # Away

    def on_rollout_start(self, trainer: Loop, module: object, prompts: object) -> None:
        """Make room for the engine."""
        if generates(module) and self.is_needed(trainer, module):
            self._offload_state(trainer, module)

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Make room for the engine, also in a validation; the parameters are about to be read."""
        self._weights.give_back()
        if self.is_needed(trainer, module):
            self._offload_state(trainer, module)

    def on_engine_wake(self, trainer: Loop, module: object) -> None:
        """Move the parameters: the engine has them."""
        self._is_engine_awake = True
        if self.parameters and self.is_needed(trainer, module):
            self._offload_parameters(trainer, module)

    def is_needed(self, trainer: Loop, module: object) -> bool:
        """Whether anything has to be moved now."""
        return True

    # And back

    def on_engine_sleep(self, trainer: Loop, module: object) -> None:
        """Take the engine's place."""
        self._is_engine_awake = False
        self._restore(module)

    def on_rollout_end(self, trainer: Loop, module: object, batch: object) -> None:
        """Take the device again, unless an engine is about to say when it is free."""
        if not self._is_engine_awake:
            self._restore(module)

    def on_validation_end(self, trainer: Loop, pl_module: object) -> None:
        """As after a rollout."""
        self.on_rollout_end(trainer, pl_module, None)

    on_test_end = on_predict_end = on_validation_end

    def on_update_start(self, trainer: Loop, module: object, batch: object) -> None:
        """Take the device again, if nothing else has said that it is free."""
        self._restore(module)

    def on_save_checkpoint(self, trainer: Loop, pl_module: object, checkpoint: dict[str, Any]) -> None:
        """Have everything there to be saved."""
        self._restore(None)  # in the middle of a save there is no logging

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Have everything on its device again."""
        super().on_exception(trainer, module, exception)
        try:
            self.teardown(trainer, module, "fit")
        except torch.OutOfMemoryError:
            log.error("%.1f GiB stay on the host: the engine still has their memory.", self.num_bytes / GIB)

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """Take everything back; end of the host memory."""
        super().teardown(trainer, module, stage)
        self._weights.close()
        self._state.close()

    # How

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host now."""
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


def _optimizers(trainer: Loop) -> Iterator[Any]:
    """The loop's optimizers, without the wrappers that Lightning, Fabric and accelerate put around them."""
    found: Sequence[Optimizer] | Optimizer | None = trainer.optimizers if has(trainer, HasOptimizers) else None
    if not found and has(trainer, HasOptimizer):
        found = trainer.optimizer
    for optimizer in found if isinstance(found, list | tuple) else [found] if found is not None else ():
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        yield optimizer


def _optimizer_state(trainer: Loop) -> Iterator[Tensor]:
    for optimizer in _optimizers(trainer):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _parameters(trainer: Loop, module: object) -> Iterator[Tensor]:
    """The optimizers', the module's and its roles', some of them more than once."""
    for optimizer in _optimizers(trainer):
        for group in optimizer.param_groups:
            yield from group["params"]
    for owner in (module, *(module.roles.values() if has(module, HasRoles) else ())):
        if hasattr(owner, "parameters"):
            yield from owner.parameters()
