"""A server with OpenAI's /v1/completions that answers with canned texts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CompletionsServer:
    """Serves on loopback.

    Attributes:
        requests: bodies, in their order.
        keys: what came in the header that has the key.
        status: of answers to requests of completions.
        text: of each completion.
        token_ids: of each completion; None: not sent.
        refused: a key of a request that it does not take.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status, self.text, self.refused = 200, "hi", ""
        self.models: list[dict[str, Any]] = [{"id": "served"}]
        self.token_ids: list[int] | None = None
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": served.models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.requests.append(body)
                served.keys.append(self.headers.get("Authorization"))
                if served.refused and served.refused in body:
                    self.answer(400, {"error": f"unknown key {served.refused}"})
                    return
                choice = {"text": served.text, "finish_reason": "stop", "token_ids": served.token_ids}
                self.answer(served.status, {"choices": [{**choice, "index": i} for i in range(body["n"])]})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[CompletionsServer]:
    server = CompletionsServer()
    try:
        yield server
    finally:
        server.close()
