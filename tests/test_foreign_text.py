"""Text from outside of the package is cut before it is quoted, and shown as it was written, by the real renderers."""

import logging
from html.parser import HTMLParser

import pytest
from tensorboard.plugin_util import markdown_to_safe_html

from rlightning.callbacks.completions_table import _markdown_table, shorten
from rlightning.console import _StandardError
from rlightning.foreign_text import (
    MAX_CHARACTERS,
    cut,
    cut_line,
    cut_value,
    markdown_cell,
    visible,
    visible_on_one_line,
)
from rlightning.report import History, Run, render
from rlightning.report.trajectories import Completion

WRITTEN = [
    ("2*3*4", "2*3*4"),
    ("__init__ and _a_", "__init__ and _a_"),
    ('<img src="x" onerror="y"> <b>', '<img src="x" onerror="y"> <b>'),
    ("![a](http://x/y.png) [b](c) <http://z>", "![a](http://x/y.png) [b](c) <http://z>"),
    ("&lt; &amp;#42; &", "&lt; &amp;#42; &"),
    ("`a` ``b`` ~~c~~", "`a` ``b`` ~~c~~"),
    ("a | b || c \\| d \\* \\\\", "a | b || c \\| d \\* \\\\"),
    ("right\rwrong", "right\\rwrong"),
    ("\x1b[2J\x1b]0;title\x07 \x9b31m", "\\x1b[2J\\x1b]0;title\\x07 \\x9b31m"),
    ("\x02klzzwxh:0001\x03", "\\x02klzzwxh:0001\\x03"),
    ("a\u202eb\u2066c\u2028d\ud83de", "a\\u202eb\\u2066c\\u2028d\\ud83de"),
    ("a\u200eb\u200fc\u061cd\u200be\ufefff\xadg", "a\\u200eb\\u200fc\\u061cd\\u200be\\ufefff\\xadg"),
    ("a\U000e0041\U000e01efb\u2060c\u206a", "a\\U000e0041\\U000e01efb\\u2060c\\u206a"),
    ("\n# one\n\n- two\n    three  \n```\nfour\n```", "\n# one\n\n- two\n    three  \n```\nfour\n```"),
    ("  a  b ", "  a  b "),
    ("😀 👩\u200d👧 é ∑ 数", "😀 👩\u200d👧 é ∑ 数"),
    ("", ""),
    ("$x_1$ {a} a:b +1 -2 #3 1. !", "$x_1$ {a} a:b +1 -2 #3 1. !"),
]


class Texts(HTMLParser):
    """The texts of a page's elements of one kind, and the names of all elements."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_inside = kind, False
        self.texts: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag == self.kind:
            self.is_inside = True
            self.texts.append("")
        elif tag == "br" and self.is_inside:
            self.texts[-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = self.is_inside and tag != self.kind

    def handle_data(self, data: str) -> None:
        if self.is_inside:
            self.texts[-1] += data


def texts_of(html: str, kind: str) -> tuple[list[str], set[str]]:
    parser = Texts(kind)
    parser.feed(html)
    parser.close()
    return parser.texts, parser.names


def test_cut_keeps_start_and_end() -> None:
    assert cut("short") == "short"
    assert cut("ab" + 96 * "-" + "ij", 39) == "ab\n[... 96 characters left out ...]\nij"
    assert MAX_CHARACTERS - 4 < len(cut("x" * 30_000_000)) <= MAX_CHARACTERS


@pytest.mark.parametrize("limit", [1, 2, 34, 35, 36, 37, 100, 999])
def test_cut_notice_counts_towards_limit(limit: int) -> None:
    text = cut("a" + 998 * "b" + "c", limit)
    assert limit - 4 < len(text) <= limit and text.startswith("a")
    assert len(cut("\ud800" * limit, limit)) <= limit  # each is escaped by six characters


def test_cut_line_is_one_line() -> None:
    assert cut_line(ValueError("one\n two\tthree")) == "one two three"
    assert cut_line("x" * 20, 10) == "xxxxxxx..."
    assert cut_value("a\nb") == r"'a\nb'"
    assert cut_value(list(range(1000)), 12) == "[0, 1, 2,..."


def test_characters_that_no_file_can_hold_are_escaped() -> None:
    assert cut("a\ud800b") == cut_line("a\ud800b") == r"a\ud800b"


@pytest.mark.parametrize(("text", "shown"), WRITTEN)
def test_tensorboard_shows_a_cell_as_written(text: str, shown: str) -> None:
    html = markdown_to_safe_html(_markdown_table(["step", "completion", "end"], [[1, text, "stop"], [2, "b", "stop"]]))
    cells, names = texts_of(html, "td")
    assert [cell.replace("\xa0", " ") for cell in cells] == ["1", shown, "stop", "2", "b", "stop"]
    assert names <= {"table", "thead", "tbody", "tr", "th", "td", "br"}


@pytest.mark.parametrize(("text", "shown"), WRITTEN)
def test_the_report_shows_a_completion_as_written(text: str, shown: str) -> None:
    rows = [Completion(1, text, text, 1.0, 1, "stop")]
    page = render(
        Run("run", text, True, 1, 1.0, History(), completions=[rows], settings={"a": text}, config=f"c{text}")
    )
    page.encode()
    assert texts_of(page, "pre")[0] == [
        "\n" + shown,
        "\n" + shown,
        "\nc" + shown,
    ]  # HTML drops the first newline of a <pre>
    assert texts_of(page, "td")[0][:2] == ["a", shown]
    assert "img" not in texts_of(page, "td")[1]


@pytest.mark.parametrize(("text", "shown"), WRITTEN)
def test_the_console_gets_no_control_characters(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("rlightning", logging.WARNING, "", 0, "wrote %s", (text,), None)
    _StandardError().handle(record)
    assert capsys.readouterr().err == f"wrote {shown}\n"
    assert shorten(text, 1000) == visible_on_one_line(text) == " ".join(shown.split())


def test_tabs_are_wide_and_numbers_are_left_alone() -> None:
    assert markdown_cell("\ta") == "\xa0\xa0\xa0\xa0a"
    assert markdown_cell("-1.5e-3, 2+2=") == "-1.5e-3, 2+2="
    assert visible("a\tb\nc") == "a\tb\nc"
