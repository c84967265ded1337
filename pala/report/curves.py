"""Learning curves: running means over episodes, and the mean of several curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 100  # episodes of a running mean
_POINTS = 500  # of a line


@dataclass(frozen=True)
class Curve:
    """A line with a band. P points."""

    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    low: np.ndarray  # [P]
    high: np.ndarray  # [P]

    @property
    def is_point(self) -> bool:
        """True if the line has no length, as of a run with one episode: only a marker shows it."""
        return len(set(zip(self.x, self.y, strict=True))) == 1


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last `window` values at each of them; of as many as there are at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    means: np.ndarray = (sums[ends] - sums[begins]) / (ends - begins)
    return means


def curve_of(x: np.ndarray, values: np.ndarray, window: int, least: int = 1, banded: bool = False) -> Curve:
    """Return the running mean of `values` in the order of `x`, at 500 places at most, from where it is a mean of
    `least` values on; `banded`: with running quartiles, which take long."""
    order = np.argsort(x, kind="stable")
    x, values = x[order], values[order]
    at = np.unique(np.linspace(least - 1, len(x) - 1, _POINTS).astype(int))
    means = running_mean(values, window)[at]
    if not banded:
        return Curve(x[at], means, means, means)
    low, high = np.array([np.percentile(values[max(0, i + 1 - window) : i + 1], (25, 75)) for i in at]).T
    return Curve(x[at], means, low, high)


def learning_curve(x: np.ndarray, returns: np.ndarray, banded: bool = False) -> Curve:
    """Return a curve as it is drawn. It begins with a mean of 100 episodes; in a run of few, of a tenth of them all.

    Of the first episodes to end, most are those that went badly, so a mean of fewer begins with a jump."""
    return curve_of(x, returns, WINDOW, max(1, min(WINDOW, len(x) // 10)), banded)


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return the mean of lines and the range between the lowest and the highest, where all of them are."""
    begin, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    grid = np.linspace(begin, end, _POINTS) if begin < end else np.empty(0)
    lines = np.array([np.interp(grid, c.x, c.y) for c in curves])
    return Curve(grid, lines.mean(0), lines.min(0), lines.max(0))
