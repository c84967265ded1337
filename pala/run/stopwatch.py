"""Where a rank's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECTIONS = ("environment", "inference", "update", "exchange", "wait", "other")


class Stopwatch:
    """Where the time goes: seconds in named sections since the last `split`; the rest is `other`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._seconds = dict.fromkeys(SECTIONS, 0.0)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begin

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count some of `source`'s time under `target` instead."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def split(self) -> tuple[float, dict[str, float]]:
        """(seconds since the last split, fraction of them in each section; the fractions sum to 1)."""
        now = time.perf_counter()
        total, self._begin = now - self._begin, now
        seconds, self._seconds = self._seconds, dict.fromkeys(SECTIONS, 0.0)
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        return total, {name: value / sum(seconds.values()) for name, value in seconds.items()}
