"""An HTTP server on loopback that answers JSON, for tests of what calls one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class JSONServer:
    """Serves until it is closed.

    Attributes:
        url: without a path.
        requests: bodies of what was posted, in their order.
        keys: what came in the header that has the key.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send(200, {}, served.get())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.requests.append(body)
                served.keys.append(self.headers.get("Authorization"))
                self.send(*served.answer(body, served.keys[-1]))

            def send(self, status: int, headers: dict[str, str], content: object) -> None:
                payload = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(payload))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError):  # the client has waited long enough
                    self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def get(self) -> object:
        """Return the answer to a GET request."""
        return {}

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], object]:
        """The status, headers and content that a POST is answered: a text, or what becomes JSON."""
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[Self]:
        server = cls()
        try:
            yield server
        finally:
            server.close()
