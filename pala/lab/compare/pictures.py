"""The pictures of a comparison, and the numbers behind its curves. A variant has the same colour and line style in all
of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pala.lab.compare.measures import Comparison, Run, bootstrap_interval, efficiencies, interquartile_mean
from pala.lab.compare.plan import Cell
from pala.report.curves import WINDOW, Curve, curve_of, mean_of
from pala.report.panels import Line, draw_learning_curves, draw_references, shade_beyond_cores, tidy_ranks
from pala.report.pictures import LINE_STYLES, MARKERS, line_look, new_figure, tidy, verbatim, write_picture
from pala.report.runs import Axis
from pala.system.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as AxisOfPanel
    from matplotlib.figure import Figure

_CSV_POINTS = 100
_GUIDE: dict[str, Any] = {"color": "#555555", "linewidth": 1, "linestyle": "--"}


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the pictures that the runs allow; returns their paths. Raises PalaError."""
    figures = {
        "learning_curves.png": _learning_curves(comparison),
        "final_scores.png": _final_scores(comparison),
        "scaling.png": draw_scaling(comparison),
    }
    drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        write_picture(figure, path)
    for name in figures:
        if folder / name not in drawn:
            (folder / name).unlink(missing_ok=True)  # of an earlier report
    return list(drawn)


# ---- learning curves -------------------------------------------------------------------------------------------------


def _learning_curves(comparison: Comparison) -> Figure | None:
    """Draw a row of panels for each game and number of ranks; over steps and over time.

    A game whose variants never have the same number of ranks gets a single row. Runs that have not completed are thin.
    What was disturbed is drawn over steps alone, variants that the preset's `drawn` leaves out not at all.
    """
    drawn = comparison.preset.drawn or comparison.variants
    rows = _rows([run for run in comparison.runs if len(run.returns) and run.cell.variant in drawn])
    if not rows:
        return None
    axes: tuple[Axis, ...] = ("steps", "time") if comparison.preset.undisturbed else ("steps",)
    figure = new_figure(10, 4 * len(rows))
    heights = []
    for (title, cells), part in zip(rows.items(), figure.subfigures(len(rows), 1, squeeze=False)[:, 0], strict=True):
        reference = next(iter(cells.values()))[0].reference
        panels, height = draw_learning_curves(part, axes, _lines(comparison, cells), reference)
        panels[0].set_title(f"{title} ({comparison.preset.name})", loc="left")
        heights.append(height)
    figure.set_figheight(len(rows) * max(heights))
    return figure


def _lines(comparison: Comparison, cells: dict[Cell, list[Run]]) -> list[Line]:
    """Return the lines of a row of panels. Those of a variant with several numbers of ranks differ in their markers
    and styles."""
    several = len({cell.ranks for cell in cells}) > 1
    order = sorted(cells, key=lambda cell: (comparison.variants.index(cell.variant), cell.ranks))
    lines = []
    for place, cell in enumerate(order):
        look = line_look(comparison.place(cell.variant)) | {"marker": MARKERS[place % len(MARKERS)]}
        if several:
            look["linestyle"] = LINE_STYLES[place % len(LINE_STYLES)]
        name = f"{cell.variant}, {counted(cell.ranks, 'rank')}" if several else cell.variant
        complete, cut = ([run for run in cells[cell] if run.completed == is_complete] for is_complete in (True, False))
        size = {0: "not completed", 1: "1 run"}.get(len(complete), f"mean of {len(complete)} runs")
        lines.append(Line(f"{name}, {size}", look, complete, cut))
    return lines


def _rows(runs: list[Run]) -> dict[str, dict[Cell, list[Run]]]:
    """Return the title of each row of panels -> the runs of each of its cells."""
    cells: dict[Cell, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run)
    in_place = Counter((cell.game, cell.ranks) for cell in cells)
    rows: dict[str, dict[Cell, list[Run]]] = {}
    for cell, of_cell in cells.items():
        alone = all(number == 1 for (game, _), number in in_place.items() if game == cell.game)
        several = sum(game == cell.game for game, _ in in_place) > 1
        title = cell.game if alone and several else f"{cell.game}, {counted(cell.ranks, 'rank')}"
        rows.setdefault(title, {})[cell] = of_cell
    return rows


