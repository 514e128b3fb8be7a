"""Sets what this process is: one of equal ranks, a controller without a device, or a controller's worker."""

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
    """Sets the process's execution mode before a device is used; see :mod:`~rlightning.parallel.execution_mode`.

    A controller orchestrates, holds no model, and never creates a CUDA context: where it would wait for a device or
    ask for its memory, nothing happens. Without this callback a process is SPMD.

    From a loop that is not Lightning's it needs a call of ``setup(loop, module, "fit")`` before the loop's first use
    of a device. ``loop.strategy``, where there is one, may declare an ``execution_mode``, and in a worker a
    ``controller``.

    Args:
        mode: "auto" is what the strategy declares, "spmd" where it declares nothing.
        controller: name or address of the controller that a worker takes commands from, where the strategy has none.

    Attributes:
        resolved: the mode, once ``setup`` has run.
    """

    def __init__(self, mode: RequestedMode = "auto", *, controller: str | None = None) -> None:
        super().__init__()
        self.mode: RequestedMode = mode
        self.controller = controller
        self.resolved: ExecutionMode | None = None

    def check(self, trainer: Loop) -> None:
        """Raise a ConfigError for contradictory settings; the command line calls this before it starts processes."""
        check_execution_mode(self.mode, strategy=_strategy_of(trainer), controller=self.controller)

    def setup(self, trainer: Loop, module: object, stage: str) -> None:
        """Set the mode; raise a ConfigError for contradictory settings."""
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
