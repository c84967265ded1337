"""Learning curves from the metrics files: `pala plot RUN [RUN ...]`.

    one run                          pala plot runs/pong-...        -> runs/pong-.../learning_curve.png
    published runs                   pala plot results/precision    -> learning_curves.png
    seeds and settings compared      pala plot runs/a runs/b runs/c -> learning_curves.png

Two panels: the unclipped return of whole episodes, as a running mean over all ranks, over environment steps and over
training time. One run also shows its quartiles and, if it gossips, how far its ranks are apart. Of several runs,
those that differ in nothing but the seed are drawn as one line, their mean, with a band from the lowest to the
highest of them. A hollow mark beside a line's end is the evaluation of the final policy. Atari games have lines for
what random play and a human reach (dqn_zoo's table). A curve begins once its mean is over 100 episodes, or, in a run
of few, over a tenth of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from pala.config import to_table
from pala.config.influence import phrase, settings_that_matter
from pala.report import runs as run_files
from pala.report.curves import Curve, curve_of, learning_curve
from pala.report.panels import Line, draw_evaluations, draw_learning_curves, draw_references, label_learning_curve
from pala.report.pictures import COLOURS, legend, line_look, new_figure, verbatim, write_picture
from pala.report.runs import Axis, RunData, published
from pala.run.run_folder import gone_settings
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.output import log, print_result
from pala.system.tables import flatten
from pala.system.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GroupBy = Literal["preset", "none"]

AXES: tuple[Axis, ...] = ("steps", "time")
_MOST_DIFFERENCES = 3  # that a label names


class NothingToDrawError(PalaError):
    """A run that is too young."""


@dataclass(frozen=True)
class Run(RunData):
    """One with an episode at least."""

    distances: np.ndarray  # [K, 2] global steps, consensus distance

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Settings with dotted keys, the number of ranks, and what was made in Python."""
        facts = flatten(to_table(self.config)) | {
            "ranks": self.last.get("ranks", 1),
            "python_environment": self.last.get("python_environment", False),
            "python_network": self.last.get("python_network", False),
        }
        facts |= gone_settings(self.record)
        if facts["python_network"]:
            facts["parameters"] = self.last.get("parameters")  # what tells one network made in Python from another
        if facts["python_environment"]:
            facts["env.id"] = self.last.get("environment", "environment made in Python")  # early runs kept no name
        return facts

    @property
    def game(self) -> str:
        """Name of the game."""
        return str(self.facts["env.id"])


def plot(runs: Sequence[Path], output: Path | None = None, group_by: GroupBy = "preset") -> Path:
    """Draw one or several runs; returns the picture's path. Raises PalaError.

    `group_by`: `preset` makes one line of the runs that differ only in the seed, `none` draws every run.
    """
    if not runs:
        raise PalaError("Name the folder of at least one run to draw.")
    loaded = _read_all(runs)
    figure = _draw_one(loaded[0]) if len(loaded) == 1 else _draw_many(_grouped(loaded, group_by))
    beside = loaded[0].path if len(loaded) == 1 and loaded[0].path in map(Path, runs) else Path()
    output = output or beside / ("learning_curve.png" if len(loaded) == 1 else "learning_curves.png")
    write_picture(figure, output)
    return output


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def read(path: Path) -> Run:
    """Read the episodes and distances of a run. Raises PalaError if it is no run or has no episode yet."""
    run, ranks = run_files.read(path)
    if not len(run.returns):
        raise NothingToDrawError(
            f"Run '{path}' has no whole episode yet with a finite return, so there is nothing to draw; try again "
            "later. If its episodes have no end, 'env.max_episode_steps' gives them one."
        )
    key = "consensus_distance"
    distances = [(r["global_steps"], r[key]) for rank in ranks for r in rank if r.get(key) is not None]
    return Run(**vars(run), distances=np.array(sorted(distances), np.float64).reshape(-1, 2))


def _read_all(paths: Sequence[Path]) -> list[Run]:
    """Read the runs that have something to draw; of several, those that have not are named. Raises PalaError if none
    has."""
    found: dict[str, Run] = {}  # each once
    faults = []
    for path in (run for given in map(Path, paths) for run in published(given) or [given]):
        try:
            run = read(path)  # which refuses what is no path
            found.setdefault(os.path.realpath(path), run)
        except NothingToDrawError as error:
            faults.append(error)
    if not found:
        raise faults[0]
    for fault in faults:
        log(f"{fault} It is left out.")
    return list(found.values())


# ---- groups and their names ------------------------------------------------------------------------------------------


