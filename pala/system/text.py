"""Numbers and tables as text."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_NAMED = 8


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 run`, `2 runs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 2`, `ranks 0 to 3`, `ranks 0, 2, 5`, and of many how many more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def duration(seconds: float) -> str:
    """Return a time in words: `45 s`, `16 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def short_number(value: float) -> str:
    """Return a number with enough digits to tell returns apart."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


@dataclass(frozen=True)
class Spread:
    """Median and range of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """Return `1,930 (1,850-2,010)` for the form `,.0f`."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table whose columns line up: words to the left, figures to the right. Empty columns are left
    out."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    columns = [[header[i], *(row[i] for row in rows)] for i in kept]
    widths = [max(map(len, column)) for column in columns]
    figures = [all(not cell or cell.lstrip("-")[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(cells: Iterable[str]) -> str:
        padded = zip(cells, widths, figures, strict=True)
        return "| " + " | ".join(f"{c:>{width}}" if right else f"{c:<{width}}" for c, width, right in padded) + " |"

    rule = "".join(
        "|" + ("-" * (width + 1) + ":" if right else "-" * (width + 2))
        for width, right in zip(widths, figures, strict=True)
    )
    head, *body = map(line, zip(*columns, strict=True))
    return "\n".join([head, rule + "|", *body])


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as CSV, below a line with the keys; an empty text without rows."""
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()
