"""The common part of pictures: colours, empty figures, panels, legends, files.

matplotlib is imported by the functions that draw: it takes half a second, and training continues where it is missing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.report.curves import WINDOW, Curve, mean_of
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*X"


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of this size in inches. Raises PalaError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PalaError(f"A picture needs matplotlib ({error}): `pip install matplotlib`.") from None
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


def legend(figure: Figure | SubFigure, axes: Axes) -> None:
    """Draw one legend for all panels, below them, in as many columns as their width holds."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    columns = max(1, int(12 * figure.bbox.width / figure.dpi) // (max(map(len, labels)) + 6))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False)


def verbatim(text: str) -> str:
    """Escape a label or title: matplotlib reads `$` as the begin of a formula, and hides labels that begin with `_`. In
    an ASCII locale letters of a file's name come as bytes, which it does not take."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def draw_group(axes: Axes, curves: Sequence[Curve], label: str, look: dict[str, Any]) -> None:
    """Draw one curve; or several thin ones, their mean and their range."""
    line = mean_of(curves) if len(curves) > 1 else curves[0]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.x, curve.y, linewidth=0.6, alpha=0.5, **look | {"marker": ""})
        axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.12, linewidth=0)
    first = 0.04 * MARKERS.index(look.get("marker", MARKERS[0]))  # so that the markers of lines do not meet
    axes.plot(line.x, line.y, label=verbatim(label), markevery=(first, 0.3), markersize=5, **look)


def tidy_learning_curve(panel: Axes, x_label: str) -> None:
    """Label a panel of learning curves."""
    from matplotlib.ticker import EngFormatter

    tidy(panel)
    panel.set_ylabel(f"episode return\n(unclipped, mean of {WINDOW} episodes)")
    panel.set_xlabel(x_label)
    if "steps" in x_label:
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))


def steps_label(frame_skips: set[int]) -> str:
    """Label for an axis of steps; `frame_skips`: emulator frames a step of all that is drawn on it."""
    frames = f" (1 step = {min(frame_skips)} frames)" if len(frame_skips) == 1 and frame_skips != {1} else ""
    return f"environment steps of all ranks{frames}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return (seconds in the unit, its name) for an axis of this length."""
    return (1.0, "seconds") if longest_s < 180 else (60.0, "minutes") if longest_s < 3 * 3600 else (3600.0, "hours")


def write_picture(figure: Figure, output: Path) -> None:
    """Write a figure in the format that the file's name ends in. Raises PalaError."""
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=output.suffix.lstrip(".") or "png")
        write_atomically(output, picture.getvalue())
    except (OSError, ValueError, RuntimeError) as error:  # the last: a format for LaTeX without that
        raise PalaError(f"The picture cannot be written to '{output}': {reason(error)}.") from None
