"""Deadlines, heartbeats and restart budgets of processes."""

import time
from collections.abc import Callable

from rlightning import intervals


class Deadline:
    """A point in time, ``seconds`` after this object's construction, at which waits end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._end

    def wait_until(self, is_met: Callable[[], bool], poll_interval: float | None = None) -> bool:
        """Poll a condition until it is met or the deadline has passed; return whether it is met.

        Args:
            is_met: called every ``poll_interval`` seconds.
            poll_interval: seconds; None for :data:`~rlightning.intervals.SHORT_POLL_INTERVAL`.
        """
        while not is_met():
            if self.is_over:
                return False
            time.sleep(intervals.SHORT_POLL_INTERVAL if poll_interval is None else poll_interval)
        return True


class Heartbeat:
    """Counts the seconds since another process's last heartbeat.

    This process may itself be suspended, or get no CPU time, and then receives no heartbeats. Hence the time between
    two ticks counts as at most two intervals.

    Args:
        interval: seconds between two calls of :meth:`tick`.

    Attributes:
        silent_seconds: seconds since the last heartbeat.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.silent_seconds = 0.0
        self._last_tick = time.monotonic()

    def beat(self) -> None:
        """Record a heartbeat, or any other sign that the process is alive."""
        self.silent_seconds = 0.0

    def tick(self) -> float:
        """Add the seconds since the last call, at most ``2 * interval``, to :attr:`silent_seconds`, and return it."""
        now = time.monotonic()
        self.silent_seconds += min(now - self._last_tick, 2 * self.interval)
        self._last_tick = now
        return self.silent_seconds


class RestartPolicy:
    """A restart budget: how many restarts are allowed until the next :meth:`reset`."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0

    def take(self) -> bool:
        """Take one restart from the budget and return True; return False if none is left."""
        if self.num_restarts >= self.max_restarts:
            return False
        self.num_restarts += 1
        return True

    def reset(self) -> None:
        """Restore the whole budget, such as after successful work."""
        self.num_restarts = 0
