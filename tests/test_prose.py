"""The prose of docstrings and of the pages of README and docs/, as far as a pattern can tell.

Ruff's D401 looks at the verbs that begin functions' docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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


# ---- messages --------------------------------------------------------------------------------------------------------

RARE = re.compile(
    r"\b(anew|beside|but for|for ever|go(es|ing|ne)? on|nobody|one's own|so long|so many|so often|went on)\b",
    re.IGNORECASE,
)
KEPT = {"environment made anew"}  # names a random stream


def faults_of_messages(source: str) -> list[str]:
    """Name each rare word in a text of the program that is no docstring."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = [(text, RARE.search(text.value)) for text in texts if id(text) not in docs and text.value not in KEPT]
    return [f"{text.lineno}: '{word[0]}' in '{text.value[:80]}'" for text, word in found if word]


def test_messages_use_plain_words() -> None:
    files = sorted((REPOSITORY / "pala").rglob("*.py"))
    found = [
        f"{file.relative_to(REPOSITORY)}:{fault}" for file in files for fault in faults_of_messages(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_rare_words_of_messages_are_found() -> None:
    source = 'def f(x):\n    """Nobody goes on."""\n    log(f"{x} cannot go on.")\n    log("It continues.")\n'
    assert faults_of_messages(source) == ["3: 'go on' in ' cannot go on.'"]


# ---- pages -----------------------------------------------------------------------------------------------------------

OTHERS = {REPOSITORY / "docs" / name for name in ("architecture.md", "api.md")}  # for developers; docstrings
PAGES = [REPOSITORY / "README.md", *sorted(set((REPOSITORY / "docs").glob("*.md")) - OTHERS)]
MOST_WORDS = 30
FORBIDDEN = re.compile(
    r"\b(anew|area(?! under)|beside|but for|for ever|go on|goes on|going on|mean height|nobody|one's own|says so|"
    r"sentences?|so long|so many|so often|went on)\b",
    re.IGNORECASE,
)
NEGATION = re.compile(r"\b(cannot|neither|never|no|nobody|none|not|nothing|unless|without|\w+n't)\b", re.IGNORECASE)


def units(page: str) -> Iterator[str]:
    """Yield each paragraph, list item and cell of a table, without code, pictures and targets of links."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    text = re.sub(r"^ {4,}(?! *[-*] ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n(?=\||#|\s*(?:[-*]|\d+\.) )", text):
        yield from (" ".join(part.split()) for part in (block.strip("|").split("|") if "|" in block else [block]))


def faults_of_page(page: str) -> list[str]:
    """Name each sentence that is too long or negates twice, and each forbidden word."""
    found = []
    for unit in units(page):
        found += [f"'{word[0]}' in: {unit[:80]}" for word in FORBIDDEN.finditer(unit)]
        for sentence in re.split(r"(?<=[.?!:])[*_)\]]*\s+(?=[^a-z])|(?<=[.?!])\s", unit):
            words = re.findall(r"[\w'%.,/-]*\w[\w'%.,/-]*", sentence)
            if len(words) > MOST_WORDS:
                found.append(f"{len(words)} words: {sentence}")
            if len(NEGATION.findall(sentence)) > 1:
                found.append(f"more than one negation: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_written_in_short_plain_sentences(page: Path) -> None:
    found = faults_of_page(page.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("It goes on.", "'goes on' in"),
        ("All but\nfor one.", "'but for' in"),
        ("| a | No rank waits for none. |", "more than one negation"),
        ("word " * 31 + ".", "31 words"),
    ],
)
def test_faults_of_pages_are_found(text: str, fault: str) -> None:
    (found,) = faults_of_page(text)
    assert found.startswith(fault)


def test_code_and_short_plain_sentences_of_pages_pass() -> None:
    text = "word " * 30 + ". No rank waits. It is `not` nothing.\n\n    not never none\n\n```\nno no\n```\n"
    assert not faults_of_page(text)
