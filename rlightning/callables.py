"""What a call of a function or of a callable object runs."""

import functools
import inspect
from collections.abc import Iterator


def layers(function: object) -> Iterator[object]:
    """Yield a function, and the functions inside a functools.partial, functools.wraps wrapper or callable object."""
    seen: list[object] = []
    while not any(function is one for one in seen):
        yield function
        seen.append(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif (wrapped := inspect.getattr_static(function, "__wrapped__", None)) is not None:
            function = wrapped
        elif callable(function) and not inspect.isroutine(function) and not inspect.isclass(function):
            function = type(function).__call__
        else:
            return


def unwrap(function: object) -> object:
    """Return the function or object inside nested functools.partial objects."""
    return next(layer for layer in layers(function) if not isinstance(layer, functools.partial))


def is_async(function: object) -> bool:
    """Return whether calling a function eventually runs an ``async def``."""
    return any(map(inspect.iscoroutinefunction, layers(function)))


def is_coroutine_function(function: object) -> bool:
    """Return whether calling a function only creates a coroutine, without running any code."""
    inner = unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
