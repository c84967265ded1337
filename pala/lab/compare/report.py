"""The report of a comparison: the page with its tables, and CSV files. Pure, except `write`."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pala.lab.compare import pictures
from pala.lab.compare.measures import (
    Comparison,
    Run,
    bootstrap_interval,
    efficiencies,
    interquartile_mean,
    median_reached,
)
from pala.lab.compare.notes import FACTS, ORIGIN, left_out, not_begun, notes
from pala.lab.compare.plan import Cell, Plan
from pala.report.curves import WINDOW
from pala.report.page import Column, Page, table, write_texts
from pala.system.text import Spread, counted, csv_text, short_number


def write(plan: Plan, runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write everything; returns the paths. Raises PalaError."""
    comparison = Comparison.of(plan.preset, runs)
    gaps = [*not_begun(plan, runs), *left_out(plan)]
    drawn = pictures.draw(comparison, folder)
    page, *tables = write_texts(folder, {
        "compare.md": markdown(comparison, folder, [path.name for path in drawn], gaps),
        "runs.csv": csv_text([_row(comparison, run) for run in comparison.runs]),
        "curves.csv": csv_text(pictures.curve_rows(comparison)),
    })  # fmt: skip
    return [page, *drawn, *tables]


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _row(comparison: Comparison, run: Run) -> dict[str, Any]:
    """Return all measures of a run, and what may set it apart; docs/compare.md explains the columns."""
    evaluation, target = run.evaluation or {}, comparison.preset.target_return.get(run.cell.game)
    reached = run.reaches(target) if target is not None else None
    end = comparison.common_steps(run.cell) if run.completed else None
    memory = run.most("memory_peak_bytes")
    row = {
        "run": run.name, "variant": run.cell.variant, "game": run.cell.game, "ranks": run.cell.ranks, "seed": run.seed,
        "completed": run.completed, "global_steps": run.last.get("global_steps"), "training_s": run.training_s,
        "score": run.score, "score_standard_error": evaluation.get("standard_error"),
        "score_episodes": evaluation.get("episodes"), "human_normalised": run.normalised,
        "training_score": run.training_score, "auc": run.auc(end) if end else None, "auc_to_steps": end,
        "steps_per_s": run.steps_per_s, "target_return": target,
        "steps_to_target": reached[0] if reached else None, "s_to_target": reached[1] if reached else None,
        "consensus_distance_relative": run.mean("consensus_distance_relative"),
        "progress_kept": run.progress_kept,
        "staleness_updates": run.mean("staleness_updates"), "staleness_updates_most": run.most("staleness_updates"),
        "time_exchange": run.mean("time_exchange"), "time_wait": run.mean("time_wait"),
        "memory_peak_mib": memory / 2**20 if memory else None,
        "starts": len(run.segments), "lost_ranks": run.count("lost_ranks"),
        "git_commit": run.last.get("git_commit"), "git_dirty": run.last.get("git_dirty"),
        "hosts": " ".join(sorted(set(run.last.get("hosts", [])))),
        **{name.replace(" ", "_"): fact.of(run) for name, fact in FACTS.items()},
    }  # fmt: skip
    return row if comparison.preset.undisturbed else row | dict.fromkeys(_OF_TIME)


_OF_TIME = ("training_s", "steps_per_s", "s_to_target", "time_exchange", "time_wait")  # empty if work ran beside it


# ---- the page --------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison, folder: Path, images: Sequence[str], gaps: Sequence[str] = ()) -> str:
    """Return the whole report, for this folder; `gaps`: sentences on what is not in it."""
    preset, done = comparison.preset, sum(run.completed for run in comparison.runs)
    groups = [Group(comparison, cell, runs) for cell, runs in comparison.cells.items()]
    targets = [group for group in groups if group.target is not None]
    exchanging = [group for group in groups if group.exchanges]
    timed = preset.undisturbed
    page = Page(f"Comparison: {preset.name}").add(
        f"{counted(done, 'completed run')} of {len(comparison.runs)} begun. Each measure is explained in "
        "docs/compare.md; all of them for every run are in runs.csv.",
        *(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in images),
    )
    page.section("Scores", _SCORES, table(_SCORES_COLUMNS, groups))
    page.section("All games together", _GAMES, table(_GAMES_COLUMNS, _over_games(comparison)))
    page.section("Speed", _SPEED, table(_SPEED_COLUMNS, groups) if timed else "")
    page.section("The way to a target return", _TARGET, table(_TARGET_COLUMNS + _MINUTES * timed, targets))
    page.section("Scaling", _SCALING, table(_SCALING_COLUMNS, _scaling(comparison)))
    page.section("What was exchanged", _EXCHANGE, table(_EXCHANGE_COLUMNS, exchanging))
    limits = [*gaps, *notes(comparison)]
    page.section("To bear in mind", "", "\n".join(f"- {note}" for note in limits))
    page.section("How it was made", _how(preset.name, folder), _origin(comparison))
    return page.text()


