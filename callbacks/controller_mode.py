"""Sets the role of this process: one of equal ranks, a controller without a device, or a controller's worker."""

import logging

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, check_repeated
from rlightning.parallel import device as platform
from rlightning.parallel.execution_mode import (
    ExecutionMode,
    RequestedMode,
    check_execution_mode,
    resolve_execution_mode,
)
from rlightning.protocols import HasStrategy, Loop, callbacks_of, has

log = logging.getLogger(__name__)


class ControllerMode(RLCallback):
    """Sets whether this process is a rank of equal processes (SPMD), a controller, or a controller's worker.

    The mode is set before a device is used (:mod:`~rlightning.parallel.execution_mode`). A controller has no model and
    never creates a CUDA context: calls that synchronize a device or read its memory do nothing. Without this callback a
    process is SPMD.

    In a loop that is not Lightning's, call ``setup(loop, module, "fit")`` before the loop's first use of a device.
    ``loop.strategy``, if it exists, may declare an ``execution_mode``, and in a worker a ``controller``.

    Args:
        mode: "auto" for the strategy's mode, or "spmd" if it declares none.
        controller: name or address of a worker's controller, if the strategy does not have it.

    Attributes:
        resolved: the mode, after ``setup``.
    """

    def __init__(self, mode: RequestedMode = "auto", *, controller: str | None = None) -> None:
        super().__init__()
        self.mode: RequestedMode = mode
        self.controller = controller
        self.resolved: ExecutionMode | None = None

    def check(self, trainer: Loop) -> None:
        """Raise a ConfigError if ``mode`` or ``controller`` contradicts the strategy; called before processes start."""
        check_execution_mode(self.mode, strategy=_strategy_of(trainer), controller=self.controller)

    def setup(self, trainer: Loop, module: object, stage: str) -> None:
        """Set the process's mode; raise a ConfigError if settings contradict, or a controller has used CUDA."""
        check_repeated(callbacks_of(trainer))
        resolved = resolve_execution_mode(self.mode, strategy=_strategy_of(trainer), controller=self.controller)
        if resolved is ExecutionMode.CONTROLLER and platform.has_context():
            raise ConfigError(
                "execution mode 'controller' touches no device, but this process has used a CUDA device already. "
                "Start the controller in a process of its own, and use no device before it."
            )
        if self.resolved is None:
            log.info("execution mode: %s", resolved)
        self.resolved = resolved


def _strategy_of(trainer: Loop) -> object:
    return trainer.strategy if has(trainer, HasStrategy) else None
