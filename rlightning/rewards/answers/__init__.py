"""Answers of mathematical tasks: finding them in a text, parsing, and comparing."""

from rlightning.rewards.answers.equality import answers_equal
from rlightning.rewards.answers.kinds import Answer, Text
from rlightning.rewards.answers.location import find_answer, read_reference
from rlightning.rewards.answers.reading import read_listing

__all__ = ["Answer", "Text", "answers_equal", "find_answer", "read_listing", "read_reference"]