_SCORES = f"""Interquartile mean over runs [95 % bootstrap interval]. Evaluation: mean unclipped return of the final
policy. Training: of the last {WINDOW} training episodes of all ranks (of all, if fewer). AUC: mean of the learning
curve over the steps that all runs of the game and number of ranks have."""
_GAMES = """Human-normalised score: interquartile mean over runs and games [95 % interval, bootstrapped within games],
of variants that have played all games; a game with more runs weighs more."""
_SPEED = """Steps of all ranks a second: median (range) over runs; the ratio to `none` is taken seed by seed. Shares of
the learner's time: means."""
_TARGET = f"""When the mean of {WINDOW} training episodes first was at least the target: median over runs, in which runs
that never got there come last."""
_SCALING = "Efficiency: speed a rank over that with the fewest ranks, of medians over runs."
_EXCHANGE = """Relative distance: between a rank's model and what it mixes in, over the norm of its model; mean over
intervals, ranks and runs. Staleness: the most updates since the last mix in an interval, its mean; and in all."""
_HOW = """`pala compare` with `{preset}`; each run's command, commit and versions are in its `run.json`. To
make this page again from the copies of the runs:

    {command}"""


def _how(name: str, folder: Path) -> str:
    """Return how the page is made again: a preset that comes with PALA has no copy in the results."""
    own, output = folder / "preset.toml", [] if folder == Path("results") / name else ["--output", str(folder)]
    preset, given = ("preset.toml", str(own)) if own.exists() else (f"configs/compare/{name}.toml", name)
    command = shlex.join(["pala", "compare", given, "--report-only", *output])
    return _HOW.format(preset=preset, command=command)


def _origin(comparison: Comparison) -> str:
    return "\n".join(
        f"- {what}: {' | '.join(dict.fromkeys(map(fact, comparison.runs)))}" for what, fact in ORIGIN.items()
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The completed runs of a cell, beside all others of the comparison: a row of most tables."""

    comparison: Comparison
    cell: Cell
    runs: list[Run]

    @property
    def target(self) -> float | None:
        """The return whose time is asked for."""
        return self.comparison.preset.target_return.get(self.cell.game)

    @property
    def exchanges(self) -> bool:
        """Whether the ranks told each other something, and the metrics of it are there."""
        if self.cell.ranks == 1 or self.runs[0].is_independent:
            return False
        return any(column.cell(self) for column in _EXCHANGE_COLUMNS[len(_NAMES) :])

    def values(self, value: Callable[[Run], float | None]) -> list[float]:
        """Return the values of those runs that have one."""
        return _values(self.runs, value)

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """Return the mean over the runs that have such a value."""
        values = self.values(value)
        return statistics.fmean(values) if values else None

    def most(self, key: str) -> float | None:
        """Return the greatest value of a key of the metrics."""
        return max(self.values(lambda run: run.most(key)), default=None)

    def auc(self) -> list[float]:
        """Return the runs' AUC over the steps that all runs of the game and number of ranks have."""
        end = self.comparison.common_steps(self.cell)
        return self.values(lambda run: run.auc(end))

    def speeds_of_none(self) -> list[float]:
        """Return the ratios of speeds to those without exchange, seed by seed: those were run one after the other."""
        if self.runs[0].is_independent:
            return []
        baseline = self.comparison.without_exchange(self.cell)
        speeds, others = ({run.seed: run.steps_per_s for run in of if run.steps_per_s} for of in (self.runs, baseline))
        return [speeds[seed] / others[seed] for seed in speeds if seed in others]

    def reached(self) -> list[tuple[float, float] | None]:
        """Return for each run the steps and seconds at which it first reached the target, or None."""
        assert self.target is not None
        return [run.reaches(self.target) for run in self.runs]


def _values(runs: Iterable[Run], value: Callable[[Run], float | None]) -> list[float]:
    return [found for run in runs if (found := value(run)) is not None]


def _over_games(comparison: Comparison) -> list[tuple[int, str, list[list[float]]]]:
    """Return ranks, variant and each game's scores, of the variants that have played several games, and all."""
    games, rows = list(comparison.preset.games), []
    for ranks, variant in dict.fromkeys((cell.ranks, cell.variant) for cell in comparison.cells):
        of_games = [comparison.cells.get(Cell(variant, game, ranks), []) for game in games]
        scores = [_values(runs, lambda run: run.normalised) for runs in of_games]
        if len(games) > 1 and all(scores):
            rows.append((ranks, variant, scores))
    return rows


def _scaling(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"game": game, "variant": variant, "ranks": ranks, "speed": speed, "efficiency": efficiency, "N0": min(speeds)}
        for (game, variant), speeds in comparison.speeds_over_ranks().items()
        for (ranks, speed), efficiency in zip(speeds.items(), efficiencies(speeds).values(), strict=True)
    ]


