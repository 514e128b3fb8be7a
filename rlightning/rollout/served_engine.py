"""An engine that others have started with ``rlightning serve``, named by its URL."""

import logging
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from rlightning import intervals
from rlightning.engine_token import read_token
from rlightning.errors import EngineError
from rlightning.rollout.engine_link import EngineDiedError, EngineLink, VLLMConfig, hang_up, limit_waiting
from rlightning.rollout.engine_wire import NotNowError, enter, parse_url, reach

log = logging.getLogger(__name__)


class ServedEngine(EngineLink):
    """Connects to an engine, and tries again until ``config.start_timeout`` is over; returns before it has."""

    def __init__(self, config: VLLMConfig) -> None:
        super().__init__(config)
        self._address = parse_url(config.url)
        self._token = read_token()
        self._reached: Connection | None = None
        self._gives_up = threading.Event()
        self._begin()

    @property
    def pid(self) -> int:
        """Of the engine's process on its host; waits until it is up."""
        return int(self.ready.result()["pid"])

    def _open(self) -> Connection:
        deadline = time.monotonic() + self.config.start_timeout
        is_known = False
        busy = ""
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return self._try(min(intervals.CONNECT_TIMEOUT, max(left, intervals.RECONNECT_INTERVAL)))
            except (EOFError, OSError) as problem:
                # EAGAIN is how a read of limited time ends.
                is_silent = isinstance(problem, BlockingIOError | TimeoutError)
                reason = "it does not answer" if is_silent else str(problem) or "it closed the connection"
                if isinstance(problem, NotNowError):
                    busy = reason
                elif is_silent and busy:  # the last try may be too short for an answer
                    reason = f"{busy}, and then did not answer"
                if self._is_closing:
                    raise
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"The engine at {self.config.url} could not be reached for {self.config.start_timeout:g} s: "
                        f"{reason}. Start it with `rlightning serve`, or see rollout.engines."
                    ) from problem
            if not is_known:
                log.warning(
                    "The engine at %s cannot be reached yet: %s. Trying for %.0f s.", self.config.url, reason, left
                )
                is_known = True
            self._gives_up.wait(min(intervals.RECONNECT_INTERVAL, left))

    def _try(self, seconds: float) -> Connection:
        """Connect, and wait so long for each of the engine's messages."""
        connection = reach(*self._address, seconds)
        try:
            self._reached = connection
            if self._is_closing:
                raise EOFError
            enter(connection, self.config.url, self._token)
            limit_waiting(connection, self.config.hang_timeout)
        except BaseException:
            self._reached = None
            connection.close()
            raise
        return connection

    def _hang_up(self) -> None:
        if self._is_closing:
            self._gives_up.set()
        if self._reached is not None:
            hang_up(self._reached)

    def _hear(self, number: int | None, status: str, result: Any) -> None:
        if status == "over":
            raise EngineDiedError(f"{self.config.url}: {result}")
        super()._hear(number, status, result)

    def _end(self, how: str) -> EngineError:
        if self._is_closing:
            return EngineDiedError("The engine's connection has been closed.")
        how = "closed the connection" if how == "died" else how
        return EngineDiedError(f"The engine at {self.config.url} {how}.")
