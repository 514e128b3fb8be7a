"""Statistics of a prompt set, logged once for the whole set."""

import logging
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlightning.data.sources import RowTable
from rlightning.errors import ConfigError

logger = logging.getLogger(__name__)

Integers = NDArray[np.integer[Any]]
"""An array of integers of any width."""


class Note(IntFlag):
    """Flags for unusual properties of a prompt, such as an empty completion, which are counted and logged."""

    DROPPED_BOS = 1
    DROPPED_EOS = 2
    RENDERED_BEFORE = 4
    INSIDE_THOUGHT = 8
    BEYOND_POSITIONS = 16
    EMPTY_COMPLETION = 32


_MESSAGES = {
    Note.DROPPED_BOS: "have the beginning-of-sequence token in their text, which the tokenizer adds too: one of "
    "the two is left out",
    Note.DROPPED_EOS: "end with the end-of-sequence token, of their text or of the tokenizer: it is left out",
    Note.RENDERED_BEFORE: "begin with the special token that the chat template begins with: they are taken as rendered "
    "before, and get neither the chat template nor the system prompt",
    Note.INSIDE_THOUGHT: "end with the tag that opens the model's thought: completions begin inside the thought, "
    "without the tag. A reward function can have prompt and completion as one text, as its parameter full_text",
    Note.EMPTY_COMPLETION: "have an empty completion: what is learned after them is the end-of-sequence token alone",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and lengths of a prompt set's prompts.

    Attributes:
        num_rows: number of rows of the set.
        num_overlong: number of prompts over the limit.
        longest: index of the row with the longest prompt.
        longest_tokens: number of tokens of the longest prompt.
        notes: for each flag of :class:`Note` the number of rows that have it, and the index of the first.
    """

    num_rows: int
    num_overlong: int
    longest: int
    longest_tokens: int
    notes: dict[int, tuple[int, int]]

    def report(self, table: RowTable, limit: int, overlong: Literal["drop", "truncate"], positions: int | None) -> None:
        """Log the counts; raise a ConfigError if no prompt is left, or if rows exceed the model's positions."""
        for note, message in _MESSAGES.items():
            if note in self.notes:
                count, first = self.notes[note]
                found = f"{count} of {self.num_rows} prompts of '{table.path}'"
                logger.info("%s %s (first: %s).", found, message, table.where(first))
        if self.num_overlong:
            self._report_overlong(table, limit, overlong)
        if Note.BEYOND_POSITIONS in self.notes:
            count, first = self.notes[Note.BEYOND_POSITIONS]
            raise ConfigError(
                f"{table.where(first)}: prompt and completion have more tokens than the model's {positions} positions, "
                f"as in {count} of {self.num_rows} rows. Shorten or remove them."
            )

    def _report_overlong(self, table: RowTable, limit: int, overlong: Literal["drop", "truncate"]) -> None:
        count = (
            f"{self.num_overlong} of {self.num_rows} prompts of '{table.path}' have more than "
            f"max_prompt_tokens={limit} tokens"
        )
        place = f"the longest, {table.where(self.longest)}, has {self.longest_tokens}"
        if overlong == "truncate":
            logger.warning("%s and keep their last %d; %s.", count, limit, place)
        elif self.num_overlong == self.num_rows:
            raise ConfigError(f"All {count}; {place}. Raise max_prompt_tokens, or use overlong='truncate'.")
        else:
            logger.warning("%s and are dropped; %s.", count, place)


def summarize(num_tokens: Integers, notes: Integers, limit: int) -> Summary:
    """Return a set's statistics from prompts' lengths in tokens before truncation, [rows], and :class:`Note` flags."""
    found = {int(note): np.flatnonzero(notes & note) for note in Note}
    longest = int(num_tokens.argmax())
    return Summary(
        num_rows=len(num_tokens),
        num_overlong=int((num_tokens > limit).sum()),
        longest=longest,
        longest_tokens=int(num_tokens[longest]),
        notes={note: (len(rows), int(rows[0])) for note, rows in found.items() if len(rows)},
    )
