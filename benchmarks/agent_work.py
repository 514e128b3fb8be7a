"""What the agents of agents.py do: wait as tools do, ask once as a sampler would, or do nothing for a while."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import psutil
from probes import CSVTrace

from rlightning.types import Prompt

ANSWER = "the answer of a tool, as long as"
"""Of :class:`Waits`, and of TRL's tool: a token a letter, as of :func:`launch.write_prompts`."""


class Waits:
    """An environment of so many turns, each of which takes between two times.

    Args:
        num_turns: of a trajectory.
        shortest: seconds of a turn.
        longest: seconds of a turn; 0: none waits.
        seed: of the seconds, with the prompt's index and the number of its trajectories before this one, so that two
            runs draw the same.
    """

    num_begun: ClassVar = Counter[int]()
    """Trajectories of each prompt that have begun in this process."""

    def __init__(self, num_turns: int = 8, shortest: float = 0.05, longest: float = 2.0, seed: int = 0) -> None:
        self.num_turns, self.shortest, self.longest, self.seed = num_turns, shortest, longest, seed

    async def reset(self, prompt: Prompt) -> None:
        """Begin with the prompt as it is. Async, so that a group's trajectories are numbered in their order."""
        self._draw = random.Random(f"{self.seed} {prompt.index} {self.num_begun[prompt.index]}")
        self.num_begun[prompt.index] += 1
        self._turn, self._waited = 0, 0.0

    async def step(self, message: Any) -> tuple[str, float, bool, dict[str, float]]:
        """Take the turn's time."""
        self._turn += 1
        if self.longest:
            seconds = self._draw.uniform(self.shortest, self.longest)
            self._waited += seconds
            await asyncio.sleep(seconds)
        return ANSWER, self._draw.random(), self._turn == self.num_turns, {"waited": self._waited}


async def ask_once(client: Any, messages: Any, model: str, idle: float = 0.0) -> float:
    """One turn by the API; then nothing for ``idle`` seconds."""
    await client.chat.completions.create(model=model, messages=messages)
    await asyncio.sleep(idle)
    return random.random()


class HostTrace(CSVTrace):
    """Writes the trainer's memory, in bytes, and CPU seconds at the begin and end of a rollout and four times a second.

    Attributes:
        every: seconds.
    """

    every = 0.25

    def __init__(self) -> None:
        super().__init__("host", ["seconds", "rss", "cpu"])

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        """Begin to watch."""
        self._stop = Event()
        self._task = Thread(target=self._watch, args=(trainer,), daemon=True)
        self._task.start()

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """Stop watching."""
        self._stop.set()
        self._task.join()

    def _watch(self, trainer: Any) -> None:
        process, begun = psutil.Process(), time.monotonic()
        while True:
            times = process.cpu_times()
            self.write(trainer, time.monotonic() - begun, process.memory_info().rss, times.user + times.system)
            if self._stop.wait(self.every):
                return


def trajectories(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``completions``."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(folder / "completions").to_pylist()
    return rows
