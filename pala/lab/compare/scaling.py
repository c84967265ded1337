"""The picture of how variants scale: speed, efficiency and learning curves over numbers of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pala.lab.compare.comparison import Comparison
from pala.lab.compare.measures import WINDOW, Run, efficiencies
from pala.report.marks import draw_references, shade_beyond_cores
from pala.report.panels import Line, draw_lines, tidy_ranks
from pala.report.pictures import (
    MARKERS,
    line_look,
    new_figure,
    steps_label,
    tidy_learning_curve,
    time_unit,
)
from pala.system.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_GUIDE: dict[str, Any] = {"color": "#555555", "linewidth": 1, "linestyle": "--"}
_PALEST = 0.9  # of the colour map: what comes after is too pale on white


def draw(comparison: Comparison) -> Figure | None:
    """Draw for each game steps a second and efficiency over the number of ranks; below them, for each variant, the
    learning curves of its numbers of ranks over steps and over time. None if no variant has several."""
    lines = comparison.speeds_over_ranks()
    if not lines:
        return None
    games = list(dict.fromkeys(game for game, _ in lines))
    figure = new_figure(11, 0.8 + 3.2 * (len(games) + len(lines)))
    variants = {game: [name for name in comparison.variants if (game, name) in lines] for game in games}
    parts = figure.subfigures(len(games), 1, squeeze=False, height_ratios=[1 + len(of) for of in variants.values()])
    for game, part in zip(games, parts[:, 0], strict=True):
        rows = part.subplots(1 + len(variants[game]), 2, squeeze=False)
        _draw_speeds(rows[0][0], rows[0][1], comparison, game, {name: lines[game, name] for name in variants[game]})
        rows[0][0].set_title(game, loc="left")
        groups = {name: _over_ranks(comparison, game, name) for name in variants[game]}
        runs = [run for of in groups.values() for of_ranks in of.values() for run in of_ranks]
        seconds, unit = time_unit(max((run.training_s for run in runs), default=0.0))
        looks = _looks({ranks for of in groups.values() for ranks in of})
        for (name, of), panels in zip(groups.items(), rows[1:], strict=True):
            for panel, first in zip(panels, rows[1], strict=True):
                panel.sharex(first)
                panel.sharey(rows[1][0])
            _draw_curves(panels[0], panels[1], of, looks, seconds)
            panels[0].set_title(f"{game}, {name}", loc="left")
            panels[1].set_xlabel(f"training time ({unit})")
        reference, drawn = next((run.reference for run in runs), None), rows[1][0].get_ylim()
        for panel in rows[1:].flat:  # once all curves are there: it ends the scaling of the axis that they share
            draw_references(panel, reference, drawn=drawn)
        for _, panel in rows[1:]:
            panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _over_ranks(comparison: Comparison, game: str, variant: str) -> dict[int, list[Run]]:
    """Return ranks -> the completed runs that have episodes."""
    found = {
        cell.ranks: [run for run in runs if len(run.returns)]
        for cell, runs in comparison.cells.items()
        if (cell.game, cell.variant) == (game, variant)
    }
    return {ranks: found[ranks] for ranks in sorted(found) if found[ranks]}


def _draw_speeds(
    speed: Axes, efficiency: Axes, comparison: Comparison, game: str, lines: dict[str, dict[int, float]]
) -> None:
    """Draw speeds and efficiencies. Both axes of the speeds are logarithmic, so that a speed in proportion to the ranks
    is a straight line."""
    counts = sorted({ranks for of in lines.values() for ranks in of})
    for variant, of in lines.items():
        look = line_look(comparison.looks[variant])
        name = f"{variant}\n(waits for nobody: upper bound)" if comparison.is_independent(game, variant) else variant
        speed.plot(list(of), list(of.values()), label=name, **look)
        efficiency.plot(list(of), list(efficiencies(of).values()), label=name, **look)
    ideal = max(of[min(of)] / min(of) for of in lines.values())
    speed.plot(counts, [ideal * ranks for ranks in counts], **_GUIDE)
    efficiency.axhline(1, label="speed in proportion to ranks", **_GUIDE)
    for panel, label in ((speed, "steps of all ranks a second"), (efficiency, "efficiency")):
        tidy_ranks(panel, counts)
        shade_beyond_cores(panel, counts, comparison.ranks_beyond_cores(game).intersection(counts))
        panel.set_ylabel(label)
    speed.set_yscale("log")
    _label_plainly(speed.yaxis, "{x:,.0f}")
    efficiency.set_ylim(0, 1.05 * max(1.0, efficiency.get_ylim()[1]))
    efficiency.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _looks(counts: set[int]) -> dict[int, dict[str, Any]]:
    """Return number of ranks -> the look of its curves: the more, the darker."""
    from matplotlib import colormaps

    step = _PALEST / max(1, len(counts) - 1)
    return {
        ranks: {"color": colormaps["viridis"](_PALEST - step * i), "marker": MARKERS[i % len(MARKERS)]}
        for i, ranks in enumerate(sorted(counts))
    }


def _draw_curves(
    over_steps: Axes, over_time: Axes, groups: dict[int, list[Run]], looks: dict[int, dict[str, Any]], seconds: float
) -> None:
    """Draw curves, where `seconds` are in the unit of time. That axis is logarithmic: twice the speed moves a curve by
    the same length."""
    tidy_learning_curve(over_steps, steps_label({run.frame_skip for of in groups.values() for run in of}), WINDOW)
    tidy_learning_curve(over_time, "", WINDOW)
    lines = [
        Line(counted(ranks, "rank") + (f", {len(of)} runs" if len(of) > 1 else ""), looks[ranks], of)
        for ranks, of in groups.items()
    ]
    draw_lines(over_steps, lines, "steps", seconds, WINDOW)
    draw_lines(over_time, lines, "time", seconds, WINDOW)
    over_time.set_xscale("log")
    _label_plainly(over_time.xaxis, "{x:g}")


def _label_plainly(axis: Axis, form: str) -> None:
    """Label a logarithmic axis by 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter(form))
