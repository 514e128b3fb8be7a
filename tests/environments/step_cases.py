"""Classes with ``reset`` and ``step`` that tests run, also in workers: the standard library, and nothing of ours."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

made: list["Game"] = []
"""By this process."""


def hang_in(folder: str) -> None:
    """Write that this hangs, and hang until a test has written that it may end."""
    Path(folder, "hangs").touch()
    while not Path(folder, "may end").exists():
        time.sleep(0.01)


class Game:
    """A game of three turns, rewarded by 1 for each odd turn.

    Attributes:
        threads: in which its methods ran.
        num_closed: calls of ``close``.
    """

    def __init__(self, first: Any = None, observation: Any = "+", deed: str = "", folder: str = "") -> None:
        self.first, self.observation, self.deed, self.folder = first, observation, deed, folder
        self.threads = {threading.get_ident()}
        self.messages: list[Any] = []
        self.num_closed = 0
        made.append(self)

    def reset(self, prompt: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.prompt = prompt
        return self.first

    def step(self, message: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.messages.append(message)
        if self.deed == "raise":
            raise ConnectionError("the game is gone")
        if self.deed == "stop":
            next(iter(()))
        if self.deed == "exit":
            raise SystemExit(3)
        if self.deed == "hang":
            hang_in(self.folder)
        turn = len(self.messages)
        info = {"score": turn, "is_fair": True, "note": "text"}
        return self.observation, float(turn % 2), turn == 3, info

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_closed += 1
        self.num_turns_at_close = len(self.messages)
        if self.folder:
            Path(self.folder, f"closed after {len(self.messages)}").touch()


class AsyncGame(Game):
    """The same, async."""

    async def reset(self, prompt: Any) -> Any:
        await asyncio.sleep(0)
        return super().reset(prompt)

    async def step(self, message: Any) -> Any:
        if self.deed == "hang":
            Path(self.folder, "hangs").touch()
            await asyncio.sleep(3600)
        return super().step(message)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


class GymnasiumGame(Game):
    """The same in gymnasium's form; the time is over in place of an end."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return super().reset((seed, options)), {"start": 5}

    def step(self, action: Any) -> Any:
        observation, reward, is_done, info = super().step(action)
        return observation, reward, False, is_done, info


def make_game(**arguments: Any) -> Game:
    return Game(**arguments)


async def make_async_game(**arguments: Any) -> Game:
    await asyncio.sleep(0)
    return AsyncGame(**arguments)


def make_nothing() -> None:
    """Returns no game."""


class OnlyReset:
    def reset(self, prompt: Any) -> None: ...


number = 3
