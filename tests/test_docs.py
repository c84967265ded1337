"""The pages: links lead somewhere, and pages that are named are linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import REPOSITORY

PAGES = [
    *REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "results").rglob("README.md"),
]  # fmt: skip


def prose(page: Path) -> str:
    """A page without its indented and fenced code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"^ {4}(?! *[-*] ).*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", prose(page)):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_that_are_named_are_linked(page: Path) -> None:
    without_links = re.sub(r"\[[^\]]*\]\([^)]*\)", "", prose(page))
    assert re.findall(r"docs/\w+\.md", without_links) == []
