"""What is written of a comparison: the page with its tables, and CSV files. Pure, but for `write`."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pala.lab.compare import pictures
from pala.lab.compare.comparison import Comparison
from pala.lab.compare.measures import (
    WINDOW,
    Run,
    bootstrap_interval,
    efficiencies,
    interquartile_mean,
    median_reached,
)
from pala.lab.compare.notes import commit, left_out, machine, not_begun, notes, versions
from pala.lab.compare.plan import Cell, Plan
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically
from pala.system.text import Spread, counted, csv_text, short_number, table


def write(plan: Plan, runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write everything; returns the paths. Raises PalaError."""
    comparison = Comparison.of(plan.preset, runs)
    gaps = [*not_begun(plan, runs), *left_out(plan)]
    drawn = pictures.draw(comparison, folder)
    texts = {
        "compare.md": markdown(comparison, folder, [path.name for path in drawn], gaps),
        "runs.csv": csv_text([_row(comparison, run) for run in comparison.runs]),
        "curves.csv": csv_text(pictures.curve_rows(comparison)),
    }
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise PalaError(f"The report cannot be written to '{folder}': {reason(error)}.") from None
    return [folder / "compare.md", *drawn, folder / "runs.csv", folder / "curves.csv"]


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _row(comparison: Comparison, run: Run) -> dict[str, Any]:
    """All measures of a run; docs/compare.md explains the columns."""
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
        "starts": len(run.segments), "lost_ranks": run.num_lost,
        "git_commit": run.last.get("git_commit"), "git_dirty": run.last.get("git_dirty"),
        "hosts": " ".join(sorted(set(run.last.get("hosts", [])))),
    }  # fmt: skip
    return row if comparison.preset.undisturbed else row | dict.fromkeys(_OF_TIME)


_OF_TIME = ("training_s", "steps_per_s", "s_to_target", "time_exchange", "time_wait")  # empty if work ran beside it


