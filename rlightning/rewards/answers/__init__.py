"""Answers of mathematical tasks: where they stand, what they are, and when two are the same."""

from rlightning.rewards.answers.equality import answers_equal
from rlightning.rewards.answers.location import find_answer, find_mark
from rlightning.rewards.answers.reading import Answer, read_answer, read_listing

__all__ = ["Answer", "answers_equal", "find_answer", "find_mark", "read_answer", "read_listing"]
