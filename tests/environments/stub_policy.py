"""What policies of tests have in common that sample by themselves."""

from typing import Any

from rlightning.environments import Message, Reply
from rlightning.types import Outcome


class StubPolicy:
    """Keeps nothing of what is reported, and resumes nothing."""

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        raise NotImplementedError

    async def report(self, outcome: Outcome, state: object = None) -> None: ...

    async def resume(self) -> Any:
        return None