# ---- the page --------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison, folder: Path, images: Sequence[str], gaps: Sequence[str] = ()) -> str:
    """The whole report, for this folder; `gaps`: sentences on what is not in it."""
    preset, done = comparison.preset, sum(run.completed for run in comparison.runs)
    limits = [*gaps, *notes(comparison)]
    sections = [
        f"# Comparison: {preset.name}",
        f"{counted(done, 'completed run')} of {len(comparison.runs)} begun. Each measure is explained in "
        "docs/compare.md; all of them for every run are in runs.csv.",
        *(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in images),
        _section("Scores", _SCORES, _scores(comparison)),
        _section("All games together", _GAMES, _over_games(comparison)),
        _section("Speed", _SPEED, _speed(comparison)),
        _section("The way to a target return", _TARGET, _targets(comparison)),
        _section("Scaling", _SCALING, _scaling(comparison)),
        _section("What was exchanged", _EXCHANGE, _exchange(comparison)),
        _section("To bear in mind", "", "\n".join(f"- {note}" for note in limits)),
        _section("How it was made", _how(preset.name, folder), _origin(comparison)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


_SCORES = f"""Interquartile mean over runs [95 % bootstrap interval]. Evaluation: mean unclipped return of the final
policy. Training: of the last {WINDOW} training episodes of all ranks (of all, if fewer). AUC: mean of the learning
curve over the steps that all runs of the game and number of ranks have."""
_GAMES = """Human-normalised score: interquartile mean over runs and games [95 % interval, bootstrapped within games],
of variants that have played all games."""
_SPEED = """Steps of all ranks a second: median (range) over runs; the ratio to `none` is taken seed by seed. Shares of
the learner's time: means."""
_TARGET = f"""When the mean of {WINDOW} training episodes first was at least the target: median over runs, in which runs
that never got there come last."""
_SCALING = "Efficiency: speed a rank over that with the fewest ranks, of medians over runs."
_EXCHANGE = """Relative distance: between a rank's model and what it mixes in, over the norm of its model; mean over
intervals, ranks and runs. Staleness: the most updates since the last mix in an interval, its mean; and in all."""
_HOW = """`python -m pala.compare` with `{preset}`; each run's command, commit and versions are in its `run.json`. To
make this page again from the copies of the runs:

    {command}"""


def _how(name: str, folder: Path) -> str:
    """Return how the page is made again: a preset that comes with PALA has no copy in the results."""
    own, output = folder / "preset.toml", [] if folder == Path("results") / name else ["--output", str(folder)]
    preset, given = ("preset.toml", str(own)) if own.exists() else (f"configs/compare/{name}.toml", name)
    command = shlex.join(["python", "-m", "pala.compare", given, "--report-only", *output])
    return _HOW.format(preset=preset, command=command)


def _section(title: str, text: str, content: str) -> str:
    return "\n\n".join(filter(None, (f"## {title}", text, content))) if content else ""


def _origin(comparison: Comparison) -> str:
    facts = {"commit": commit, "versions": versions, "machine": machine}
    return "\n".join(
        f"- {what}: {' | '.join(dict.fromkeys(map(fact, comparison.runs)))}" for what, fact in facts.items()
    )


def _names(cell: Cell) -> tuple[str, str, str]:
    return cell.game, str(cell.ranks), cell.variant


def _values(runs: Iterable[Run], value: Callable[[Run], float | None]) -> list[float]:
    return [found for run in runs if (found := value(run)) is not None]


def _interval(strata: Sequence[Sequence[float]], form: Callable[[float], str] = short_number) -> str:
    """`17.9 [16.2, 18.8]`; a single value has no interval."""
    arrays = [np.array(values) for values in strata]
    together = np.concatenate(arrays)
    if not len(together):
        return ""
    text = form(float(interquartile_mean(together)))
    if max(map(len, arrays)) == 1:
        return text
    low, high = bootstrap_interval(arrays)
    return f"{text} [{form(low)}, {form(high)}]"


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _scores(comparison: Comparison) -> str:
    header = ("game", "ranks", "variant", "runs", "steps", "evaluation", "human-normalised", "training", "AUC")
    return _filled(header, [
        (
            *_names(cell), str(len(runs)), f"{statistics.median(run.last['global_steps'] for run in runs):,.0f}",
            _interval([_values(runs, lambda run: run.score)]),
            _interval([_values(runs, lambda run: run.normalised)], _percent),
            _interval([_values(runs, lambda run: run.training_score)]),
            _interval([_values(runs, lambda run, cell=cell: run.auc(comparison.common_steps(cell)))]),  # type: ignore[misc]
        )
        for cell, runs in comparison.cells.items()
    ])  # fmt: skip


def _over_games(comparison: Comparison) -> str:
    games = list(comparison.preset.games)
    rows = []
    for ranks, variant in dict.fromkeys((cell.ranks, cell.variant) for cell in comparison.cells):
        of_games = [comparison.cells.get(Cell(variant, game, ranks), []) for game in games]
        scores = [_values(runs, lambda run: run.normalised) for runs in of_games]
        if len(games) > 1 and all(scores):
            number = str(sum(map(len, scores)))
            rows.append((str(ranks), variant, number, _interval(scores, _percent)))
    return _filled(("ranks", "variant", "runs", "human-normalised"), rows)


def _speed(comparison: Comparison) -> str:
    if not comparison.preset.undisturbed:
        return ""
    header = ("game", "ranks", "variant", "steps/s", "of none", "exchanging", "waiting", "peak memory a rank, MiB")
    rows = []
    for cell, runs in comparison.cells.items():
        speeds = _values(runs, lambda run: run.steps_per_s)
        memory = _values(runs, lambda run: run.most("memory_peak_bytes"))
        rows.append((
            *_names(cell), _spread(speeds, ",.0f"),
            _of_none(runs, comparison.without_exchange(cell)),
            *(_mean(runs, key, ".1%") for key in ("time_exchange", "time_wait")),
            f"{max(memory) / 2**20:,.0f}" if memory else "",
        ))  # fmt: skip
    return _filled(header, rows)


def _of_none(runs: Sequence[Run], baseline: Sequence[Run]) -> str:
    """Seed by seed: those runs were made one after the other."""
    if runs[0].is_independent:
        return ""
    speeds, others = ({run.seed: run.steps_per_s for run in side if run.steps_per_s} for side in (runs, baseline))
    ratios = [speeds[seed] / others[seed] for seed in speeds if seed in others]
    return _spread(ratios, ".3f")


def _spread(values: Sequence[float], form: str) -> str:
    """`1,930 (1,850-2,010)`; a single value has no range."""
    return Spread.of(values).text(form) if len(values) > 1 else "".join(f"{value:{form}}" for value in values)


def _mean(runs: Sequence[Run], key: str, form: str) -> str:
    values = _values(runs, lambda run: run.mean(key))
    return f"{statistics.fmean(values):{form}}" if values else ""


def _targets(comparison: Comparison) -> str:
    rows = []
    for cell, runs in comparison.cells.items():
        target = comparison.preset.target_return.get(cell.game)
        if target is None:
            continue
        reached = [run.reaches(target) for run in runs]
        steps, seconds = (median_reached([pair[i] if pair else None for pair in reached]) for i in (0, 1))
        number = sum(pair is not None for pair in reached)
        rows.append((
            *_names(cell), short_number(target), f"{number} of {len(runs)}",
            f"{steps:,.0f}" if steps is not None else "not reached",
            f"{seconds / 60:,.1f}" if seconds is not None else "not reached",
        ))  # fmt: skip
    header = ("game", "ranks", "variant", "target", "runs that reached it", "steps", "minutes")
    shown = len(header) if comparison.preset.undisturbed else header.index("minutes")
    return _filled(header[:shown], [row[:shown] for row in rows])


def _scaling(comparison: Comparison) -> str:
    rows = [
        (game, variant, str(ranks), f"{speed:,.0f}", f"{efficiency:.2f}", str(min(speeds)))
        for (game, variant), speeds in comparison.speeds_over_ranks().items()
        for (ranks, speed), efficiency in zip(speeds.items(), efficiencies(speeds).values(), strict=True)
    ]  # fmt: skip
    return _filled(("game", "variant", "ranks", "steps/s", "efficiency", "N₀"), rows)


def _exchange(comparison: Comparison) -> str:
    header = ("game", "ranks", "variant", "progress kept", "relative distance", "staleness, updates", "most")
    rows = []
    for cell, runs in comparison.cells.items():
        if cell.ranks == 1 or runs[0].is_independent:
            continue
        most = _values(runs, lambda run: run.most("staleness_updates"))
        kept = _values(runs, lambda run: run.progress_kept)
        values = (
            f"{statistics.fmean(kept):.2f}" if kept else "", _mean(runs, "consensus_distance_relative", ".4f"),
            _mean(runs, "staleness_updates", ".1f"),
            f"{max(most):.0f}" if most else "",
        )  # fmt: skip
        if any(values):
            rows.append((*_names(cell), *values))
    return _filled(header, rows)


def _filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(header, rows) if rows else ""