def curve_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the mean curves and their ranges, for curves.csv."""
    rows = []
    for cell, runs in comparison.cells.items():
        drawn = [run for run in runs if len(run.returns)]
        for axis in ("steps", "time_s")[: 1 + comparison.preset.undisturbed]:
            if not drawn:
                continue
            mean = mean_of([curve_of(getattr(run, axis), run.returns, WINDOW) for run in drawn])
            at = np.unique(np.linspace(0, len(mean.x) - 1, min(_CSV_POINTS, len(mean.x))).astype(int))
            rows += [_curve_row(cell, len(drawn), axis, mean, i) for i in at]
    return rows


def _curve_row(cell: Cell, num_runs: int, axis: str, curve: Curve, i: int) -> dict[str, Any]:
    place: dict[str, Any] = {"game": cell.game, "ranks": cell.ranks, "variant": cell.variant, "runs": num_runs}
    values = {"x": curve.x[i], "mean_return": curve.y[i], "lowest": curve.low[i], "highest": curve.high[i]}
    return place | {"axis": axis} | {key: round(float(value), 3) for key, value in values.items()}


# ---- scores --------------------------------------------------------------------------------------------------------


def _final_scores(comparison: Comparison) -> Figure | None:
    """Draw a panel for each game: each run's evaluation is a dot, the interquartile mean and its interval a bar."""
    scored = {cell: [run.score for run in runs if run.score is not None] for cell, runs in comparison.cells.items()}
    scored = {cell: scores for cell, scores in scored.items() if scores}
    sizes = Counter(cell.game for cell in scored)
    if not sizes:
        return None
    figure = new_figure(8, 0.9 * len(sizes) + 0.5 * len(scored))
    panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=list(sizes.values()))[:, 0]
    for game, panel in zip(sizes, panels, strict=True):
        _draw_scores(panel, {cell: np.array(of) for cell, of in scored.items() if cell.game == game}, comparison)
        panel.set_title(game, loc="left")
    panels[-1].set_xlabel("return of the final policy")
    return figure


def _draw_scores(panel: Axes, scores: dict[Cell, np.ndarray], comparison: Comparison) -> None:
    for y, (cell, values) in enumerate(scores.items()):
        colour = line_look(comparison.place(cell.variant))["color"]
        panel.hlines(y, *bootstrap_interval([values]), color=colour, linewidth=9, alpha=0.3)
        panel.vlines(interquartile_mean(values), y - 0.28, y + 0.28, color=colour, linewidth=2.5)
        panel.plot(values, y + 0.2 * np.linspace(-1, 1, len(values) + 2)[1:-1], "o", color=colour, markersize=5)
    labels = [verbatim(f"{cell.variant}, {counted(cell.ranks, 'rank')}") for cell in scores]
    panel.set_yticks(range(len(scores)), labels)
    panel.set_ylim(len(scores) - 0.5, -0.5)
    tidy(panel, grid="x")
    draw_references(panel, comparison.cells[next(iter(scores))][0].reference, across=True)
    panel.plot([], [], "o", color="#555555", markersize=5, label="a run")
    panel.plot([], [], "|", color="#555555", markersize=12, markeredgewidth=2.5, label="interquartile mean")
    if any(len(values) > 1 for values in scores.values()):
        panel.plot([], [], color="#555555", linewidth=9, alpha=0.3, label="95 % interval")
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)


# ---- scaling ---------------------------------------------------------------------------------------------------------


def draw_scaling(comparison: Comparison) -> Figure | None:
    """Draw for each game steps a second and efficiency over the number of ranks. None if no variant has several."""
    lines = comparison.speeds_over_ranks()
    if not lines:
        return None
    games = list(dict.fromkeys(game for game, _ in lines))
    figure = new_figure(11, 0.8 + 3.2 * len(games))
    for game, (speed, efficiency) in zip(games, figure.subplots(len(games), 2, squeeze=False), strict=True):
        of_game = {name: lines[game, name] for name in comparison.variants if (game, name) in lines}
        _draw_speeds(speed, efficiency, comparison, game, of_game)
        speed.set_title(game, loc="left")
    return figure


def _draw_speeds(
    speed: Axes, efficiency: Axes, comparison: Comparison, game: str, lines: dict[str, dict[int, float]]
) -> None:
    """Draw speeds and efficiencies. Both axes of the speeds are logarithmic, so that a speed in proportion to the ranks
    is a straight line."""
    counts = sorted({ranks for of in lines.values() for ranks in of})
    for variant, of in lines.items():
        look = line_look(comparison.place(variant))
        bound = "\n(waits for no rank: upper bound)" * comparison.is_independent(game, variant)
        name = verbatim(f"{variant}{bound}")
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
    _label_plainly(speed.yaxis)
    efficiency.set_ylim(0, 1.05 * max(1.0, efficiency.get_ylim()[1]))
    efficiency.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _label_plainly(axis: AxisOfPanel) -> None:
    """Label a logarithmic axis by 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
