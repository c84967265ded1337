"""Panels that several programs draw: learning curves, and figures over numbers of ranks.

Curves are measured by marks: random play, a human, the final policy's evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pala.report.curves import WINDOW, learning_curve, mean_of
from pala.report.pictures import MARKERS, legend, tidy, verbatim
from pala.report.runs import Axis, RunData
from pala.system.text import short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


_REFERENCES = (("random play", (0, (1, 2))), ("human", (0, (7, 3))))  # names and line styles
_FARTHEST_REFERENCE = 1.5  # times a panel's height beyond its end; farther ones would flatten the curves
_BESIDE = 0.018  # of an axis: from the end of a line to its mark, and from mark to mark
_MARK: dict[str, Any] = {"markerfacecolor": "white", "markersize": 6, "capsize": 3, "linewidth": 1.3, "zorder": 3}
_SINGLE, _SEVERAL = "± standard error", "mean and range of runs"
_PANEL_INCHES, _ROW_INCHES = 3.8, 0.22  # of a panel, whose label has 2.6; of a row of a legend
_EARLIER_END = 0.02  # of an axis: a mean that ends so much before the last of its runs is explained


@dataclass(frozen=True)
class Line:
    """A line of a panel of learning curves: the mean of runs that are alike."""

    label: str
    look: dict[str, Any]
    runs: Sequence[RunData]
    cut: Sequence[RunData] = ()
    """Runs that have not completed: thin, and no part of the mean."""


def draw_learning_curves(
    figure: Figure | SubFigure, axes: Sequence[Axis], lines: Sequence[Line], reference: tuple[float, float] | None
) -> tuple[list[Axes], float]:
    """Draw a row of panels, one over each of the axes: the lines, what final policies scored, and what random play and
    a human reach; below them a legend. Return the panels, and the height in inches that all of it needs."""
    runs = [run for line in lines for run in (*line.runs, *line.cut)]
    panels = list(figure.subplots(1, len(axes), squeeze=False)[0])
    for axis, panel in zip(axes, panels, strict=True):
        seconds = label_learning_curve(panel, axis, runs)
        _draw_lines(panel, axis, seconds, lines)
        draw_evaluations(panel, axis, seconds, lines)
        draw_references(panel, reference)
    return panels, _PANEL_INCHES + _ROW_INCHES * legend(figure, panels[0])


def label_learning_curve(panel: Axes, axis: Axis, runs: Sequence[RunData]) -> float:
    """Label a panel of these runs' learning curves; return the seconds in a unit of its axis of time."""
    from matplotlib.ticker import EngFormatter

    tidy(panel)
    panel.set_ylabel(f"episode return\n(unclipped, mean of {WINDOW} episodes)")
    longest_s = max(float(run.time_s.max()) for run in runs)
    units = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"))
    seconds, unit = units[(longest_s >= 180) + (longest_s >= 3 * 3600)]
    skips = {run.frame_skip for run in runs}
    frames = f" (1 step = {min(skips)} frames)" if len(skips) == 1 and skips != {1} else ""
    if axis == "steps":
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
    panel.set_xlabel(f"environment steps of all ranks{frames}" if axis == "steps" else f"training time ({unit})")
    return seconds


def _draw_lines(panel: Axes, axis: Axis, seconds: float, lines: Sequence[Line]) -> None:
    """Draw the lines' running means: of several runs thin ones, their mean and their range. A mean that ends before
    its runs is explained below the panel."""
    earlier = [0.0]
    for line in lines:
        curves, cut = (
            [learning_curve(run.over(axis, seconds), run.returns) for run in runs] for runs in (line.runs, line.cut)
        )
        thin, label = [*(curves if len(curves) > 1 else ()), *cut], verbatim(line.label)
        for number, curve in enumerate(thin):
            name = "" if curves or number else label
            thinly = line.look if curve.is_point else line.look | {"marker": ""}
            panel.plot(curve.x, curve.y, linewidth=0.6, alpha=0.5, label=name, markersize=4, **thinly)
        if not curves:
            continue
        mean = curves[0]
        if len(curves) > 1:
            mean = mean_of(curves)
            panel.fill_between(mean.x, mean.low, mean.high, color=line.look["color"], alpha=0.12, linewidth=0)
            ends = [curve.x[-1] for curve in curves]
            earlier.append(max(ends) - min(ends))
        first = 0.04 * MARKERS.index(line.look["marker"])  # so that the markers of lines do not meet
        every = None if mean.is_point else (first, 0.3)
        panel.plot(mean.x, mean.y, label=label, markevery=every, markersize=5, **line.look)
    low, high = panel.get_xlim()
    if max(earlier) > _EARLIER_END * (high - low):
        panel.set_xlabel(f"{panel.get_xlabel()}\nA mean ends with the shortest of its runs.")


