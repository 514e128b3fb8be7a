"""Environments on a server of OpenEnv (package openenv-core), reached through its WebSocket protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlightning import intervals
from rlightning.environments.environment import Places
from rlightning.environments.step_environment import StepEnvironment
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value, describe_error
from rlightning.python_values import JsonObject
from rlightning.types.trajectory import Prompt

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of an observation in bytes."""


class OpenEnv(StepEnvironment):
    """Runs the environment of an OpenEnv server; each trajectory has its own session there.

    The server is reset with the prompt's index as ``seed``, and its first observation replaces the prompt. The text of
    each turn is sent as a field of an action, and the policy reads the returned observation next. The server decides on
    rewards and on the end. A resumed run repeats the trajectories that were running at the checkpoint.

    Args:
        url: URL of the server, such as ``http://127.0.0.1:8000``.
        action: the action's field for the policy's text, such as "message" or "code".
        action_fields: additional fields of each action.
        observation: the observation's field that the policy reads; None for all fields, as JSON.
        reset_columns: columns of the prompt set that are passed to ``reset``.
        max_turns: maximum turns of the policy, after which a trajectory is truncated.
        max_sessions: maximum number of concurrent sessions; the time of waiting trajectories does not count. In worker
            processes their ``max_trajectories`` is the limit instead.
        timeout: maximum seconds for a response of the server.
    """

    def __init__(
        self,
        url: str,
        action: str,
        *,
        action_fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        reset_columns: Sequence[str] = (),
        max_turns: int = 8,
        max_sessions: int = 1,
        timeout: float = 60.0,
    ) -> None:
        rules = {
            f"OpenEnv: url={url} must begin with http, https, ws or wss, and ://": url.startswith(
                ("http://", "https://", "ws://", "wss://")
            ),
            f"OpenEnv: max_sessions={max_sessions} must be at least 1": max_sessions >= 1,
            f"OpenEnv: timeout={timeout} must be above 0 seconds": timeout > 0,
        }
        check_rules(rules)
        self.url = f"{url.replace('http', 'ws', 1).rstrip('/') if url.startswith('http') else url.rstrip('/')}/ws"
        self.action, self.action_fields, self.observation = action, dict(action_fields or {}), observation
        self.reset_columns, self.timeout = tuple(reset_columns), timeout
        super().__init__(lambda: Session(self), max_turns=max_turns)
        self.places = Places(max_sessions)

    async def check(self) -> None:
        """Raise a ConfigError if the server cannot be reached."""
        session = Session(self)
        try:
            await session.connect()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"OpenEnv: {describe_error(error)}. Start the server, or change url.") from error
        finally:
            await session.close()


class Session:
    """One trajectory's session at an OpenEnv server: an object with ``reset`` and ``step`` for
    :class:`StepEnvironment`.
    """

    def __init__(self, settings: OpenEnv) -> None:
        self._settings = settings
        self._socket: Any = None

    async def connect(self) -> None:
        """Connect to the server; raises a ConnectionError if it cannot be reached."""
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException
        except ImportError as error:
            raise ConfigError(f"OpenEnv: {cut_line(error)}. Install it: pip install websockets.") from error
        url = self._settings.url
        try:
            self._socket = await connect(
                url, open_timeout=intervals.SERVICE_CONNECT_TIMEOUT, max_size=MAX_MESSAGE_BYTES
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise ConnectionError(f"{url} cannot be reached: {cut_line(error) or type(error).__name__}") from error

    async def reset(self, prompt: Prompt) -> str:
        """Connect to the server, start an episode for a prompt, and return the first observation as text."""
        await self.connect()
        columns = {name: prompt.columns[name] for name in self._settings.reset_columns}
        result = await self._request("reset", {"seed": prompt.index, **columns})
        return self._read_observation(result)

    async def step(self, message: Mapping[str, str]) -> tuple[str, float | None, bool, dict[str, float]]:
        """Send the policy's turn as an action; return the observation as text, the reward or None, whether the episode
        has ended, and no metrics.
        """
        action = {**self._settings.action_fields, self._settings.action: message["content"]}
        result = await self._request("step", action)
        reward, is_done = result.get("reward"), bool(result.get("done"))
        text = "" if is_done else self._read_observation(result)
        return text, None if reward is None else float(reward), is_done, {}

    async def close(self) -> None:
        """End the session, if there is one, so that the server can accept another."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # the connection is closed already
                await socket.send(json.dumps({"type": "close"}))
            await socket.close()

    async def _request(self, kind: str, data: Mapping[str, object]) -> JsonObject:
        """Send a request, and return the server's response; raises a RuntimeError if it violates the protocol."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # its last message, such as that all sessions are in use, can still be read
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            text = await asyncio.wait_for(self._socket.recv(), self._settings.timeout)
        except ConnectionClosed as error:
            raise RuntimeError(f"the server closed the session before it answered {kind}: {cut_line(error)}") from error
        answer = json.loads(text)
        result = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(result, dict):
            raise RuntimeError(
                f"the server answered {kind} by something else than OpenEnv's messages: {cut_value(text)}"
            )
        if answer.get("type") == "error":
            code, message = result.get("code", "?"), cut_line(result.get("message", ""))
            raise RuntimeError(f"the server refused {kind} ({code}): {message}")
        return result

    def _read_observation(self, result: JsonObject) -> str:
        """Convert an observation to the text for the policy; raises a RuntimeError if it lacks the field."""
        fields, name = result.get("observation"), self._settings.observation
        if name is None:
            return json.dumps(fields, ensure_ascii=False)
        if not isinstance(fields, dict) or name not in fields:
            known = ", ".join(fields) if isinstance(fields, dict) else cut_value(fields)
            raise RuntimeError(f"the server's observation has no field '{name}': {known}")
        value = fields[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
