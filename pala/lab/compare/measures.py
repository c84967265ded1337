"""Measures of a run and of runs together, and the comparison: all runs in the order of the preset.

docs/compare.md has each measure with its formula. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pala.config.influence import differences
from pala.evaluation.references import human_normalised
from pala.lab.compare.plan import Cell, Preset
from pala.report.curves import WINDOW, curve_of, running_mean
from pala.report.runs import RunData
from pala.run.metrics import Record, progress_kept

_RESAMPLES = 2000
_GRID = 500


@dataclass(frozen=True)
class Run(RunData):
    """One that is compared; its episodes are in the order of time."""

    cell: Cell
    ranks: list[list[Record]]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.name

    @property
    def seed(self) -> int:
        """The seed that all random streams derive from."""
        return self.config.seed

    @property
    def is_independent(self) -> bool:
        """Whether the ranks told each other nothing while they trained."""
        return self.config.exchange_kind.independent

    @property
    def completed(self) -> bool:
        """The budget was met and the final policy written."""
        return bool(self.record["completed"])

    def is_shorter_than(self, other: Run) -> bool:
        """Return whether the other is the same with a larger budget, and has completed, with more steps."""
        same = (self.cell, self.seed) == (other.cell, other.seed)
        is_larger = self.config.total_steps < other.config.total_steps and self.end_steps < other.end_steps
        return same and other.completed and is_larger

    @property
    def segments(self) -> list[dict[str, Any]]:
        """The records of all starts."""
        return list(self.record["segments"])

    def count(self, key: str) -> int:
        """Return how many ranks are in all starts' lists of this name, such as `lost_ranks`."""
        return sum(len(segment.get(key, [])) for segment in self.segments)

    @property
    def score(self) -> float | None:
        """Mean return of the final policy's evaluation."""
        return self.evaluation["mean_return"] if self.evaluation else None

    @property
    def training_score(self) -> float | None:
        """Mean return of the last 100 training episodes of all ranks; of all, if there are fewer."""
        return float(self.returns[-WINDOW:].mean()) if len(self.returns) else None

    @property
    def normalised(self) -> float | None:
        """The score in per cent of the way from random play to a human."""
        if self.score is None or self.reference is None:
            return None
        return human_normalised(self.score, *self.reference)

    @property
    def intervals(self) -> list[Record]:
        """Interval records of all ranks, without start-up."""
        return [record for rank in self.ranks for record in settled(rank)]

    @property
    def was_resized(self) -> bool:
        """Whether it was resumed with another number of ranks."""
        return len({segment.get("ranks") for segment in self.segments}) > 1

    @property
    def steps_per_s(self) -> float | None:
        """Speed of all ranks: the sum of their medians over intervals. None if their number changed: no speed is that
        of the whole time."""
        if self.count("lost_ranks") or self.count("left_ranks") or self.was_resized:
            return None
        key = "local_steps_per_s"
        speeds = [[record[key] for record in settled(rank) if record.get(key) is not None] for rank in self.ranks]
        return sum(map(statistics.median, filter(None, speeds))) or None

    @property
    def is_beyond_cores(self) -> bool:
        """Whether the ranks outnumbered the cores of the hosts; unknown of runs of earlier versions."""
        return self.last.get("ranks", 1) > self.last.get("cores", math.inf)

    def mean(self, key: str) -> float | None:
        """Return the mean of a key of the metrics over intervals and ranks; None if none has it."""
        values = [record[key] for record in self.intervals if record.get(key) is not None]
        return statistics.fmean(values) if values else None

    def most(self, key: str) -> float | None:
        """Return the greatest value of a key of the metrics, start-up included."""
        return max((r[key] for rank in self.ranks for r in rank if r.get(key) is not None), default=None)

    @property
    def progress_kept(self) -> float | None:
        """Share of the ranks' own steps that the mean of their models made; None if the metrics do not tell."""
        records = [record for rank in self.ranks for record in rank if record.get("own_movement")]
        if len({len(record["own_movement"]) for record in records}) != 1:  # none, or of another version of PALA as well
            return None
        return progress_kept((r["own_movement"] for r in records), (r["movement"] for r in records))

    def reaches(self, target: float) -> tuple[float, float] | None:
        """Return (steps, seconds) when the mean of 100 episodes first is at least `target`; None if it never is."""
        index = first_at_least(self.returns, target)
        return None if index is None else (float(self.steps[index]), float(self.time_s[index]))

    def auc(self, end: float) -> float | None:
        """Return the mean of the learning curve over steps from 0 to `end`; before the first episode it is level."""
        if not len(self.returns):
            return None
        curve = curve_of(self.steps, self.returns, WINDOW)
        return float(np.interp(np.linspace(0, end, _GRID), curve.x, curve.y).mean())


def settled(records: Sequence[Record]) -> list[Record]:
    """Return a rank's intervals without the first of each segment, in which caches fill; with it if there is no
    other."""
    intervals = [i for i, record in enumerate(records) if record["type"] == "interval"]
    starts = [i for i, record in enumerate(records) if record["type"] == "start"]
    first = {next((i for i in intervals if i > start), -1) for start in starts}
    return [records[i] for i in intervals if i not in first] or [records[i] for i in intervals]


