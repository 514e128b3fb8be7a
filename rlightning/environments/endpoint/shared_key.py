"""An API key for many trajectories, used by a client with one connection for all of them."""

import asyncio
import hmac
import secrets
from collections.abc import Mapping

from rlightning.environments.endpoint.session import Session

HEADER = "x-session-id"
"""HTTP header that names the session of a request."""
WAIT_SECONDS = 10.0
"""Maximum seconds that a request waits for its session to be added."""


class SharedKey:
    """An API key and the sessions that use it; a header of each request names the session.

    ``id`` is the public part of the key.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"sk-{self.id}-{secrets.token_urlsafe(24)}"
        self._sessions: dict[str, Session] = {}
        self._added = asyncio.Event()

    def is_given(self, key: str) -> bool:
        """Return whether ``key`` equals this key, by a comparison in constant time."""
        return hmac.compare_digest(self.key.encode(), key.encode())

    def add(self, name: str, session: Session) -> None:
        """Register a session under a name."""
        self._sessions[name] = session
        self._added.set()
        self._added = asyncio.Event()

    def remove(self, name: str) -> None:
        """Deregister the session of that name."""
        self._sessions.pop(name, None)

    async def find(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session that a request's headers name, or any session if they name none. Wait until there is one,
        for :data:`WAIT_SECONDS` at most; then return None.
        """
        name = headers.get(HEADER)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while (session := self._get(name)) is None:
                    await self._added.wait()
        except TimeoutError:
            return None
        return session

    def _get(self, name: str | None) -> Session | None:
        return next(iter(self._sessions.values()), None) if name is None else self._sessions.get(name)
