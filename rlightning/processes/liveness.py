"""Whether a process is alive, how long to wait for it, and how often to start it again."""

import time
from collections.abc import Callable

from rlightning import intervals


class Deadline:
    """A point in time, so many seconds from now, after which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds until it, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end

    def wait_until(self, is_met: Callable[[], bool], poll_interval: float | None = None) -> bool:
        """Poll a condition until it is met, or the deadline has passed; returns whether it is met.

        Args:
            is_met: asked every ``poll_interval`` seconds.
            poll_interval: seconds; :data:`~rlightning.intervals.SHORT_POLL_INTERVAL` unless given.
        """
        while not is_met():
            if self.is_over:
                return False
            time.sleep(intervals.SHORT_POLL_INTERVAL if poll_interval is None else poll_interval)
        return True


class Heartbeat:
    """Counts the seconds without a heartbeat.

    Only those that this process could observe: one that was suspended, perhaps with the other process, or that had no
    core, counts at most twice its interval for the time between two of its ticks.

    Args:
        interval: seconds between two calls of :meth:`tick`.

    Attributes:
        silent_seconds: since the last heartbeat.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.silent_seconds = 0.0
        self._last_tick = time.monotonic()

    def beat(self) -> None:
        """Note a heartbeat, or whatever else shows that the other process is alive."""
        self.silent_seconds = 0.0

    def tick(self) -> float:
        """Add the time since the last tick; returns :attr:`silent_seconds`."""
        now = time.monotonic()
        self.silent_seconds += min(now - self._last_tick, 2 * self.interval)
        self._last_tick = now
        return self.silent_seconds


class RestartPolicy:
    """A restart budget: so many restarts until the next :meth:`reset`."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0

    def take(self) -> bool:
        """Return whether a process that failed may be started again, and count that restart."""
        if self.num_restarts >= self.max_restarts:
            return False
        self.num_restarts += 1
        return True

    def reset(self) -> None:
        """Restore the whole budget, as when the process has done some work."""
        self.num_restarts = 0
