"""Panels that several programs draw: learning curves, and figures over numbers of ranks.

Curves are measured by marks: random play, a human, the final policy's evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pala.report.curves import Curve, learning_curve
from pala.report.pictures import draw_group, tidy
from pala.report.runs import Axis, RunData
from pala.system.text import short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_REFERENCES = (("random play", (0, (1, 2))), ("human", (0, (7, 3))))  # names and line styles
_FARTHEST_REFERENCE = 1.5  # times a panel's height beyond its end; farther ones would flatten the curves
_BESIDE = 0.018  # of an axis: from the end of a line to its mark, and from mark to mark
_MARK: dict[str, Any] = {"markerfacecolor": "white", "markersize": 6, "capsize": 3, "linewidth": 1.3, "zorder": 3}
_SINGLE, _SEVERAL = "± standard error", "mean and range of runs"
_EARLIER_END = 0.02  # of an axis: a mean that ends so much before the last of its runs is explained


def explain_ends(panel: Axes, groups: Sequence[Sequence[Curve]]) -> None:
    """Say below a panel why its thick lines end before its thin ones, if they do."""
    low, high = panel.get_xlim()
    for curves in groups:
        ends = [curve.x[-1] for curve in curves]
        if max(ends) - min(ends) > _EARLIER_END * (high - low):
            panel.set_xlabel(f"{panel.get_xlabel()}\nA mean ends with the shortest of its runs.")
            return


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


@dataclass(frozen=True)
class Mark:
    """The end of a line of one or several runs, and what their final policies scored."""

    x: float
    evaluations: Sequence[dict[str, Any]]
    look: dict[str, Any]


def mark_of(runs: Sequence[RunData], axis: Axis, seconds: float, look: dict[str, Any]) -> Mark:
    """Return the mark of a line of these runs; `seconds` are in a unit of the time axis."""
    evaluations = [run.evaluation for run in runs if run.evaluation is not None]
    return Mark(max(run.end(axis, seconds) for run in runs), evaluations, look)


def draw_evaluations(panel: Axes, marks: Sequence[Mark]) -> None:
    """Mark what final policies scored, beside the ends of their lines, which are all drawn: of several runs the mean
    with their range, of one with its standard error. The marks of lines that end together stand in a row."""
    low, high = panel.get_xlim()
    beside = _BESIDE * (high - low)
    drawn = [mark for mark in marks if mark.evaluations]
    places: list[float] = []
    for mark in drawn:
        x = mark.x + beside
        while any(abs(x - place) < 0.99 * beside for place in places):
            x += beside
        places.append(x)
        scores = np.array([evaluation["mean_return"] for evaluation in mark.evaluations])
        error = mark.evaluations[0].get("standard_error") or 0.0
        ends = (scores.min(), scores.max()) if len(scores) > 1 else (scores[0] - error, scores[0] + error)
        mean = scores.mean()
        panel.errorbar(
            [x],
            [mean],
            yerr=[[max(0.0, mean - ends[0])], [max(0.0, ends[1] - mean)]],  # equal scores: rounding
            fmt=mark.look["marker"],
            color=mark.look["color"],
            **_MARK,
        )
    if drawn:
        meanings = dict.fromkeys(_SEVERAL if len(mark.evaluations) > 1 else _SINGLE for mark in drawn)
        meaning = meanings.popitem()[0] if len(meanings) == 1 else f"{_SEVERAL}; of one {_SINGLE}"
        panel.errorbar([], [], yerr=[], fmt="o", color="#555555", label=f"evaluation, {meaning}", **_MARK)


def shade_beyond_cores(panel: Axes, counts: Sequence[int], beyond: set[int]) -> None:
    """Shade the part of a panel over numbers of ranks, on a logarithmic axis, that is of more ranks than cores."""
    if not beyond:
        return
    low, high = panel.get_xlim()
    last = max((ranks for ranks in counts if ranks < min(beyond)), default=None)
    begin = np.sqrt(last * min(beyond)) if last else low
    panel.axvspan(begin, high, color="#dddddd", zorder=0, linewidth=0, label="more ranks than cores")
    panel.set_xlim(low, high)


@dataclass(frozen=True)
class Line:
    """A line of a panel of learning curves: the mean of runs that are alike."""

    label: str
    look: dict[str, Any]
    runs: Sequence[RunData]
    cut: Sequence[RunData] = ()
    """Runs that have not completed: thin, and no part of the mean."""


def draw_lines(panel: Axes, lines: Sequence[Line], axis: Axis, seconds: float) -> list[list[Curve]]:
    """Draw lines of running means, where `seconds` are in a unit of the time axis; return the curves of each mean."""
    groups = []
    for line in lines:
        curves, cut = (
            [learning_curve(run.over(axis, seconds), run.returns) for run in runs] for runs in (line.runs, line.cut)
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
    reference: tuple[float, float] | None,
) -> None:
    """Draw the lines, what final policies scored, and what random play and a human reach."""
    explain_ends(panel, draw_lines(panel, lines, axis, seconds))
    draw_evaluations(panel, [mark_of([*line.runs, *line.cut], axis, seconds, line.look) for line in lines])
    draw_references(panel, reference)


def tidy_ranks(panel: Axes, counts: Sequence[int], **labels: Any) -> None:
    """Tidy a panel over numbers of ranks, on a logarithmic axis with a tick at each number."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [f"{ranks:,}" for ranks in counts], **labels)
    panel.xaxis.minorticks_off()
    panel.set_xlabel("ranks")
    tidy(panel)
