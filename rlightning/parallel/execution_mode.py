"""What this process is for: to work on a device, to orchestrate processes that do, or to take such orders.

The mode is resolved once (:func:`resolve_execution_mode`) and never changes. Everything else asks
:func:`execution_mode`; nothing else reads the environment for it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rlightning.errors import ConfigError

RequestedMode = Literal["auto", "spmd", "controller", "worker"]

OWN = "the strategy"
UNNAMED = "the launcher (WORLD_SIZE)"
"""Launchers that leave no name of their own in the environment."""


class ExecutionMode(StrEnum):
    """The three kinds of processes that a run is made of."""

    SPMD = "spmd"
    """One of equal processes, each with a device of its own: what Lightning's strategies start."""
    CONTROLLER = "controller"
    """Orchestrates workers; holds no model and touches no device."""
    WORKER = "worker"
    """Has a device and takes orders from a controller."""


@dataclass(frozen=True)
class Launch:
    """How this process was started, as one of how many."""

    launcher: str
    world_size: int


_resolved: ExecutionMode | None = None


def execution_mode() -> ExecutionMode:
    """This process's mode; SPMD as long as nobody has resolved another."""
    return _resolved or ExecutionMode.SPMD


def is_controller() -> bool:
    """Whether this process must not touch a device."""
    return execution_mode() is ExecutionMode.CONTROLLER


def resolve_execution_mode(
    requested: RequestedMode = "auto", *, strategy: Any = None, controller: str | None = None
) -> ExecutionMode:
    """Settle what this process is, for the rest of its life.

    Args:
        requested: by the user; "auto" leaves it to the strategy.
        strategy: may declare an ``execution_mode``, and in a worker a ``controller``; its ``accelerator`` and
            ``world_size`` must fit the mode.
        controller: whom a worker takes orders from, where the strategy does not say it.

    Returns:
        The mode.

    Raises:
        ConfigError: for a contradiction between any two of these, the launcher, and an earlier resolution.
    """
    global _resolved
    mode = check_execution_mode(requested, strategy=strategy, controller=controller)
    _resolved = mode
    return mode


def check_execution_mode(
    requested: RequestedMode = "auto", *, strategy: Any = None, controller: str | None = None
) -> ExecutionMode:
    """What :func:`resolve_execution_mode` would say, without settling it."""
    mode = decide(
        requested,
        declared=_declared_mode(strategy),
        accelerator=_accelerator_name(strategy),
        launch=_find_launch(strategy),
        controller=controller or getattr(strategy, "controller", None),
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
    """The decision table: what was asked for, else what the strategy declares, else SPMD; then what must fit.

    Args:
        requested: by the user.
        declared: by the strategy.
        accelerator: type of the strategy's device.
        launch: None if this process was started alone.
        controller: whom this process takes orders from.
    """
    if requested == "auto":
        mode = declared or ExecutionMode.SPMD
    else:
        mode = _parse(requested)
        if declared not in (None, mode):
            raise ConfigError(
                f"ControllerMode.mode='{requested}' contradicts trainer.strategy, which declares '{declared}'. "
                "Use mode='auto', or another strategy."
            )
    if mode is ExecutionMode.CONTROLLER:
        _check_controller(accelerator, launch, controller)
    elif mode is ExecutionMode.WORKER and controller is None:
        raise ConfigError(
            "execution mode 'worker' needs a controller to take orders from, and none is named. Name it in "
            "ControllerMode.controller or use a strategy that starts workers itself; alone, use mode='spmd'."
        )
    elif mode is ExecutionMode.SPMD and controller is not None:
        raise ConfigError(
            f"execution mode 'spmd' takes no orders, but '{controller}' is named as its controller. Use mode='worker'."
        )
    return mode


def _check_controller(accelerator: str, launch: Launch | None, controller: str | None) -> None:
    if controller is not None:
        raise ConfigError(
            f"execution mode 'controller' takes no orders, but '{controller}' is named as its controller. "
            "Use mode='worker'."
        )
    if launch is not None and launch.world_size > 1:
        if launch.launcher == OWN:
            started, way_out = f"trainer.devices and trainer.num_nodes are for {launch.world_size}", "Set both to 1"
        else:
            started = f"{launch.launcher} started {launch.world_size}"
            way_out = "Start it once, without a launcher"
        raise ConfigError(
            f"execution mode 'controller' is for one process, but {started}. {way_out}, or use mode='spmd'."
        )
    if accelerator != "cpu":
        raise ConfigError(
            f"execution mode 'controller' touches no device, but the strategy's is '{accelerator}'. "
            "Set trainer.accelerator=cpu and trainer.devices=1; the workers have the devices."
        )


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that the environment's variables tell of, or None."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return Launch("torchrun", int(environment.get("WORLD_SIZE", "1")))
    if "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return Launch("SLURM", int(environment["SLURM_NTASKS"]))
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return Launch("mpirun", int(environment["OMPI_COMM_WORLD_SIZE"]))
    if "WORLD_SIZE" in environment:
        return Launch(UNNAMED, int(environment["WORLD_SIZE"]))
    return None


def _find_launch(strategy: Any) -> Launch | None:
    """Who started this process, or will start more of its kind."""
    launch, world_size = read_launch(os.environ), getattr(strategy, "world_size", None)
    # Lightning's own launcher sets WORLD_SIZE, too.
    if isinstance(world_size, int) and world_size > 1 and (launch is None or launch.launcher == UNNAMED):
        return Launch(OWN, world_size)
    return launch


def _declared_mode(strategy: Any) -> ExecutionMode | None:
    declared = getattr(strategy, "execution_mode", None)
    return None if declared is None else _parse(declared)


def _parse(name: str) -> ExecutionMode:
    if name not in list(ExecutionMode):
        raise ConfigError(f"execution mode '{name}' is unknown. Choose from: {', '.join(ExecutionMode)}.")
    return ExecutionMode(name)


def _accelerator_name(strategy: Any) -> str:
    """The type of the strategy's device, read from what it was configured with: a controller has no device to ask."""
    device = getattr(strategy, "root_device", None)
    return "cpu" if device is None else str(device).partition(":")[0]
