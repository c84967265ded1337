"""The prose of docstrings, as far as a pattern can tell. Ruff's D401 looks at the verbs that begin functions' ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from support import REPOSITORY

FIRST_WORD = re.compile(r"(As|Be|How|Of|Or|That|The same|What|Where|Which|Who|Whose|Why|With)\b")
WORDS = re.compile(r"\b(but for|goes on|go on|so long|so many|so often)\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring: of modules, classes, functions and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())


def faults(source: str) -> list[str]:
    found = [(line, text, FIRST_WORD.match(text) or WORDS.search(text)) for line, text in docstrings(source)]
    return [f"{line}: '{match[0]}' in '{text[:80]}'" for line, text, match in found if match]


@pytest.mark.parametrize("folder", ["pala", "launch"])
def test_docstrings_begin_with_a_verb_or_a_noun_and_use_plain_words(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(REPOSITORY)}:{fault}" for file in files for fault in faults(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "word"),
    [
        ("What a rank does.", "What"),
        ("The same of a spare.", "The same"),
        ("Wait so  many seconds.", "so many"),
        ("Send all models but\n    for the last.", "but for"),
    ],
)
def test_others_are_found(docstring: str, word: str) -> None:
    (fault,) = faults(f'def f():\n    """{docstring}"""\n')
    assert fault.startswith(f"2: '{word}' in '")
    (fault,) = faults(f'class A:\n    n: int\n    """{docstring}"""\n')
    assert fault.startswith(f"3: '{word}' in '")


def test_plain_ones_are_not_found() -> None:
    assert not faults('def f():\n    """Return models that go one way, as often as asked. Who asks, is known."""\n')
