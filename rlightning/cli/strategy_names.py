"""How ``trainer.strategy`` may be spelled: a short name or a dotted path stand for a class, which can have arguments.

Lightning takes strings for names of its registry, which knows no dotted path; and jsonargparse gives arguments to
classes only. So a name is replaced by its class before either sees it, in files and in options alike.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from rlightning.cli.config_files import load_yaml
from rlightning.errors import ConfigError, did_you_mean

KEY = "trainer.strategy"
WORKERS_KEY = f"{KEY}.worker_strategy"
KEYS = (KEY, WORKERS_KEY, f"{KEY}.init_args.worker_strategy")
"""Where a strategy is named: the second ones are those among a controller's workers."""
CLASSES = {
    "fsdp2": "rlightning.parallel.fsdp.FSDP",
    "FSDP": "rlightning.parallel.fsdp.FSDP",
    "rlightning.parallel.FSDP": "rlightning.parallel.fsdp.FSDP",
    "ddp": "rlightning.parallel.ddp.DDP",
    "DDP": "rlightning.parallel.ddp.DDP",
    "rlightning.parallel.DDP": "rlightning.parallel.ddp.DDP",
    "ray": "rlightning.controller.ray_controller.RayController",
    "RayController": "rlightning.controller.ray_controller.RayController",
    "rlightning.controller.RayController": "rlightning.controller.ray_controller.RayController",
}
CHOICES = ("auto", "ddp", "fsdp2", "ray")

_load_yaml = get_loader("yaml")


def spell_out(value: Any, key: str = "") -> Any:
    """A configuration, or the part of it under ``key``, with the strategy's name replaced by its class."""
    if key in KEYS and isinstance(value, str):
        is_path = "." in value and not Path(value).is_file()
        return {"class_path": CLASSES.get(value, value)} if value in CLASSES or is_path else value
    if key.removesuffix(".class_path") in KEYS and key.endswith(".class_path") and isinstance(value, str):
        return CLASSES.get(value, value)
    if isinstance(value, dict) and (not key or any(known.startswith(key) for known in KEYS)):
        return {name: spell_out(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    return value


def spell_out_options(options: list[str]) -> list[str]:
    """Command line options, likewise."""
    return list(_spell_out_each(options))


def spell_out_files() -> None:
    """Have jsonargparse read YAML so from now on."""
    set_loader("yaml", lambda text: spell_out(_load_yaml(text)), (yaml.YAMLError,))


def check_strategy(name: object) -> None:
    """Refuse a name that stands for nothing, or for what does not work here; objects pass."""
    if not isinstance(name, str) or name in (*CHOICES, *CLASSES):
        return
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # takes seconds

    from rlightning.module.trainer_options import SPAWN_RULE

    if name not in StrategyRegistry:
        raise ConfigError(
            f"{KEY}: there is no strategy '{name}'. {did_you_mean(name, CHOICES)} "
            "One of your own is named by its dotted path."
        )
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


def find_strategy(strategy: Any) -> Any:
    """Return a strategy of this package that a short name or a dotted path of :data:`CLASSES` stands for, or as is."""
    if not isinstance(strategy, str) or strategy not in CLASSES:
        return strategy
    module, _, name = CLASSES[strategy].rpartition(".")
    return getattr(import_module(module), name)()


def _spell_out_each(options: list[str]) -> Iterator[str]:
    rest = iter(options)
    for option in rest:
        name, equals, text = option.partition("=")
        if name.removeprefix("--") not in ("trainer", *KEYS, *(f"{key}.class_path" for key in KEYS)):
            yield option
            continue
        if not equals:
            value = next(rest, None)
            if value is None:  # left for the check of options to complain of
                yield option
                return
            text = value
        yield f"{name}={_spell_out_text(text, name.removeprefix('--'))}"


def _spell_out_text(text: str, key: str) -> str:
    """An option's value; the text itself where there is nothing to replace."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        return text
    spelled = spell_out(value, key)
    if spelled == value:
        return text
    return spelled if isinstance(spelled, str) else json.dumps(spelled)
