"""The errors of dotted paths whose modules are there, but cannot be imported."""

from pathlib import Path

import pytest
from tiny import refused

from rlightning.dotted_path import import_object


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_there\n", r"ModuleNotFoundError: No module named 'not_there'\. Install it there"),
        ("from . import not_there\n", r"ImportError: cannot import name 'not_there' .*Install it there"),
        ("def score(:\n", r"SyntaxError: .*\. Fix its module\.$"),
        ("\nscore = price\n", r"NameError: name 'price' is not defined \(.*/prices\.py, line 2\)\. Fix its module\.$"),
        ("import os\nos.environ['NO_' 'PRICE']\n", r"KeyError: 'NO_PRICE' \(.*/prices\.py, line 2\)\. Fix its module"),
    ],
)
def test_a_module_that_fails_says_why(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "prices.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path.parent)
    for name in ("score", "Scores.score"):
        with refused(rf"^model\.rewards=x cannot be imported by .*: {message}"):
            import_object(f"{tmp_path.name}.prices.{name}", "model.rewards=x")
