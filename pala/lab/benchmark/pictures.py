"""The benchmark's picture: where a step's time goes, and steps a second over the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.lab.benchmark.analysis import all_training, parts_of, training_of
from pala.report.pictures import COLOURS, MARKERS, new_figure, tidy, verbatim, write_picture
from pala.system.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OPERATIONS = "operations"
_HATCHES = {"environment": "", _OPERATIONS: "...", "inference": "//", "update": "", "exchange": "xx", "wait": "||"}
"""So that neighbours are told apart in grey."""
_PIECE_COLOURS = {
    "environment": COLOURS[0], _OPERATIONS: COLOURS[5], "inference": COLOURS[1], "update": COLOURS[2],
    "exchange": COLOURS[3], "wait": COLOURS[4], "other": "#999999",
}  # fmt: skip


def draw(benchmark: dict[str, Any], output: Path) -> None:
    """Draw where a step's time goes beside its lower bound, and steps/s over the number of ranks. Raises PalaError."""
    jobs, machine = benchmark["jobs"], benchmark["machine"]
    beyond = [_is_beyond_cores(job, machine) for job in jobs]
    bars = sum(len(job["precisions"]) * (1 + len(job["exchanges"])) + 1 for job in jobs)
    height = max(4.6, 1.9 + 0.3 * bars)
    figure = new_figure(13, height)
    split, speed = figure.subplots(1, 2, width_ratios=[1.35, 1])
    _draw_split(split, jobs, beyond)
    _draw_speed(speed, jobs)
    _mark_beyond_cores(speed, beyond)
    for panel, columns in ((split, 4), (speed, 2)):
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.7 / height), ncols=columns, frameon=False, fontsize=9)
    env = benchmark["config"]["env"]
    title = f"{env['id']}, {env['num_envs']} environments a rank; {machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(verbatim(title), fontsize=11)
    write_picture(figure, output)


def _is_beyond_cores(job: dict[str, Any], machine: dict[str, Any]) -> bool:
    """Return whether the job had more ranks than cores on the host that started it; of others only their ranks are
    known."""
    return sum(rank.get("host") == machine["host"] for rank in job["of_ranks"]) > machine["cores"]


def _mark_beyond_cores(axes: Axes, beyond: list[bool]) -> None:
    label = "more ranks than cores"
    for x, is_beyond in enumerate(beyond):
        if is_beyond:
            axes.axvspan(x - 0.5, x + 0.5, color="#e4e4e4", zorder=0, linewidth=0, label=label)
            label = ""


def _draw_split(axes: Axes, jobs: list[dict[str, Any]], beyond: list[bool]) -> None:
    """Draw stacked bars, from top to bottom as in the tables; a gap after each number of ranks."""
    bars: list[tuple[float, str, dict[str, float]]] = []  # place, label, pieces
    y = 0.0
    for job, is_beyond in zip(jobs, beyond, strict=True):
        ranks = counted(job["ranks"], "rank") + (" (beyond cores),\n" if is_beyond else ", ")
        for parts in parts_of(job):
            bound = {"environment": parts.environment_us, _OPERATIONS: parts.operations_us}
            mine = [t for t in training_of(job) if t.precision == parts.precision]
            group = [(f"{ranks}{parts.precision}: lower bound", bound), *((t.exchange, t.split_us) for t in mine)]
            bars += [(y + i, label, pieces) for i, (label, pieces) in enumerate(group)]
            y += len(group) + 0.25
        y += 0.5
    places, left = [place for place, _, _ in bars], [0.0] * len(bars)
    for name, colour in _PIECE_COLOURS.items():
        widths = [pieces.get(name, 0.0) for _, _, pieces in bars]
        axes.barh(
            places, widths, left=left, height=0.78, color=colour, linewidth=0, label=name, hatch=_HATCHES.get(name),
            edgecolor="white",
        )  # fmt: skip
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.text(end, place, f" {end:,.0f}", va="center", fontsize=8)
    axes.set_yticks(places, [label for _, label, _ in bars])
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlim(0, 1.13 * max(left))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    tidy(axes, "x")
    axes.set_axisbelow(True)
    axes.set_xlabel("microseconds a step of a rank (median)")


def _draw_speed(axes: Axes, jobs: list[dict[str, Any]]) -> None:
    """Draw a marker with its range for each kind of training; over those of a precision, their upper bound."""
    kinds = list(dict.fromkeys((t.precision, t.exchange) for t in all_training(jobs)))
    precisions = list(dict.fromkeys(precision for precision, _ in kinds))
    exchanges = list(dict.fromkeys(exchange for _, exchange in kinds))
    step = 0.7 / len(kinds)
    for number, kind in enumerate(kinds):
        drawn = [(x, t) for x, job in enumerate(jobs) for t in training_of(job) if (t.precision, t.exchange) == kind]
        speeds = [t.steps_per_s for _, t in drawn]
        filled = precisions.index(kind[0]) == 0
        colour = COLOURS[exchanges.index(kind[1]) % len(COLOURS)]
        axes.errorbar(
            [x + (number - (len(kinds) - 1) / 2) * step for x, _ in drawn], [s.median for s in speeds],
            yerr=[[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]],
            fmt=MARKERS[exchanges.index(kind[1]) % len(MARKERS)], color=colour, capsize=3,
            markerfacecolor=colour if filled else "white", label=f"{kind[1]}, {kind[0]}",
        )  # fmt: skip
    for number, precision in enumerate(precisions):
        mine = [i for i, (of, _) in enumerate(kinds) if of == precision]
        begin, end = (((i - (len(kinds) - 1) / 2) * step) for i in (mine[0] - 0.45, mine[-1] + 0.45))
        places = {x: p for x, job in enumerate(jobs) for p in parts_of(job) if p.precision == precision}
        axes.hlines(
            [p.bound_steps_per_s.median for p in places.values()], [x + begin for x in places],
            [x + end for x in places], color="black", linestyle=("-", "--", ":")[number % 3], linewidth=1.4,
            label=f"upper bound, {precision}",
        )  # fmt: skip
    axes.set_xticks(range(len(jobs)), [str(job["ranks"]) for job in jobs])
    axes.set_xlim(-0.5, len(jobs) - 0.5)
    axes.set_ylim(bottom=0)
    tidy(axes, "y")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("global steps a second (median and range)")
