"""The names for ``trainer.strategy``: short names and dotted paths of classes, which can have arguments.

Lightning looks strings up in its registry, which has no dotted paths, and jsonargparse passes arguments to classes
only. Hence a name is replaced by its class before either sees it.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rlightning.errors import ConfigError, did_you_mean

KEY = "trainer.strategy"
WORKERS_KEY = f"{KEY}.worker_strategy"
KEYS = (KEY, WORKERS_KEY, f"{KEY}.init_args.worker_strategy")
"""Keys that name a strategy: the run's, and two for the strategy of a controller's workers."""
CLASSES = {
    "fsdp2": "rlightning.parallel.fsdp.FSDP",
    "FSDP": "rlightning.parallel.fsdp.FSDP",
    "rlightning.parallel.FSDP": "rlightning.parallel.fsdp.FSDP",
    "ddp": "rlightning.parallel.strategy.DDP",
    "DDP": "rlightning.parallel.strategy.DDP",
    "rlightning.parallel.DDP": "rlightning.parallel.strategy.DDP",
    "ray": "rlightning.controller.ray_controller.RayController",
    "RayController": "rlightning.controller.ray_controller.RayController",
    "rlightning.controller.RayController": "rlightning.controller.ray_controller.RayController",
}
OLD_PACKAGE = "rlightning.distributed"
MOVED = {
    f"{OLD_PACKAGE}.{name}": f"rlightning.{package}.{name}"
    for name, package in (("FSDP", "parallel"), ("DDP", "parallel"), ("RayController", "controller"))
}
CHOICES = ("auto", "ddp", "fsdp2", "ray")

SPAWN_RULE = (
    "would train copies of the module in processes of its own, and leave this one as it was. Use strategy='ddp', "
    "which starts the program once for each device."
)
"""The reason in the error message for ddp_spawn."""


def spell_out(value: Any, key: str = "") -> Any:
    """Return a configuration in which a strategy's short name, such as ``fsdp2``, is replaced by its ``class_path``.

    ``value`` is the whole configuration, or the part of it under ``key``.

    Raises a ConfigError for a former name of a class.
    """
    if isinstance(value, str) and key.removesuffix(".class_path") in KEYS:
        if value in MOVED:
            raise ConfigError(f"{key}: {value} is now {MOVED[value]}.")
        path = CLASSES.get(value, value)
        if key.endswith(".class_path"):
            return path
        is_path = value in CLASSES or ("." in value and not Path(value).is_file())
        return {"class_path": path} if is_path else value
    if isinstance(value, dict) and (not key or any(known.startswith(key) for known in KEYS)):
        return {name: spell_out(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    return value


def no_strategy(name: str) -> ConfigError:
    """Return the ConfigError for an unknown strategy name, with suggestions."""
    return ConfigError(
        f"{KEY}: there is no strategy '{name}'. {did_you_mean(name, CHOICES)} "
        "One of your own is named by its dotted path."
    )


def check_strategy(name: object) -> None:
    """Raise a ConfigError for the name of an unknown or unsupported strategy; strategy objects are not checked."""
    if not isinstance(name, str) or name in (*CHOICES, *CLASSES):
        return
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # takes seconds

    if name not in StrategyRegistry:
        raise no_strategy(name)
    if "spawn" in name:
        raise ConfigError(f"{KEY}={name} {SPAWN_RULE}")
    strategy = StrategyRegistry[name]["strategy"]
    if strategy is DDPStrategy or not strategy.__module__.startswith("lightning."):
        return
    what = "Lightning's FSDP1" if name.startswith("fsdp") else f"Lightning's {strategy.__name__}"
    raise ConfigError(
        f"{KEY}={name} is {what}, which does not work here. Use fsdp2 to shard the weights, ddp to have all of them on "
        "every device, or auto for a single one."
    )


def find_strategy(strategy: object) -> object:
    """Return a new instance of this package's strategy for a name in :data:`CLASSES`; return other values unchanged."""
    if not isinstance(strategy, str) or strategy not in CLASSES:
        return strategy
    return resolve_name(CLASSES[strategy])()