def _grouped(runs: Sequence[Run], group_by: GroupBy) -> dict[str, list[Run]]:
    """Label -> runs that differ in nothing but the seed, or each run."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        facts = settings_that_matter(run.facts, without=("seed",))
        key = json.dumps(facts, sort_keys=True) if group_by == "preset" else str(number)
        groups.setdefault(key, []).append(run)
    for group in groups.values():
        own = [what for what in ("environment", "network") if len(group) > 1 and group[0].facts[f"python_{what}"]]
        if own:
            log(
                f"{counted(len(group), 'run')} whose {' and '.join(own)} came from Python are drawn as one: code is "
                "not compared. `--group-by none` draws each."
            )
    return dict(zip(_labels(list(groups.values())), groups.values(), strict=True))


def _labels(groups: list[list[Run]]) -> list[str]:
    """Return for each group what sets it apart, or the folder's name if that is nothing or too much."""
    several = any(len(group) > 1 for group in groups)
    settings = [settings_that_matter(group[0].facts, without=("seed",) if several else ()) for group in groups]
    keys = dict.fromkeys(key for facts in settings for key in facts)
    differing = [key for key in keys if len({repr(facts[key]) for facts in settings if key in facts}) > 1]
    labels = [", ".join(phrase(key, facts[key]) for key in differing if key in facts) for facts in settings]
    if not 1 <= len(differing) <= _MOST_DIFFERENCES or len(set(labels)) < len(labels):
        labels = [group[0].path.resolve().name for group in groups]
    if len(set(labels)) < len(labels):
        labels = [str(group[0].path) for group in groups]
    return [label + _size(group) for label, group in zip(labels, groups, strict=True)]


def _size(group: list[Run]) -> str:
    if len(group) == 1:
        return ""
    seeds = {run.facts["seed"] for run in group}
    return f" (mean and range of {counted(len(group), 'seed' if len(seeds) == len(group) else 'run')})"


# ---- drawing ---------------------------------------------------------------------------------------------------------


def _draw_one(run: Run) -> Figure:
    gossips = len(run.distances) > 0
    figure = new_figure(11, 6.8 if gossips else 4.9)
    mosaic = [["steps", "time"], ["distance", "distance"]] if gossips else [["steps", "time"]]
    panels: dict[str, Axes] = figure.subplot_mosaic(mosaic, height_ratios=[3, 1.2][: len(mosaic)])  # type: ignore[arg-type]
    for axis in AXES:
        seconds = label_learning_curve(panels[axis], axis, [run])
        _draw_banded(panels[axis], learning_curve(run.over(axis, seconds), run.returns, banded=True))
        draw_evaluations(panels[axis], axis, seconds, [Line("", line_look(0), [run])])
        draw_references(panels[axis], run.reference)
    if gossips:
        steps, distances = run.distances.T
        label_learning_curve(panels["distance"], "steps", [run])
        _draw_banded(panels["distance"], curve_of(steps, distances, 5 * run.facts["ranks"], banded=True))
        panels["distance"].set_ylabel("consensus distance\n(L2 norm)")
        panels["distance"].set_ylim(bottom=0)
    legend(figure, panels["steps"])
    figure.suptitle(verbatim(f"{run.path.resolve().name}: {run.game}, {phrase('ranks', run.facts['ranks'])}"))
    return figure


def _draw_banded(axes: Axes, curve: Curve) -> None:
    axes.plot(curve.x, curve.y, "o" if curve.is_point else "", color=COLOURS[0], label="running mean")
    axes.fill_between(
        curve.x, curve.low, curve.high, color=COLOURS[0], alpha=0.18, linewidth=0, label="interquartile range"
    )


def _draw_many(groups: dict[str, list[Run]]) -> Figure:
    runs = [run for group in groups.values() for run in group]
    games = {run.game for run in runs}
    figure = new_figure(11, 4.9)
    lines = [Line(label, line_look(number), group) for number, (label, group) in enumerate(groups.items())]
    _, height = draw_learning_curves(figure, AXES, lines, runs[0].reference if len(games) == 1 else None)
    figure.set_figheight(max(4.9, height))
    if len(games) == 1:
        figure.suptitle(verbatim(games.pop()))
    return figure


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Draw learning curves of one or several runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of the runs, or of results with an archive of runs."""
    output: Path | None = None
    """Picture to write; otherwise RUN/learning_curve.png, for several runs ./learning_curves.png."""
    group_by: GroupBy = "preset"
    """`preset`: runs that differ only in the seed make one line, their mean, with their range. `none`: a line a run."""


@exit_on_mistake()
def main() -> None:
    """Run `pala plot`."""
    command = read_command("pala plot", sys.argv[1:], Command())
    print_result(str(plot(command.runs, command.output, command.group_by)))
