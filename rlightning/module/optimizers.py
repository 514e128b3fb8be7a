"""Checks the return value of ``configure_optimizers``, in any form that Lightning accepts, and steps the optimizers."""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.optim.optimizer import ConfiguredLR

log = logging.getLogger(__name__)

METHOD = "configure_optimizers"
FORMS = (
    "Return an optimizer, a list or tuple of optimizers, [optimizers], [schedules], a dictionary with 'optimizer' and "
    "perhaps 'lr_scheduler', or a tuple of such dictionaries."
)
KEYS = ("optimizer", "lr_scheduler", "monitor")
SCHEDULE_KEYS = tuple(field.name for field in fields(LRSchedulerConfig))


def checked(configure_optimizers: Callable[..., object]) -> Callable[..., object]:
    """Return ``configure_optimizers`` with a check of its return value, which raises a ConfigError where Lightning
    would raise a KeyError, or fail later.
    """

    @functools.wraps(configure_optimizers)
    def configure(*args: object, **kwargs: object) -> object:
        found = configure_optimizers(*args, **kwargs)
        if found is None:  # Lightning would only warn, and train nothing
            raise ConfigError(f"{METHOD} returns no optimizer of the model's parameters: it returns None. {FORMS}")
        check_form(found)
        return _without_nones(found)

    return configure


def check_form(found: object) -> None:
    """Raise a ConfigError if a value is not one of the forms of ``configure_optimizers`` that Lightning accepts.

    None is accepted: it means no optimizer.
    """
    entries: list[Any] = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
    if len(entries) == 2 and isinstance(entries[0], list):
        optimizers, schedules = entries
        schedules = schedules if isinstance(schedules, list | tuple) else [schedules]
    elif any(isinstance(entry, dict) for entry in entries):
        for entry in entries:
            if not isinstance(entry, dict):
                raise ConfigError(f"{METHOD} returns {cut_value(entry)} beside a dictionary. {FORMS}")
            _check_keys(entry, KEYS, "optimizer")
        optimizers = [entry["optimizer"] for entry in entries]
        schedules = [entry["lr_scheduler"] for entry in entries if entry.get("lr_scheduler") is not None]
    else:
        optimizers, schedules = entries, []
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizable):
            raise ConfigError(f"{METHOD} returns {cut_value(optimizer)} where an optimizer has to be. {FORMS}")
    for schedule in schedules:
        if isinstance(schedule, dict):
            _check_keys(schedule, SCHEDULE_KEYS, "scheduler", " of a schedule")
        scheduler = schedule["scheduler"] if isinstance(schedule, dict) else schedule
        if not hasattr(scheduler, "optimizer") or scheduler.optimizer not in optimizers:
            raise ConfigError(
                f"{METHOD}: {type(scheduler).__name__} is no schedule of an optimizer that is returned with it. {FORMS}"
            )


def _check_keys(entry: Mapping[str, object], known: Sequence[str], required: str, of: str = "") -> None:
    for key in entry:
        if key not in known:
            raise ConfigError(f"{METHOD}: the key '{key}'{of} is unknown. {did_you_mean(str(key), known)}")
    if required not in entry:
        raise ConfigError(f"{METHOD} returns a dictionary{of} without the key '{required}'. {FORMS}")


def _without_nones(found: object) -> object:
    """Return the value without schedules that are None, which Lightning would try to step."""
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != "lr_scheduler" or value is not None}
    if type(found) is list:
        return [_without_nones(one) for one in found]
    return tuple(map(_without_nones, found)) if type(found) is tuple else found


def prepare_optimizers(
    network: nn.Module, optimizers: Sequence[Optimizer], schedules: Sequence[LRSchedulerConfig], *, max_steps: int = -1
) -> None:
    """Check that the module can step the optimizers, and apply the schedules to parameter groups that were added later.

    Raises:
        ConfigError: an optimizer needs a closure or sparse gradients; a schedule needs a metric, ends before the run or
            has no frequency; a parameter is in two optimizers; or no optimizer has a parameter of ``network``.
    """
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{METHOD}: {type(optimizer).__name__} computes the loss again within a step, and a rollout's loss is "
                "computed in micro-batches before it. Use an optimizer that steps without a closure, such as AdamW."
            )
        if isinstance(optimizer, SparseAdam):
            raise ConfigError(
                f"{METHOD}: SparseAdam takes sparse gradients alone, and those of the model are dense. Use AdamW."
            )
    for config in schedules:
        _check_schedule(config, max_steps)
        if isinstance(config.scheduler, ConfiguredLR):
            config.scheduler.add_groups()
    _check_parameters(network, optimizers)


