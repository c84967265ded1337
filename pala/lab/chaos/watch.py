"""A running run, as its files show it to another process: each rank's intervals, and what `run.json` says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pala.lab.chaos.history import History, Interval
from pala.run import run_folder
from pala.run.lock import is_locked
from pala.run.metrics import Record, Tail, metrics_path
from pala.system.errors import PalaError


class Watch:
    """Reads what is new in a run's files into a history."""

    def __init__(self, run: Path, history: History, now_s: Callable[[], float]) -> None:
        """`now_s`: the clock of the history. Raises PalaError if the run's files cannot be read."""
        self._run = run
        self._history = history
        self._now_s = now_s
        record = run_folder.read(run)
        self.num_segments = len(record["segments"])
        self.segment: dict[str, Any] = record["segments"][-1]
        self.global_steps = 0
        self._budget = run_folder.config_of(run, record).total_steps
        self._changed_ns = -1
        for entry in self.segment.get("lost_ranks", []):
            history.died[entry["rank"]] = 0.0
        self._last: dict[int, Record] = {}  # record of each rank: a `start` of this segment, or an interval after it
        self._tails = {rank: Tail(metrics_path(run, rank)) for rank in range(len(self.segment["hosts"]))}
        for rank in self._tails:
            self._read(rank, is_first=True)

    @property
    def trainers(self) -> range:
        """The ranks that train from the beginning."""
        return range(self.segment["ranks"])

    def is_ending(self) -> bool:
        """Return whether the budget is met, so that ranks go through the phases of the end and make no records."""
        return self.global_steps >= self._budget

    def look(self) -> None:
        """Take in what is new. Raises PalaError if a file is damaged."""
        for rank in self._tails:
            self._read(rank)
        self._read_record()
        self._history.end_s = self._now_s()

    def note_whether_gone(self) -> None:
        """Say in the history that the job is gone if the run is `running`, but no process has it locked. For a caller
        that sees no process of it any more: the question keeps a spare from joining in this very moment."""
        if self._history.status == "running" and is_locked(self._run) is False:
            self._read_record()  # it may have ended just before
            if self._history.status == "running":
                self._history.status = "gone"

    def _read(self, rank: int, is_first: bool = False) -> None:
        """Take in a rank's new records. The first time their ages are not known: they tell only that it trains."""
        now_s = self._now_s()
        for record in self._tails[rank].read():
            if record["type"] == "start":
                self._last.pop(rank, None)
                if record["segment"] == self.segment["segment"]:
                    self._last[rank] = record
            elif record["type"] == "interval" and (last := self._last.get(rank)) is not None:
                self._last[rank] = record
                self.global_steps = max(self.global_steps, record.get("global_steps") or 0)
                steps = (record.get("local_steps") or 0) - (last.get("local_steps") or 0)
                begin_s = now_s - (record["time_s"] - last["time_s"])
                intervals = self._history.intervals.setdefault(rank, [])
                if not is_first:
                    intervals.append(Interval(begin_s, now_s, steps))

    def _read_record(self) -> None:
        """Take in what run.json says of this segment, if it has changed."""
        changed_ns = -1  # if it is gone, its reader says so
        with contextlib.suppress(OSError):
            changed_ns = (self._run / "run.json").stat().st_mtime_ns
        if changed_ns == self._changed_ns != -1:
            return
        segments = run_folder.read(self._run)["segments"]
        if len(segments) < self.num_segments:
            raise PalaError(
                f"Run folder '{self._run}' was made again while it was watched: nothing more is done to it."
            )
        self._changed_ns = changed_ns
        self.segment = segments[self.num_segments - 1]
        self._history.status = self.segment["status"]
        self._history.left = {entry["rank"] for entry in self.segment.get("left_ranks", [])}
        for entry in self.segment.get("lost_ranks", []):
            self._history.died.setdefault(entry["rank"], self._now_s())
            for fault in self._history.faults:
                if fault.kind == "kill" and fault.rank == entry["rank"] and fault.noticed_s is None:
                    fault.noticed_s = self._now_s()
