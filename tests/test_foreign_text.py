"""Text from outside of the package is cut at a length before it is quoted."""

from rlightning.foreign_text import MAX_CHARACTERS, cut, cut_line, cut_value


def test_cut_keeps_start_and_end() -> None:
    assert cut("short") == "short"
    assert cut("abcdefghij", 4) == "ab\n[... 6 characters left out ...]\nij"
    assert len(cut("x" * 30_000_000)) < MAX_CHARACTERS + 60


def test_cut_line_is_one_line() -> None:
    assert cut_line(ValueError("one\n two\tthree")) == "one two three"
    assert cut_line("x" * 20, 10) == "xxxxxxx..."
    assert cut_value("a\nb") == r"'a\nb'"
    assert cut_value(list(range(1000)), 12) == "[0, 1, 2,..."


def test_characters_that_no_file_can_hold_are_escaped() -> None:
    assert cut("a\ud800b") == cut_line("a\ud800b") == r"a\ud800b"
