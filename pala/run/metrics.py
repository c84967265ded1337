"""One append-only metrics file a rank (JSON lines). Files are the truth: console, TensorBoard and plots read them.

Keys and units: docs/metrics.md. A record has a `type`: `start` (of a segment), `episode` or `interval`. A resumed run
goes on in the same file; records of steps that were lost with the crash are dropped by the reader.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pala.system.runtime import say

Record = dict[str, Any]


def metrics_path(run: Path, rank: int) -> Path:
    """The metrics file of a rank."""
    return run / "metrics" / f"rank-{rank:04d}.jsonl"


class MetricsWriter:
    """Appends records. A full disk is reported once; training goes on, and the file again when it can."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._failed = False

    def write(self, records: list[Record]) -> None:
        """Append the records, each a line."""
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        try:
            with open(self._path, "ab+") as file:
                file.write(("\n" * _is_cut(file) + text).encode())
        except OSError as error:
            if not self._failed:
                say(f"[rank {self._rank}] metrics cannot be written to '{self._path}': {error}. Training goes on.")
            self._failed = True
        else:
            self._failed = False


def _is_cut(file: BinaryIO) -> bool:
    """True if the last line has no end (a full disk, a killed rank): what is appended must begin a line of its own."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class Tail:
    """Reads what has been appended to a metrics file (or .gz) since the last call; a line without its end waits."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Record]:
        """The new whole records. A line that is not JSON (cut by a full disk) is left out."""
        try:
            with (gzip.open if self._path.suffix == ".gz" else open)(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        records = []
        for line in data[:end].splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records


def read_rank(path: Path) -> list[Record]:
    """All records of a rank that count: those made after a checkpoint and lost with a crash are left out."""
    kept: list[Record] = []
    for record in Tail(path).read():
        if record["type"] == "start":
            kept = [old for old in kept if old["time_s"] <= record["time_s"]]
        kept.append(record)
    return kept


def read_run(run: Path) -> list[list[Record]]:
    """`read_rank` for every rank of a run. Of ranks that the newest segment no longer has, only what it began from."""
    ranks = [read_rank(path) for path in sorted((run / "metrics").glob("rank-*.jsonl*"))]
    starts = [[record for record in records if record["type"] == "start"][-1:] for records in ranks]
    newest = max((start[0]["segment"] for start in starts if start), default="")
    begin_s = min((start[0]["time_s"] for start in starts if start and start[0]["segment"] == newest), default=0.0)
    return [
        [r for r in records if r["time_s"] <= begin_s] if start and start[0]["segment"] != newest else records
        for records, start in zip(ranks, starts, strict=True)
    ]


class RunView:
    """A run as its metrics files show it while it goes on."""

    def __init__(self, run: Path, ranks: int, recent_episodes: int = 100) -> None:
        self._tails = [Tail(metrics_path(run, rank)) for rank in range(ranks)]
        self._episodes: deque[tuple[float, float]] = deque(maxlen=recent_episodes)  # (time, return)
        self.last: list[Record] = [{} for _ in range(ranks)]
        self.living: Sequence[int] = range(ranks)
        self.num_episodes = 0

    def refresh(self) -> None:
        """Read what is new."""
        fresh: list[tuple[float, float]] = []
        for rank, tail in enumerate(self._tails):
            for record in tail.read():
                if record["type"] == "episode":
                    fresh.append((record["time_s"], record["return"]))
                elif record["type"] == "interval":
                    self.last[rank] = record
        self.num_episodes += len(fresh)
        self._episodes.extend(sorted(fresh))

    @property
    def mean_return(self) -> float | None:
        """Mean unclipped return of the last 100 whole episodes of all ranks."""
        return sum(r for _, r in self._episodes) / len(self._episodes) if self._episodes else None

    def mean(self, key: str) -> float | None:
        """Mean of a key of the ranks' last intervals; None where none has it."""
        values = [self.last[rank][key] for rank in self.living if self.last[rank].get(key) is not None]
        return sum(values) / len(values) if values else None

    def total(self, key: str) -> float:
        """Sum of a key of the ranks' last intervals."""
        return sum(self.last[rank].get(key) or 0 for rank in self.living)

    @property
    def global_steps_per_s(self) -> float:
        """Speed of all ranks; one that has no record yet counts as the others' mean."""
        return (self.mean("local_steps_per_s") or 0) * len(self.living)


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


def progress_kept(own: Iterable[Sequence[float]], moved: Iterable[Sequence[float]]) -> float | None:
    """How far the mean of the models went along the mean of the ranks' own steps, over the length of that: 1 if no
    exchange took anything back. Sketches of any number of ranks and intervals; None if nothing was learned.
    """
    learned, went = np.sum(list(own), 0), np.sum(list(moved), 0)
    length = float(np.dot(learned, learned))
    return float(np.dot(went, learned)) / length if length > 0 else None
