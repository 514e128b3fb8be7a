"""The errors that reach a user."""

import difflib
import sys
from collections.abc import Iterable, Mapping

MAX_CHOICES = 8
"""That an error lists."""


class ConfigError(ValueError):
    """A mistake of the user's: the message holds the value, the rule and the way out."""


class EngineError(RuntimeError):
    """The rollout engine failed; the message ends with the engine's own last log lines."""


class EngineStartError(EngineError, ConfigError):
    """The rollout engine cannot start as it is configured; the message is a line with the engine's reason."""


class RewardError(RuntimeError):
    """Too large a share of rewards failed; the message ends with the first failure's traceback."""


def check_rules(rules: Mapping[str, bool]) -> None:
    """Raise a ConfigError with the first rule, which names the value too, that does not hold."""
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"{rule}.")


def find_mistake(error: BaseException) -> BaseException | None:
    """The user's mistake behind ``error``: itself or what it was raised from, or None if it is no mistake of theirs.

    jsonargparse wraps what a class's ``__init__`` raises, so the chain is searched too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConfigError):
            return seen
        seen = seen.__cause__
    # Whatever is an instance of a class has loaded it, and a failing process has no time to.
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    return error if lightning and isinstance(error, lightning.MisconfigurationException) else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence to end an error about an unknown name: the nearest choice, or all of them; of many the nearest."""
    known = sorted(choices)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean '{nearest[0]}'?"
    if len(known) <= MAX_CHOICES:
        return f"Choose from: {', '.join(known)}."
    shown = difflib.get_close_matches(name, known, n=MAX_CHOICES, cutoff=0.0)
    return f"Choose from: {', '.join(shown)}, and {len(known) - len(shown)} more."
