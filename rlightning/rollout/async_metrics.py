"""Metrics of an asynchronous run's steps: staleness, prompts in flight, and how long trainer and engines wait."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WINDOW_STEPS = 20
WAITING_SHARE = 0.3
"""Share of a window's time above which the waiting time of the trainer or of the engines is reported."""

STOPPED = "rollout/stopped"
"""Name of the metric: prompts that were still running when a step had enough groups, and were requeued."""


@dataclass
class StepTotals:
    """Staleness, prompt counts and waiting times of one step, over all its calls of ``collect_trajectories``.

    Attributes:
        staleness: for each call an array [T], the staleness of its tokens in updates.
        num_stale: prompts that were requeued because their tokens were too old.
        num_stopped: prompts that were running when the step had enough groups, and were requeued.
        num_running: prompts that are still being sampled or scored.
        num_scoring: prompts of these of which only rewards are missing.
        num_finished: prompts that are finished but left for a later step.
        trainer_wait_seconds: seconds for which the trainer waited for trajectories.
        engine_idle_seconds: seconds for which engines had no request, averaged over the engines.
    """

    staleness: list[NDArray[np.int64]] = field(default_factory=list)
    num_stale: int = 0
    num_stopped: int = 0
    num_running: int = 0
    num_scoring: int = 0
    num_finished: int = 0
    trainer_wait_seconds: float = 0.0
    engine_idle_seconds: float = 0.0

    def metrics(self, max_staleness: int, weight_version: int) -> dict[str, float]:
        """Return the metrics of a step that updates weights of ``weight_version``, by the names of docs/metrics.md."""
        staleness = np.concatenate([np.zeros(0, np.int64), *self.staleness])
        shares = np.bincount(staleness, minlength=max_staleness + 1) / max(len(staleness), 1)
        mean, largest = (float(staleness.mean()), float(staleness.max())) if len(staleness) else (0.0, 0.0)
        return {
            "async/staleness_mean": mean,
            "async/staleness_max": largest,
            **{f"async/staleness_{updates}": float(share) for updates, share in enumerate(shares)},
            "async/version_trained": float(weight_version),
            "async/version_sampled_mean": weight_version - mean,
            "async/version_sampled_min": weight_version - largest,
            "async/requeued": float(self.num_stale),
            **({} if max_staleness else {STOPPED: float(self.num_stopped)}),
            "async/trainer_waited": self.trainer_wait_seconds,
            "async/engines_idle": self.engine_idle_seconds,
            "async/running": float(self.num_running),
            "async/scoring": float(self.num_scoring),
            "async/finished": float(self.num_finished),
        }


class BottleneckMonitor:
    """Sums the waiting times of trainer and engines over a window of steps, and reports which of them waits for long,
    and whether for rewards.

    Args:
        max_staleness: ``rollout.max_staleness``.
        num_engines: number of engines of the run.
        engines_key: configuration key that sets the engines or their number.
    """

    def __init__(self, max_staleness: int, num_engines: int, engines_key: str) -> None:
        self.max_staleness, self.num_engines, self.engines_key = max_staleness, num_engines, engines_key
        self._last_reported = ""
        self._begin()

    def add(self, totals: StepTotals) -> str | None:
        """Add a step's waiting times; return a message if a window ends and the bottleneck has changed, else None."""
        self._num_steps += 1
        self._trainer_wait_seconds += totals.trainer_wait_seconds
        self._engine_idle_seconds += totals.engine_idle_seconds
        self._num_running += totals.num_running
        self._num_scoring += totals.num_scoring
        if self._num_steps < WINDOW_STEPS:
            return None
        seconds = max(time.monotonic() - self._started_at, 1e-9)
        trainer, engines = self._trainer_wait_seconds / seconds, self._engine_idle_seconds / seconds
        are_scored = self._num_scoring > self._num_running / 2
        self._begin()
        side = "trainer" if trainer > max(WAITING_SHARE, engines) else "engines" if engines > WAITING_SHARE else ""
        if trainer > WAITING_SHARE and are_scored:
            side = "rewards"
        if side in ("", self._last_reported):
            return None
        self._last_reported = side
        if side == "rewards":
            return (
                f"The trainer has waited for rewards {trainer:.0%} of the last {WINDOW_STEPS} steps: most prompts in "
                "flight are complete but for these. Make the functions of model.rewards faster, or allow older tokens "
                f"(rollout.max_staleness, now {self.max_staleness})."
            )
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
        self._started_at = time.monotonic()
        self._num_steps = 0
        self._num_running = self._num_scoring = 0
        self._trainer_wait_seconds = self._engine_idle_seconds = 0.0
