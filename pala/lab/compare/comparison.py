"""The runs of a comparison, in the order of the preset, and what they are compared with."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pala.config import Config
from pala.config.influence import differences
from pala.lab.compare.measures import Run
from pala.lab.compare.plan import Cell, Preset

_LOOKS = {
    "uniform": 0,
    "shared_memory": 1,
    "allreduce": 2,
    "paired": 3,
    "paired, momentum": 4,
    "push_sum": 5,
    "none": 6,
    "gorila": 1,
}
_RARE_LOOKS = (4, 5, 6, 11, 12, 13, 18, 19, 20, 25, 26, 27)  # those of the colours that few methods have


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

    @property
    def looks(self) -> dict[str, int]:
        """The number of the colour and line style of each variant that has runs. The first variant of a method has the
        method's own, the same in all comparisons; the others have those that are left, in order."""
        methods = {run.cell.variant: _LOOKS.get(_rule_of(run.config)) for run in reversed(self.runs)}
        variants = [variant for variant in self.variants if variant in methods]
        variants.sort(key=lambda variant: variant not in self.preset.drawn)  # those that are drawn choose first
        looks: dict[str, int] = {}
        for variant in variants:
            if (own := methods[variant]) is not None and own not in looks.values():
                looks[variant] = own
        for variant in variants:
            free = (look for look in itertools.chain(_RARE_LOOKS, itertools.count()) if look not in looks.values())
            looks.setdefault(variant, next(free))
        return looks

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


def _rule_of(config: Config) -> str:
    method = config.exchange_kind.name
    rule = config.exchange.mixing if method == "gossip" else method
    return f"{rule}, momentum" if rule == "paired" and config.a2c.momentum else rule


def _names(preset: Preset, runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys([*preset.variants, *sorted({run.cell.variant for run in runs})]))