def draw_evaluations(panel: Axes, axis: Axis, seconds: float, lines: Sequence[Line]) -> None:
    """Mark what final policies scored, beside the ends of their lines, which are all drawn: of several runs the mean
    with their range, of one with its standard error. The marks of lines that end together stand in a row."""
    low, high = panel.get_xlim()
    beside = _BESIDE * (high - low)
    places: list[float] = []
    meanings: list[str] = []
    for line in lines:
        runs = [*line.runs, *line.cut]
        found = [run.evaluation for run in runs if run.evaluation is not None]
        if not found:
            continue
        x = max(run.end(axis, seconds) for run in runs) + beside
        while any(abs(x - place) < 0.99 * beside for place in places):
            x += beside
        places.append(x)
        meanings.append(_SEVERAL if len(found) > 1 else _SINGLE)
        scores = np.array([evaluation["mean_return"] for evaluation in found])
        error = found[0].get("standard_error") or 0.0
        ends = (scores.min(), scores.max()) if len(scores) > 1 else (scores[0] - error, scores[0] + error)
        mean = scores.mean()
        panel.errorbar(
            [x],
            [mean],
            yerr=[[max(0.0, mean - ends[0])], [max(0.0, ends[1] - mean)]],  # equal scores: rounding
            fmt=line.look["marker"],
            color=line.look["color"],
            **_MARK,
        )
    if meanings:
        meaning = meanings[0] if len(set(meanings)) == 1 else f"{_SEVERAL}; of one {_SINGLE}"
        panel.errorbar([], [], yerr=[], fmt="o", color="#555555", label=f"evaluation, {meaning}", **_MARK)


def draw_references(panel: Axes, scores: tuple[float, float] | None, across: bool = False) -> None:
    """Draw what random play and a human reach, as lines over what is already drawn; `across` a panel whose returns lie
    on its x axis. A score that is far from everything drawn is named, with the side on which it lies, and not drawn."""
    if scores is None:
        return
    low, high = panel.get_xlim() if across else panel.get_ylim()
    farthest = _FARTHEST_REFERENCE * (high - low)
    sides = ("left of", "right of") if across else ("below", "above")
    near = []
    for score, (name, style) in zip(scores, _REFERENCES, strict=True):
        label = f"{name}: {short_number(score)}".replace("-", "\N{MINUS SIGN}")
        if low - farthest <= score <= high + farthest:
            near.append(score)
        else:
            label += f" ({sides[bool(score > high)]} the panel)"
        line = panel.axvline if across else panel.axhline
        line(score, color="#555555", linewidth=1.1, linestyle=style, zorder=1.5, label=label)
    margin = 0.03 * (max([high, *near]) - min([low, *near]))
    ends = (min([low, *(score - margin for score in near)]), max([high, *(score + margin for score in near)]))
    (panel.set_xlim if across else panel.set_ylim)(*ends)


def shade_beyond_cores(panel: Axes, counts: Sequence[int], beyond: set[int]) -> None:
    """Shade the part of a panel over numbers of ranks, on a logarithmic axis, that is of more ranks than cores."""
    if not beyond:
        return
    low, high = panel.get_xlim()
    last = max((ranks for ranks in counts if ranks < min(beyond)), default=None)
    begin = np.sqrt(last * min(beyond)) if last else low
    panel.axvspan(begin, high, color="#dddddd", zorder=0, linewidth=0, label="more ranks than cores")
    panel.set_xlim(low, high)


def tidy_ranks(panel: Axes, counts: Sequence[int], **labels: Any) -> None:
    """Tidy a panel over numbers of ranks, on a logarithmic axis with a tick at each number."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [f"{ranks:,}" for ranks in counts], **labels)
    panel.xaxis.minorticks_off()
    panel.set_xlabel("ranks")
    tidy(panel)
