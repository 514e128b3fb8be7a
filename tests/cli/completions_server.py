"""A server with OpenAI's /v1/completions that answers with canned texts."""

from typing import Any

from json_server import JSONServer


class CompletionsServer(JSONServer):
    """Answers every request alike.

    Attributes:
        status: of answers to requests of completions.
        text: of each completion.
        token_ids: of each completion; None: not sent.
        refused: a key of a request that it does not take.
    """

    def __init__(self) -> None:
        self.status, self.text, self.refused = 200, "hi", ""
        self.models: list[dict[str, Any]] = [{"id": "served"}]
        self.token_ids: list[int] | None = None
        super().__init__()

    def get(self) -> object:
        return {"data": self.models}

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], object]:
        if self.refused and self.refused in body:
            return 400, {}, {"error": f"unknown key {self.refused}"}
        choice = {"text": self.text, "finish_reason": "stop", "token_ids": self.token_ids}
        return self.status, {}, {"choices": [{**choice, "index": i} for i in range(body["n"])]}
