"""An OpenAI-compatible API that fails, is slow or answers nonsense, as the completion that it judges says."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWERS = {
    "good": "It is fine.\n**Score:** 8",
    "bad": "Score: 0",
    "twice": "First I thought Score: 2. No. Score: 6.5",
    "nonsense": "I would rather not say.",
    "off the scale": "Score: 11",
    "negative": "Score: -3",
    "yes": "Verdict: YES",
}
ERRORS = {"fails": 500, "refused": 401, "busy": 429}


class JudgeServer:
    """Serves on loopback.

    Attributes:
        requests: bodies, in their order.
        keys: what came in the header that has the key.
        most_at_once: requests that were answered at the same time.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._attempts: Counter[str] = Counter()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, text = judge.answer(body, self.headers.get("Authorization"))
                payload = text.encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the judge has waited long enough
                    self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], str]:
        """The status, headers and text of a response."""
        deed = body["messages"][-1]["content"].rpartition(": ")[2]
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self._attempts[deed] += 1
            attempt = self._attempts[deed]
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if deed.startswith("slow"):
                time.sleep(0.2)
            if deed == "hangs":
                time.sleep(3.0)
            if deed in ERRORS:
                return ERRORS[deed], {}, f"no judgement for {key}"
            if deed == "fails once" and attempt == 1:
                return 503, {"Retry-After": "0"}, "later"
            if deed == "a page":
                return 200, {}, "<html>"
            message = {"role": "assistant", "content": None if deed == "silent" else ANSWERS.get(deed, "Score: 10")}
            choice = {"message": message, "finish_reason": "length" if deed == "cut" else "stop"}
            return 200, {}, json.dumps({"choices": [choice]})
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def serving() -> Iterator[JudgeServer]:
    server = JudgeServer()
    try:
        yield server
    finally:
        server.close()
