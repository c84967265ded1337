"""What panels of learning curves have in common: lines of runs that belong together, what they are measured by (random
play, a human, the final policy's evaluation), and the words on their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pala.report.curves import Curve, mean_of
from pala.report.pictures import MARKERS, tidy
from pala.report.text import short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REFERENCES = (("random play", (0, (1, 2))), ("human", (0, (7, 3))))  # names and line styles
_FARTHEST_REFERENCE = 1.5  # times a panel's height beyond its end; farther ones would flatten the curves
_BESIDE = 0.018  # of an axis: from the end of a line to its mark, and from mark to mark
_MARK: dict[str, Any] = {"markerfacecolor": "white", "markersize": 6, "capsize": 3, "linewidth": 1.3, "zorder": 3}
_SINGLE, _SEVERAL = "± standard error", "mean and range of runs"
_EARLIER_END = 0.02  # of an axis: a mean that ends so much before the last of its runs is explained


def tidy_learning_curve(panel: Axes, x_label: str, smooth: int) -> None:
    """Label a panel of learning curves that are means of `smooth` episodes."""
    from matplotlib.ticker import EngFormatter

    tidy(panel)
    panel.set_ylabel(f"episode return\n(unclipped, mean of {smooth} episodes)")
    panel.set_xlabel(x_label)
    if "steps" in x_label:
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))


def steps_label(frame_skips: set[int]) -> str:
    """Label for an axis of steps; `frame_skips`: emulator frames a step of all that is drawn on it."""
    frames = f" (1 step = {min(frame_skips)} frames)" if len(frame_skips) == 1 and frame_skips != {1} else ""
    return f"environment steps of all ranks{frames}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """(seconds in the unit, its name) for an axis of this length."""
    return (1.0, "seconds") if longest_s < 180 else (60.0, "minutes") if longest_s < 3 * 3600 else (3600.0, "hours")


def draw_group(axes: Axes, curves: Sequence[Curve], label: str, look: dict[str, Any]) -> None:
    """Draw one curve; or several thin ones, their mean and their range."""
    line = mean_of(curves) if len(curves) > 1 else curves[0]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.x, curve.y, linewidth=0.6, alpha=0.5, **look | {"marker": ""})
        axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.18, linewidth=0)
    places = (0.04 * MARKERS.index(look["marker"]), 0.3)  # shares of the panel's diagonal, so that markers do not meet
    axes.plot(line.x, line.y, label=label, markevery=places, markersize=5, **look)


def explain_ends(panel: Axes, groups: Sequence[Sequence[Curve]]) -> None:
    """Say below a panel why its thick lines end before its thin ones, if they do."""
    low, high = panel.get_xlim()
    for curves in groups:
        ends = [curve.x[-1] for curve in curves]
        if max(ends) - min(ends) > _EARLIER_END * (high - low):
            panel.set_xlabel(f"{panel.get_xlabel()}\nA mean and its range end where the shortest of their runs ends.")
            return


def draw_references(panel: Axes, scores: tuple[float, float] | None, across: bool = False) -> None:
    """Draw what random play and a human reach, as lines over what is already drawn; `across` a panel whose returns lie
    on its x axis. A score that is far from everything drawn is named, with the side on which it lies, and not drawn."""
    if scores is None:
        return
    limits = panel.get_xlim if across else panel.get_ylim
    low, high = limits()
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
    """Where a line of one or several runs ends, and what their final policies scored."""

    x: float
    evaluations: Sequence[dict[str, Any]]
    look: dict[str, Any]


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
            [x], [mean], yerr=[[mean - ends[0]], [ends[1] - mean]], fmt=mark.look["marker"], color=mark.look["color"],
            **_MARK,
        )  # fmt: skip
    if drawn:
        meanings = dict.fromkeys(_SEVERAL if len(mark.evaluations) > 1 else _SINGLE for mark in drawn)
        meaning = meanings.popitem()[0] if len(meanings) == 1 else f"{_SEVERAL}; of one {_SINGLE}"
        panel.errorbar([], [], yerr=[], fmt="o", color="#555555", label=f"evaluation, {meaning}", **_MARK)