def _check_schedule(config: LRSchedulerConfig, max_steps: int) -> None:
    scheduler = config.scheduler
    name = type(scheduler).__name__
    required = [p.name for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
    if isinstance(scheduler, ReduceLROnPlateau) or required:
        raise ConfigError(
            f"{METHOD}: {name} steps by a metric, and schedules are stepped by the count of rollouts. "
            "Return the optimizer without it, and call its step(metric) in on_train_batch_end or "
            "on_validation_end of a callback, or return another schedule, such as LambdaLR."
        )
    if config.frequency < 1:
        raise ConfigError(
            f"{METHOD}: frequency={config.frequency} of {name} must be at least 1. Use 1 for a step after each rollout."
        )
    num_steps = max_steps // config.frequency
    if isinstance(scheduler, OneCycleLR) and num_steps > scheduler.total_steps:
        raise ConfigError(
            f"{METHOD}: {name} ends after total_steps={scheduler.total_steps}, and the run steps it {num_steps} times. "
            f"Set total_steps to {num_steps}: schedules are stepped once a rollout."
        )


def _check_parameters(network: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    names = {parameter: name for name, parameter in network.named_parameters()}
    held = Counter(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if not held.keys() & names.keys():
        raise ConfigError(
            f"{METHOD} returns no optimizer of the model's parameters: nothing would be trained. Return one of "
            "self.actor.parameters(), or what super() returns."
        )
    twice = [names.get(parameter, "a parameter") for parameter, count in held.items() if count > 1]
    if twice:
        raise ConfigError(
            f"{METHOD}: {len(twice)} parameters, such as {twice[0]}, are in two optimizers, which would both step "
            "them. Leave them to one."
        )


def drop_untrained(network: nn.Module, optimizers: Sequence[LightningOptimizer], named: set[str]) -> None:
    """Delete gradients of parameters that are in no optimizer; they would accumulate over steps and count in the
    gradient norm.

    A warning names the parameters that are not in ``named``, and adds them to it.
    """
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = {p for p in network.parameters() if p.grad is not None and p not in held}
    for parameter in left:
        parameter.grad = None
    if not left:
        return
    if new := [name for name, p in network.named_parameters() if p in left and name not in named]:
        named.update(new)
        log.warning(
            "%d parameters have a gradient and no optimizer, and stay as they are, such as %s. Give them to one in "
            "configure_optimizers, which has to find them there, or set requires_grad to False.",
            len(new),
            new[0],
        )


def wrapped_optimizers(module: LightningModule) -> list[LightningOptimizer]:
    """Return ``module.optimizers()`` as a list; Lightning does not wrap a single one in a list."""
    found = module.optimizers()
    return found if isinstance(found, list) else [found]


def step_optimizers(wrapped: Sequence[LightningOptimizer], *, is_last: bool) -> None:
    """Step all optimizers, and clear the gradients; with ``is_last``, the Trainer counts this as a step.

    Lightning counts the steps of its wrappers. The first one, the actor's, is stepped only in the rollout's last
    optimizer step, so that ``max_steps`` counts rollouts.
    """
    for number, optimizer in enumerate(wrapped):
        (optimizer if is_last and number == 0 else optimizer.optimizer).step()
        optimizer.zero_grad()


def step_schedules(schedules: Sequence[LRSchedulerConfig], num_rollouts: int) -> None:
    """Step each schedule after every rollout, or after every n-th rollout if its ``frequency`` is n."""
    for config in schedules:
        if num_rollouts % config.frequency == 0:
            config.scheduler.step()  # type: ignore[call-arg]  # one that needs a metric has been rejected


def learning_rates(optimizers: Sequence[LightningOptimizer]) -> dict[str, float]:
    """Return the optimizers' learning rates by metric name.

    Returns:
        ``optim/lr``, the rate of the first parameter group. With several optimizers, named groups or different rates
        also ``optim/lr/<name>`` for each group. The name defaults to the group's number over all optimizers, and the
        number is appended if groups of the same name have different rates.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    named = [(str(group.get("name", number)), float(group["lr"])) for number, group in enumerate(groups)]
    is_shared = {name: len({rate for other, rate in named if other == name}) > 1 for name, _ in named}
    rates = {
        f"optim/lr/{name}_{number}" if is_shared[name] else f"optim/lr/{name}": rate
        for number, (name, rate) in enumerate(named)
    }
    first = {"optim/lr": float(groups[0]["lr"])}
    is_alike = len(optimizers) == 1 and len(set(rates.values())) == 1 and not any("name" in group for group in groups)
    return first if is_alike else first | rates
