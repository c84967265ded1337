"""Reports as data: columns that say how a cell is made of a row, and pages of sections.

SPEED = Column("steps/s", lambda run: run.steps_per_s, ",.0f")
Page("Speeds").section("Training", "Steps of all ranks.", table([SPEED], runs)).text()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pala.system import text
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically

Row = TypeVar("Row")
Form = str | Callable[[Any], str]


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table: its title, and how its cells are made of rows."""

    title: str
    value: str | Callable[[Row], Any]
    """Function that finds a row's value, or its key in rows that are tables."""
    form: Form = ""
    """A format such as `,.0f`, also of a `Spread`, or a function that makes the text."""

    def cell(self, row: Row) -> str:
        """Return the text of a row's cell; empty where the value is None."""
        value = self.value(row) if callable(self.value) else cast(Mapping[str, Any], row).get(self.value)
        if value is None:
            return ""
        if callable(self.form):
            return self.form(value)
        return value.text(self.form) if isinstance(value, text.Spread) else f"{value:{self.form}}"


def table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    """Return a Markdown table of the rows, without columns that are empty; nothing if there is no row."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return text.table([column.title for column in columns], cells) if cells else ""


class Page:
    """A page of Markdown that is written from top to bottom."""

    def __init__(self, title: str) -> None:
        self._parts = [f"# {title}"]

    def add(self, *parts: str) -> Page:
        """Add paragraphs, without those that are empty."""
        self._parts += filter(None, parts)
        return self

    def section(self, title: str, lead: str, content: str) -> Page:
        """Add a section with a paragraph before its content; nothing if there is no content."""
        return self.add(f"## {title}", lead, content) if content else self

    def text(self) -> str:
        """Return the page, as readable in a terminal or a log as on the web."""
        return "\n\n".join(self._parts) + "\n"


def origin(result: Mapping[str, Any]) -> str:
    """Return the line that says when, from which commit and by which command a result was made."""
    changed = " (changed)" if result["git_dirty"] else ""
    return f"{result['date']}, commit {result['git_commit']}{changed}: `{result['command']}`"


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files of a report; returns their paths. Raises PalaError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            write_atomically(folder / name, content.encode())
    except OSError as error:
        raise PalaError(f"The report cannot be written to '{folder}': {reason(error)}; see '--output'.") from None
    return [folder / name for name in texts]
