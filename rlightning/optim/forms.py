"""What ``configure_optimizers`` may return: Lightning's forms, each checked where a subclass returns it."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.utilities.types import LRSchedulerConfig

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value

METHOD = "configure_optimizers"
FORMS = (
    "Return an optimizer, a list or tuple of optimizers, [optimizers], [schedules], a dictionary with 'optimizer' and "
    "perhaps 'lr_scheduler', or a tuple of such dictionaries."
)
KEYS = ("optimizer", "lr_scheduler", "monitor")
SCHEDULE_KEYS = tuple(field.name for field in fields(LRSchedulerConfig))


def checked(configure_optimizers: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with a check of what it returns: Lightning would fail with a KeyError, or much later."""

    @functools.wraps(configure_optimizers)
    def configure(*args: Any, **kwargs: Any) -> Any:
        found = configure_optimizers(*args, **kwargs)
        check_form(found)
        return _without_nones(found)

    return configure


def check_form(found: Any) -> None:
    """Refuse what is none of Lightning's forms; None stands for no optimizer.

    Raises:
        ConfigError: names what is wrong, and the forms.
    """
    optimizers, schedules = _split(found)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizable):
            raise ConfigError(f"{METHOD} returns {cut_value(optimizer)} where an optimizer has to be. {FORMS}")
    for schedule in map(_scheduler, schedules):
        if getattr(schedule, "optimizer", None) not in optimizers:
            raise ConfigError(
                f"{METHOD}: {type(schedule).__name__} is no schedule of an optimizer that is returned with it. {FORMS}"
            )


def _split(found: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers and the schedules of any form."""
    if found is None or isinstance(found, Optimizable):
        return [] if found is None else [found], []
    entries = [found] if isinstance(found, dict) else found
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{METHOD} returns {cut_value(found)}. {FORMS}")
    if len(entries) == 2 and isinstance(entries[0], list):
        optimizers, schedules = entries
        return optimizers, list(schedules) if isinstance(schedules, list | tuple) else [schedules]
    if not any(isinstance(entry, dict) for entry in entries):
        return list(entries), []
    return list(map(_optimizer, entries)), list(_schedules(entries))


def _optimizer(entry: Any) -> Any:
    """The optimizer of a dictionary."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{METHOD} returns {cut_value(entry)} beside a dictionary. {FORMS}")
    for key in entry:
        if key not in KEYS:
            raise ConfigError(f"{METHOD}: the key '{key}' is unknown. {did_you_mean(str(key), KEYS)}")
    if "optimizer" not in entry:
        raise ConfigError(f"{METHOD} returns a dictionary without the key 'optimizer'. {FORMS}")
    return entry["optimizer"]


def _schedules(entries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    yield from (entry["lr_scheduler"] for entry in entries if entry.get("lr_scheduler") is not None)


def _without_nones(found: Any) -> Any:
    """The form without schedules that are None, which Lightning would take for schedules."""
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != "lr_scheduler" or value is not None}
    if type(found) in (list, tuple):
        return type(found)(map(_without_nones, found))
    return found


def _scheduler(schedule: Any) -> Any:
    """The schedule itself, of one with settings."""
    if not isinstance(schedule, dict):
        return schedule
    for key in schedule:
        if key not in SCHEDULE_KEYS:
            raise ConfigError(
                f"{METHOD}: the key '{key}' of a schedule is unknown. {did_you_mean(str(key), SCHEDULE_KEYS)}"
            )
    if "scheduler" not in schedule:
        raise ConfigError(f"{METHOD} returns a schedule's dictionary without the key 'scheduler'. {FORMS}")
    return schedule["scheduler"]
