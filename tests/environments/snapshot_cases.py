"""Objects that go on from snapshots, also in workers: the standard library, and nothing of ours."""

from typing import Any

made: list[Any] = []
"""By this process."""


class Diary:
    """A game of four turns, whose observation is all that was said so far."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.num_steps = self.num_restored = 0
        made.append(self)

    def reset(self, prompt: Any) -> str:
        return f"task {prompt.index}"

    def step(self, message: Any) -> Any:
        self.num_steps += 1
        self.said.append(message["content"])
        return " ".join(self.said), float(len(self.said)), len(self.said) == 4, {"said": len(self.said)}


class KeptDiary(Diary):
    def snapshot(self) -> Any:
        return self.said  # the live one, which changes later

    def restore(self, state: Any) -> None:
        self.num_restored += 1
        self.said = state


class OddDiary(KeptDiary):
    def snapshot(self) -> Any:
        return {"said": set(self.said)}


class LostDiary(KeptDiary):
    def restore(self, state: Any) -> None:
        raise KeyError("said")


class Ledger:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> str:
        """Write a note.

        Args:
            text: of it.
        """
        self.notes.append(text)
        return " ".join(self.notes)

    def snapshot(self) -> list[str]:
        return self.notes

    def restore(self, state: list[str]) -> None:
        self.notes = state


def double(number: int) -> int:
    """Double a number.

    Args:
        number: to double.
    """
    return 2 * number
