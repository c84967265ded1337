"""The common part of pictures: colours, empty figures, panels, legends, files.

matplotlib is imported by the functions that draw: it takes half a second.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*X"


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def line_look(number: int) -> dict[str, Any]:
    """Return colour, style and marker of a picture's line with this number. 28 differ in colour and style; those of
    neighbours differ in all three, so that they are told apart in grey."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def tidy(panel: Axes, grid: str = "both") -> None:
    """Give a panel a faint grid, of one axis (`x`, `y`) or both, and take its upper and right borders away."""
    panel.grid(axis=grid, alpha=0.25)  # type: ignore[arg-type]
    panel.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure | SubFigure, axes: Axes) -> int:
    """Draw one legend for all panels, below them, in as few rows as their width holds; return how many."""
    handles, labels = axes.get_legend_handles_labels()
    for rows in range(1, len(labels) + 1):
        columns = math.ceil(len(labels) / rows)
        drawn = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            return rows
        drawn.remove()
    return 0


def verbatim(text: str) -> str:
    """Escape a label or title: matplotlib reads `$` as the begin of a formula, and hides labels that begin with `_`. In
    an ASCII locale letters of a file's name come as bytes, which it does not take."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def write_picture(figure: Figure, output: Path) -> None:
    """Write a figure in the format that the file's name ends in. Raises PalaError."""
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=output.suffix.lstrip(".") or "png")
        write_atomically(output, picture.getvalue())
    except (OSError, ValueError, RuntimeError) as error:  # the last: a format for LaTeX without that
        raise PalaError(f"The picture cannot be written to '{output}': {reason(error)}.") from None
