"""Panels that several programs draw: learning curves of runs, and figures over numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pala.report.curves import Curve, learning_curve
from pala.report.marks import draw_evaluations, draw_references, explain_ends, mark_of
from pala.report.pictures import draw_group, tidy
from pala.report.runs import Axis, RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Line:
    """A line of a panel of learning curves: the mean of runs that are alike."""

    label: str
    look: dict[str, Any]
    runs: Sequence[RunData]
    cut: Sequence[RunData] = ()
    """Runs that have not completed: thin, and no part of the mean."""


def draw_lines(panel: Axes, lines: Sequence[Line], axis: Axis, seconds: float, smooth: int) -> list[list[Curve]]:
    """Draw lines of means of `smooth` episodes, where `seconds` are in a unit of the time axis; return the curves that
    each mean is of."""
    groups = []
    for line in lines:
        curves, cut = (
            [learning_curve(run.over(axis, seconds), run.returns, smooth) for run in runs]
            for runs in (line.runs, line.cut)
        )
        label = "" if curves else line.label
        for curve in cut:
            panel.plot(curve.x, curve.y, linewidth=0.6, alpha=0.5, label=label, **line.look | {"marker": ""})
            label = ""
        if curves:
            draw_group(panel, curves, line.label, line.look)
            groups.append(curves)
    return groups


def draw_learning_curves(
    panel: Axes,
    lines: Sequence[Line],
    axis: Axis,
    seconds: float,
    smooth: int,
    reference: tuple[float, float] | None,
) -> None:
    """Draw the lines, what final policies scored, and what random play and a human reach."""
    explain_ends(panel, draw_lines(panel, lines, axis, seconds, smooth))
    draw_evaluations(panel, [mark_of([*line.runs, *line.cut], axis, seconds, line.look) for line in lines])
    draw_references(panel, reference)


def tidy_ranks(panel: Axes, counts: Sequence[int], **labels: Any) -> None:
    """Tidy a panel over numbers of ranks, on a logarithmic axis with a tick at each number."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [f"{ranks:,}" for ranks in counts], **labels)
    panel.xaxis.minorticks_off()
    panel.set_xlabel("ranks")
    tidy(panel)