# ---- columns ---------------------------------------------------------------------------------------------------------


def _interval(form: Callable[[float], str] = short_number) -> Callable[[Sequence[Sequence[float]]], str]:
    """Return a form for values by stratum: `17.9 [16.2, 18.8]`; a single value has no interval."""

    def text(strata: Sequence[Sequence[float]]) -> str:
        arrays = [np.array(values) for values in strata]
        together = np.concatenate(arrays)
        if not len(together):
            return ""
        mean = form(float(interquartile_mean(together)))
        if max(map(len, arrays)) == 1:
            return mean
        low, high = bootstrap_interval(arrays)
        return f"{mean} [{form(low)}, {form(high)}]"

    return text


def _spread(form: str) -> Callable[[Sequence[float]], str]:
    """Return a form for values: `1,930 (1,850-2,010)`; a single value has no range."""

    def text(values: Sequence[float]) -> str:
        return Spread.of(values).text(form) if len(values) > 1 else "".join(f"{value:{form}}" for value in values)

    return text


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _or_not_reached(form: str) -> Callable[[Sequence[float | None]], str]:
    """Return a form for when runs reached their target: the median, unless it is of those that never did."""

    def text(values: Sequence[float | None]) -> str:
        median = median_reached(values)
        return "not reached" if median is None else f"{median:{form}}"

    return text


_NAMES: list[Column[Group]] = [
    Column("game", lambda group: group.cell.game),
    Column("ranks", lambda group: group.cell.ranks),
    Column("variant", lambda group: group.cell.variant),
]
_SCORES_COLUMNS = [
    *_NAMES,
    Column("runs", lambda group: len(group.runs)),
    Column("steps", lambda group: statistics.median(run.last["global_steps"] for run in group.runs), ",.0f"),
    Column("evaluation", lambda group: [group.values(lambda run: run.score)], _interval()),
    Column("human-normalised", lambda group: [group.values(lambda run: run.normalised)], _interval(_percent)),
    Column("training", lambda group: [group.values(lambda run: run.training_score)], _interval()),
    Column("AUC", lambda group: [group.auc()], _interval()),
]
_GAMES_COLUMNS: list[Column[tuple[int, str, list[list[float]]]]] = [
    Column("ranks", lambda row: row[0]),
    Column("variant", lambda row: row[1]),
    Column("runs", lambda row: sum(map(len, row[2]))),
    Column("human-normalised", lambda row: row[2], _interval(_percent)),
]
_SPEED_COLUMNS = [
    *_NAMES,
    Column("steps/s", lambda group: group.values(lambda run: run.steps_per_s), _spread(",.0f")),
    Column("of none", lambda group: group.speeds_of_none(), _spread(".3f")),
    Column("exchanging", lambda group: group.mean(lambda run: run.mean("time_exchange")), ".1%"),
    Column("waiting", lambda group: group.mean(lambda run: run.mean("time_wait")), ".1%"),
    Column("peak memory a rank, MiB", lambda group: group.most("memory_peak_bytes"), lambda num: f"{num / 2**20:,.0f}"),
]
_TARGET_COLUMNS = [
    *_NAMES,
    Column("target", lambda group: group.target, short_number),
    Column(
        "runs that reached it",
        lambda group: f"{sum(pair is not None for pair in group.reached())} of {len(group.runs)}",
    ),
    Column("steps", lambda group: [pair and pair[0] for pair in group.reached()], _or_not_reached(",.0f")),
]
_MINUTES: list[Column[Group]] = [
    Column("minutes", lambda group: [pair and pair[1] / 60 for pair in group.reached()], _or_not_reached(",.1f")),
]
_SCALING_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("game", "game"),
    Column("variant", "variant"),
    Column("ranks", "ranks"),
    Column("steps/s", "speed", ",.0f"),
    Column("efficiency", "efficiency", ".2f"),
    Column("N₀", "N0"),
]
_EXCHANGE_COLUMNS = [
    *_NAMES,
    Column("progress kept", lambda group: group.mean(lambda run: run.progress_kept), ".2f"),
    Column("relative distance", lambda group: group.mean(lambda run: run.mean("consensus_distance_relative")), ".4f"),
    Column("staleness, updates", lambda group: group.mean(lambda run: run.mean("staleness_updates")), ".1f"),
    Column("most", lambda group: group.most("staleness_updates"), ".0f"),
]
