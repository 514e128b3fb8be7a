"""The pages of docs/ name files and pages that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"`((?:rlightning|callbacks|tests|examples|configs|benchmarks)/[\w/.]*)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text)
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    for link, anchor in links:
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (page.parent / link).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link
