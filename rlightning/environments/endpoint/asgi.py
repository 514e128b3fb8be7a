"""HTTP requests and responses, in ASGI's form."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rlightning.environments.endpoint.errors import APIError
from rlightning.foreign_text import describe_error
from rlightning.python_values import JsonObject

Message = MutableMapping[str, Any]
"""An ASGI message: the scope of a request, or an event."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has closed its connection in the middle of its request."""


class Request:
    """An HTTP request; its path has no query and no trailing slash, and its header names are in lower case."""

    def __init__(self, scope: Message, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].rstrip("/")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive

    async def read_json(self, max_bytes: int) -> JsonObject:
        """Return the body as a JSON object; raises an APIError if it is not one, or exceeds ``max_bytes``."""
        read, is_whole = bytearray(), False
        while not is_whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            read += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            if len(read) > max_bytes:
                raise APIError(f"The request has more than {max_bytes} bytes.", 413)
        try:
            body = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise APIError(f"The request is no JSON: {describe_error(error)}.") from error
        if not isinstance(body, dict):
            raise APIError("The request has to be a JSON object.")
        return body

    async def wait_until_gone(self) -> None:
        """Wait until the client has closed its connection; call this after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def send_json(send: Send, body: object, status: int = 200, headers: Mapping[bytes, bytes] | None = None) -> None:
    """Send a response with a JSON body."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    own = {b"content-type": b"application/json", b"content-length": b"%d" % len(text)}
    await send({"type": "http.response.start", "status": status, "headers": [*{**own, **(headers or {})}.items()]})
    await send({"type": "http.response.body", "body": text})
