"""How far models move an update, as a share of what they do in other runs.

    python results/mixing/step_length.py results/breakout 'paired_momentum_in_step-*' -- 'allreduce_momentum_w*-[12]'

The metrics have sketches of a rank's movement in each interval. This joins intervals to some 200 updates each, takes
the mean of their squared length over updates and runs, by ranges of a rank's updates, and prints the root of the ratio.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from pala.report.runs import published
from pala.run.metrics import read_run

_RANGES = ((600, 1600), (1600, 3200), (3200, 6400), (6400, 9600), (9600, 12800), (12800, 16000))  # updates
_TOGETHER = 200  # updates: intervals are of unlike many, and movements are related within some


def squared_step(run: Path, first: int, last: int) -> float:
    """Squared length of the sketched movement an update in `first` to `last` of its first rank; NaN beyond its end."""
    intervals = [record for record in read_run(run)[0] if record["type"] == "interval"]
    squares, updates, moved, since, before = 0.0, 0, np.zeros(32), 0, 0
    for record in intervals:
        if first <= before and record["updates"] <= last:
            moved, since = moved + record["movement"], since + record["updates"] - before
        if since >= _TOGETHER:
            squares, updates = squares + float(moved @ moved), updates + since
            moved, since = np.zeros(32), 0
        before = record["updates"]
    return squares / updates if updates else math.nan


def main() -> None:
    """Print a line for each range."""
    middle = sys.argv.index("--")
    there = published(Path(sys.argv[1]))
    ours, theirs = (
        [run for run in there if any(fnmatch(run.name, pattern) for pattern in patterns)]
        for patterns in (sys.argv[2:middle], sys.argv[middle + 1 :])
    )
    for first, last in _RANGES:
        ratio = math.sqrt(_mean(ours, first, last) / _mean(theirs, first, last))
        if not math.isnan(ratio):
            print(f"{first:6} to {last:6} updates: {ratio:.2f}")


def _mean(runs: Sequence[Path], first: int, last: int) -> float:
    return statistics.fmean(squared_step(run, first, last) for run in runs)


if __name__ == "__main__":
    main()
