"""An OpenAI-compatible API that fails, is slow or answers nonsense, as the completion that it judges says."""

import threading
from collections import Counter
from typing import Any

from json_server import JSONServer
from waiting import PATIENCE_SECONDS

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


class JudgeServer(JSONServer):
    """Answers as the completion says.

    Attributes:
        most_at_once: requests that were answered at the same time.
    """

    def __init__(self) -> None:
        self.most_at_once = self._at_once = 0
        self._lock, self._three = threading.Lock(), threading.Barrier(3)
        self._attempts: Counter[str] = Counter()
        super().__init__()

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], object]:
        deed = body["messages"][-1]["content"].rpartition(": ")[2]
        with self._lock:
            self._attempts[deed] += 1
            attempt = self._attempts[deed]
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if deed.startswith("three"):
                self._three.wait(PATIENCE_SECONDS)
            if deed == "hangs":
                threading.Event().wait(PATIENCE_SECONDS)
            if deed in ERRORS:
                return ERRORS[deed], {}, f"no judgement for {key}"
            if deed == "fails once" and attempt == 1:
                return 503, {"Retry-After": "0"}, "later"
            if deed == "a page":
                return 200, {}, "<html>"
            text = f"Score: {attempt}" if deed == "differs" else ANSWERS.get(deed, "Score: 10")
            message = {"role": "assistant", "content": None if deed == "silent" else text}
            choice = {"message": message, "finish_reason": "length" if deed == "cut" else "stop"}
            return 200, {}, {"choices": [choice]}
        finally:
            with self._lock:
                self._at_once -= 1
