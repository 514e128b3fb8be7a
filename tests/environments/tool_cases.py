"""Tools of the tests, which workers import too."""

import asyncio
import threading
import time
from typing import Any, Literal

from rlightning.types import Prompt

RAN: list[Any] = []
"""What tools of this process have done."""


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second, in
            two lines.
    """
    RAN.append(("add", threading.current_thread() is threading.main_thread()))
    return a + b


async def greet(name: str, style: Literal["short", "long"] = "short") -> dict[str, str]:
    """Greet somebody.

    Args:
        name: of them.
    """
    await asyncio.sleep(0)
    return {"greeting": f"Hi {name}"}


def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def fail(kind: str) -> str:
    """Raise an exception of a kind."""
    raise {"value": ValueError, "connection": ConnectionError, "exit": SystemExit}[kind](f"no {kind}")


def shout(count: int) -> str:
    """Return that many letters, the first with half of a surrogate pair."""
    return "\ud800" + "A" * (count - 1)


def odd(keys: int) -> Any:
    """Return what JSON has not."""
    return {(1, 2): keys, "self": ...}


class Counter:
    """A counter that starts where the prompt says."""

    def __init__(self, prompt: Prompt) -> None:
        self.value = int(prompt.columns["answer"])
        RAN.append(("made", self.value))

    def increase(self, by: int, name: str = "") -> int:
        """Increase it."""
        self.value += by
        return self.value

    async def read(self) -> int:
        """Read it."""
        return self.value

    def _hidden(self) -> None:
        raise AssertionError

    def close(self) -> None:
        """Keep what it counted."""
        RAN.append(("closed", self.value))


class Adder:
    """Has a tool of a name that there is."""

    def add(self, a: int) -> int:
        """Add nothing."""
        return a


class Empty:
    """Has no tools."""


class Needy:
    """Needs what nobody gives."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> str:
        """Read it."""
        return self.path


def no_hint(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Add."""
    return int(a + b)


def no_words(a: int) -> int:
    return a


def odd_hint(a: complex) -> int:
    """Round."""
    return int(a.real)


def lost_hint(a: "Nowhere") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Add."""
    return int(a)


def star(*numbers: int) -> int:
    """Add."""
    return sum(numbers)


NUMBER = 7
