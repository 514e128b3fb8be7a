"""The pages of docs, and the snippets in them."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"


def read_section(page: str, heading: str) -> str:
    """What a page says under a heading."""
    found = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, f"{page} has no {heading}"
    return found


def find_snippets(text: str, language: str = "python") -> list[str]:
    """The snippets of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def read_environment(text: str, number: int = 0) -> dict[str, Any]:
    """What one of the snippets in YAML says of its environment: ``class_path`` and ``init_args``."""
    found: dict[str, Any] = yaml.safe_load(find_snippets(text, "yaml")[number])["environment"]
    return found


def load_module(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of that name and code, until the test's end."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module