def first_at_least(returns: np.ndarray, target: float) -> int | None:
    """Return the index of the first episode at which the mean of a whole window of episodes is at least `target`."""
    reached = np.flatnonzero(running_mean(returns, WINDOW)[WINDOW - 1 :] >= target)
    return int(reached[0]) + WINDOW - 1 if len(reached) else None


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis without the lowest and the highest quarter of the values, rounded down: of 1
    to 3 values, their mean."""
    cut = values.shape[-1] // 4
    mean: np.ndarray = np.sort(values)[..., cut : values.shape[-1] - cut].mean(-1)
    return mean


def bootstrap_interval(strata: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the interquartile mean of all values, resampled within each stratum
    (Agarwal et al. 2021, arXiv 2108.13264, section 4.1). The random numbers are the same each time."""
    generator = np.random.default_rng(0)
    drawn = np.concatenate([generator.choice(values, (_RESAMPLES, len(values))) for values in strata], axis=1)
    low, high = np.percentile(interquartile_mean(drawn), (2.5, 97.5))
    return float(low), float(high)


def median_reached(values: Sequence[float | None]) -> float | None:
    """Return the median where None is later than everything; None if that is where the median lies."""
    median = statistics.median(float("inf") if value is None else value for value in values)
    return None if median == float("inf") else median


def efficiencies(speeds: dict[int, float]) -> dict[int, float]:
    """Return ranks -> speed a rank over that with the fewest ranks, from ranks -> speed of all."""
    fewest = min(speeds)
    return {ranks: (speed / ranks) / (speeds[fewest] / fewest) for ranks, speed in speeds.items()}


# ---- all runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The runs, in the order of the preset."""

    preset: Preset
    runs: list[Run]
    cells: dict[Cell, list[Run]]  # of runs that have completed
    replaced: list[Run]  # left out: they completed, but were run again for more steps

    @classmethod
    def of(cls, preset: Preset, runs: Sequence[Run]) -> Comparison:
        """Return the comparison of these runs, sorted and grouped."""
        variants = _names(preset, runs)

        def place(run: Run) -> tuple[Any, ...]:
            cell = run.cell
            return list(preset.games).index(cell.game), cell.ranks, variants.index(cell.variant), run.seed, run.name

        everything = sorted(runs, key=place)
        replaced = [run for run in everything if run.completed and any(map(run.is_shorter_than, everything))]
        ordered = [run for run in everything if not any(run is other for other in replaced)]
        cells: dict[Cell, list[Run]] = {}
        for run in ordered:
            if run.completed:
                cells.setdefault(run.cell, []).append(run)
        return cls(preset, ordered, cells, replaced)

    @property
    def variants(self) -> list[str]:
        """Names of all variants, those of the preset first."""
        return _names(self.preset, self.runs)

    def place(self, variant: str) -> int:
        """Return the place of a variant in all pictures, by which it looks; those that are drawn are first."""
        return list(dict.fromkeys([*self.preset.drawn, *self.variants])).index(variant)

    def common_steps(self, cell: Cell) -> int:
        """Return the smallest budget among completed runs of a cell's game and number of ranks."""
        return min(
            run.last["global_steps"]
            for other, runs in self.cells.items()
            for run in runs
            if (other.game, other.ranks) == (cell.game, cell.ranks)
        )

    def without_exchange(self, cell: Cell) -> list[Run]:
        """Return the completed runs that a cell's speed is compared with: of independent learners, with the fewest
        other settings that differ. Empty if there are none."""
        mine = self.cells[cell][0].config

        def distance(runs: list[Run]) -> int:
            return sum(not key.startswith("exchange.") for key in differences(runs[0].config, mine))

        independent = [
            runs
            for other, runs in self.cells.items()
            if (other.game, other.ranks) == (cell.game, cell.ranks) and runs[0].is_independent
        ]
        return min(independent, key=distance, default=[])

    def speeds_over_ranks(self) -> dict[tuple[str, str], dict[int, float]]:
        """Return (game, variant) -> ranks -> median of steps a second; only of those with several numbers of ranks, and
        of none if they were disturbed."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        if not self.preset.undisturbed:
            return found
        for cell, runs in self.cells.items():
            speeds = [run.steps_per_s for run in runs if run.steps_per_s is not None]
            if speeds:
                found.setdefault((cell.game, cell.variant), {})[cell.ranks] = statistics.median(speeds)
        return {key: speeds for key, speeds in found.items() if len(speeds) > 1}

    def is_independent(self, game: str, variant: str) -> bool:
        """Return whether the ranks of a variant's completed runs exchange nothing."""
        runs = [run for cell, of in self.cells.items() for run in of if (cell.game, cell.variant) == (game, variant)]
        return all(run.is_independent for run in runs)

    def ranks_beyond_cores(self, game: str) -> set[int]:
        """Return the numbers of ranks with which a completed run of a game had more ranks than cores."""
        return {cell.ranks for cell, of in self.cells.items() for r in of if cell.game == game and r.is_beyond_cores}


def _names(preset: Preset, runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys([*preset.variants, *sorted({run.cell.variant for run in runs})]))
