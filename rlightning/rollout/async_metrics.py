"""Which side of an asynchronous run waits for the other, in a plain sentence with the key to change."""

import time

WINDOW_STEPS = 20
WAITING_SHARE = 0.3
"""Of the time: a side that waits for longer is told about."""


class Pace:
    """Adds up what trainer and engines wait, and tells once a window when a side has begun to starve.

    Args:
        max_staleness: ``rollout.max_staleness``.
        num_engines: of the run.
        engines_key: the key that says which or how many engines there are.
    """

    def __init__(self, max_staleness: int, num_engines: int, engines_key: str) -> None:
        self.max_staleness, self.num_engines, self.engines_key = max_staleness, num_engines, engines_key
        self._told = ""
        self._begin()

    def add(self, trainer_waited: float, engines_idle: float) -> str | None:
        """Take in a step.

        Args:
            trainer_waited: seconds that the trainer waited for completions.
            engines_idle: seconds that an engine had nothing to do, in the mean.

        Returns:
            A sentence, if there is something new to say.
        """
        self._num_steps += 1
        self._trainer_waited += trainer_waited
        self._engines_idle += engines_idle
        if self._num_steps < WINDOW_STEPS:
            return None
        seconds = max(time.monotonic() - self._began, 1e-9)
        trainer, engines = self._trainer_waited / seconds, self._engines_idle / seconds
        self._begin()
        side = "trainer" if trainer > max(WAITING_SHARE, engines) else "engines" if engines > WAITING_SHARE else ""
        if side in ("", self._told):
            return None
        self._told = side
        if side == "trainer":
            return (
                f"The trainer has waited for completions {trainer:.0%} of the last {WINDOW_STEPS} steps. Add engines "
                f"({self.engines_key}, now {self.num_engines}), or allow older tokens (rollout.max_staleness, now "
                f"{self.max_staleness})."
            )
        return (
            f"The engines have had nothing to do {engines:.0%} of the last {WINDOW_STEPS} steps. Let more be in flight "
            f"(rollout.max_staleness, now {self.max_staleness}), or give the trainer more devices (trainer.devices)."
        )

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._num_steps = 0
        self._trainer_waited = self._engines_idle = 0.0
