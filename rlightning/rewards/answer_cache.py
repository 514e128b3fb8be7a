"""A file that caches a judge's answers, and that several processes may use concurrently."""

import logging
import sqlite3
from pathlib import Path

from rlightning.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_TIMEOUT = 5.0
"""Maximum seconds of waiting for another process's write."""


class AnswerCache:
    """A cache of a judge's answers, by request, in an SQLite file; errors while in use are logged once, not raised.

    Args:
        path: the file, which is created if it does not exist.

    Raises:
        ConfigError: the file cannot be created, or is not a cache of answers.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._is_warned = path, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA synchronous=OFF")  # answers lost in a power failure are requested again
            self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"Judge: cache={path} cannot hold answers: {error}. Name a file that is not there yet, on a local disk."
            ) from error

    def read(self, key: str) -> str | None:
        """Return the judge's cached answer to the request with this key; None if there is none."""
        try:
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._warn(error)
            return None
        return None if row is None else str(row[0])

    def write(self, key: str, answer: str) -> None:
        """Store the judge's answer to the request with this key."""
        try:
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        except (sqlite3.Error, UnicodeEncodeError) as error:
            self._warn(error)

    def close(self) -> None:
        """Close the SQLite file."""
        self._database.close()

    def _warn(self, error: Exception) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("The judge's cache %s fails, so that answers are requested again: %s", self.path, error)
