"""The execution mode of this process: it computes on a device, controls worker processes, or is such a worker.

The mode is resolved once (:func:`resolve_execution_mode`) and never changes. All other code calls
:func:`execution_mode`, and does not read the environment.
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from rlightning.errors import ConfigError
from rlightning.protocols import HasRootDevice, has

RequestedMode = Literal["auto", "spmd", "controller", "worker"]

OWN = "the strategy"
UNNAMED = "the launcher (WORLD_SIZE)"
"""Name of a launcher that sets only ``WORLD_SIZE`` in the environment."""


class ExecutionMode(StrEnum):
    """What a process of a run is: an SPMD rank, a controller, or a worker of a controller."""

    SPMD = "spmd"
    """One of several equal processes, each with its own device, as Lightning's strategies start them."""
    CONTROLLER = "controller"
    """A process that controls workers; it has no model and uses no device."""
    WORKER = "worker"
    """A process with a device that executes a controller's commands."""


class Launch(NamedTuple):
    """The launcher that started this process, and the number of processes that it has started."""

    launcher: str
    world_size: int


class DeclaresMode(Protocol):
    """A strategy whose ``execution_mode`` says what its processes are: "spmd" (equal ranks), "controller" or "worker".

    :func:`resolve_execution_mode` reads it.
    """

    execution_mode: str


class HasController(Protocol):
    """A strategy with the name or address of its processes' controller as ``controller``; None if it has none."""

    controller: str | None


class HasWorldSize(Protocol):
    """A strategy or a training loop with its number of processes as ``world_size``; None if unknown."""

    world_size: int | None


_resolved: ExecutionMode | None = None


def execution_mode() -> ExecutionMode:
    """Return whether this process is an SPMD rank, a controller or a worker; SPMD if this was not resolved yet."""
    return _resolved or ExecutionMode.SPMD


def is_controller() -> bool:
    """Return whether this process is a controller, which must not use a device."""
    return execution_mode() is ExecutionMode.CONTROLLER


def resolve_execution_mode(
    requested: RequestedMode = "auto", *, strategy: object = None, controller: str | None = None
) -> ExecutionMode:
    """Determine whether this process is an SPMD rank, a controller or a worker; store the result and return it.

    From then on :func:`execution_mode` returns it. A later call must have the same result.

    Args:
        requested: mode that the user requests; "auto" for the strategy's.
        strategy: may declare an ``execution_mode``, and in a worker a ``controller``; its ``root_device`` and
            ``world_size`` must fit the mode.
        controller: name of a worker's controller, if the strategy does not have it.

    Raises:
        ConfigError: the arguments contradict each other, the launcher, or an earlier call.
    """
    global _resolved
    _resolved = check_execution_mode(requested, strategy=strategy, controller=controller)
    return _resolved


def check_execution_mode(
    requested: RequestedMode = "auto", *, strategy: object = None, controller: str | None = None
) -> ExecutionMode:
    """Return the result that :func:`resolve_execution_mode` would have, without storing it; raise the same errors."""
    # A controller has no device: the strategy's device is read from its configuration.
    device = strategy.root_device if has(strategy, HasRootDevice) else None
    mode = decide(
        requested,
        declared=_parse(strategy.execution_mode) if has(strategy, DeclaresMode) else None,
        accelerator="cpu" if device is None else str(device).partition(":")[0],
        launch=_find_launch(strategy),
        controller=controller or (strategy.controller if has(strategy, HasController) else None),
    )
    if _resolved not in (None, mode):
        raise ConfigError(
            f"execution mode '{mode}' contradicts '{_resolved}', which this process has been resolved to before. "
            "A process keeps its mode: start another one."
        )
    return mode


def decide(
    requested: RequestedMode,
    *,
    declared: ExecutionMode | None = None,
    accelerator: str = "cpu",
    launch: Launch | None = None,
    controller: str | None = None,
) -> ExecutionMode:
    """Return the execution mode: the requested one, else the strategy's, else SPMD.

    Args:
        requested: mode that the user requests; "auto" for the strategy's.
        declared: mode that the strategy declares.
        accelerator: type of the strategy's device, such as "cuda".
        launch: the launcher that started this process.
        controller: name of the process's controller; only a worker has one.

    Raises:
        ConfigError: the arguments contradict each other, such as a controller on a GPU.
    """
    mode = (declared or ExecutionMode.SPMD) if requested == "auto" else _parse(requested)
    if declared not in (None, mode):
        raise ConfigError(
            f"ControllerMode.mode='{requested}' contradicts trainer.strategy, which declares '{declared}'. "
            "Use mode='auto', or another strategy."
        )
    if mode is ExecutionMode.WORKER and controller is None:
        raise ConfigError(
            "execution mode 'worker' needs a controller to take commands from, and none is named. Name it in "
            "ControllerMode.controller or use a strategy that starts workers itself; alone, use mode='spmd'."
        )
    if mode is not ExecutionMode.WORKER and controller is not None:
        raise ConfigError(
            f"execution mode '{mode}' takes no commands, but '{controller}' is named as its controller. "
            "Use mode='worker'."
        )
    if mode is ExecutionMode.CONTROLLER and launch is not None and launch.world_size > 1:
        if launch.launcher == OWN:
            started, way_out = f"trainer.devices and trainer.num_nodes are for {launch.world_size}", "Set both to 1"
        else:
            started = f"{launch.launcher} started {launch.world_size}"
            way_out = "Start it once, without a launcher"
        raise ConfigError(
            f"execution mode 'controller' is for one process, but {started}. {way_out}, or use mode='spmd'."
        )
    if mode is ExecutionMode.CONTROLLER and accelerator != "cpu":
        raise ConfigError(
            f"execution mode 'controller' touches no device, but the strategy's is '{accelerator}'. "
            "Set trainer.accelerator=cpu and trainer.devices=1; the workers have the devices."
        )
    return mode


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the launcher (torchrun, SLURM, mpirun) that environment variables indicate; None if there is none."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return Launch("torchrun", int(environment.get("WORLD_SIZE", "1")))
    if "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return Launch("SLURM", int(environment["SLURM_NTASKS"]))
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return Launch("mpirun", int(environment["OMPI_COMM_WORLD_SIZE"]))
    if "WORLD_SIZE" in environment:
        return Launch(UNNAMED, int(environment["WORLD_SIZE"]))
    return None


def _find_launch(strategy: object) -> Launch | None:
    """Return the launcher of this process; Lightning's if no other is found but several ranks run; else None."""
    launch = read_launch(os.environ)
    world_size = (strategy.world_size if has(strategy, HasWorldSize) else None) or 1
    # Lightning's own launcher sets WORLD_SIZE, too.
    return Launch(OWN, world_size) if world_size > 1 and (launch is None or launch.launcher == UNNAMED) else launch


def _parse(name: str) -> ExecutionMode:
    if name not in list(ExecutionMode):
        raise ConfigError(f"execution mode '{name}' is unknown. Choose from: {', '.join(ExecutionMode)}.")
    return ExecutionMode(name)
