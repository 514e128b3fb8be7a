"""Finds methods of a module that are not rlightning's own."""

from collections.abc import Iterable

from rlightning.python_values import module_name

UPDATE_METHODS = ("update", "accumulate_gradients", "loss", "compute_logprobs")
"""Methods between a rollout and its gradient that :func:`~rlightning.objectives.zero_gradient.has_zero_gradient` does
not differentiate: an override may add a gradient on sequences without advantage, or give them an advantage.
"""


def is_own(module: object, method: str) -> bool:
    """Return whether a module's method is rlightning's own, not an override by a user's class, or set on the object."""
    found = getattr(module, method)  # by name: the callers ask about several methods
    return module_name(found).partition(".")[0] == "rlightning"


def find_override(module: object, methods: Iterable[str]) -> str | None:
    """Return the first of the methods that is not rlightning's own; None if all are."""
    return next((name for name in methods if not is_own(module, name)), None)
