"""A key that the sessions of many trajectories have in common, for a client that keeps one connection for all."""

import asyncio
import hmac
import secrets
from collections.abc import Mapping

from rlightning.environments.endpoint.session import Session

HEADER = "x-session-id"
"""Of a request: which session it is of."""
WAIT_SECONDS = 10.0
"""For a session that a request names before the trainer has heard of it."""


class SharedKey:
    """A key, and its sessions by the names that requests give in a header.

    Attributes:
        id: public part of the key.
        key: that the client authenticates with.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"sk-{self.id}-{secrets.token_urlsafe(24)}"
        self._sessions: dict[str, Session] = {}
        self._added = asyncio.Event()

    def is_given(self, key: str) -> bool:
        """Return whether a client's key is this one, in constant time."""
        return hmac.compare_digest(self.key.encode(), key.encode())

    def add(self, name: str, session: Session) -> None:
        """Answer requests that name this session."""
        self._sessions[name] = session
        self._added.set()
        self._added = asyncio.Event()

    def remove(self, name: str) -> None:
        """Answer them no more."""
        self._sessions.pop(name, None)

    async def find(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session that a request names; any one, for a request that names none, which only reads."""
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
