"""The course of a run under faults, and the figures that are made of it. Pure: no process, file or clock.

Times are in seconds since the watch began. A rank's progress is known by the intervals of its metrics alone, so every
figure is as fine as these (`run.log_interval_s`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

FaultName = Literal["kill", "stop", "slow"]
FAULTS: tuple[FaultName, ...] = get_args(FaultName)


class Interval(NamedTuple):
    """A rank's steps between two records of its metrics."""

    begin_s: float
    end_s: float
    steps: int

    def steps_within(self, begin_s: float, end_s: float) -> float:
        """Return the steps that fall between two times, if they were made evenly."""
        return self.steps * self.seconds_within(begin_s, end_s) / max(self.end_s - self.begin_s, 1e-9)

    def seconds_within(self, begin_s: float, end_s: float) -> float:
        """Return how much of the interval lies between two times."""
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


@dataclass
class Fault:
    """A fault that a rank was given."""

    kind: FaultName
    rank: int
    at_s: float
    until_s: float | None = None
    """End of a stop or of slowness; None before it, and of a kill."""
    noticed_s: float | None = None
    """Time at which `run.json` named a killed rank as lost."""

    @property
    def end_s(self) -> float:
        """Time from which on the rank is as it will be."""
        return self.at_s if self.until_s is None else self.until_s

    def disturbs(self, rank: int, begin_s: float, end_s: float) -> bool:
        """Return whether it keeps a rank from training as usual between two times."""
        is_over = self.until_s is not None and self.until_s <= begin_s
        return rank == self.rank and self.at_s < end_s and not is_over


@dataclass
class History:
    """All that was seen of a run between a begin, at 0, and an end."""

    faults: list[Fault] = field(default_factory=list)
    intervals: dict[int, list[Interval]] = field(default_factory=dict)
    """Intervals of each rank that was seen to train, in the order of time."""
    died: dict[int, float] = field(default_factory=dict)
    """Ranks that were killed or died otherwise, and when that was known; 0 before the watch."""
    left: set[int] = field(default_factory=set)
    """Ranks that were asked to leave, and did."""
    begin_s: float = 0.0
    """Time from which on all ranks trained; infinite if they never did."""
    end_s: float = 0.0
    status: str = "running"
    """Status in `run.json` at the end of the watch; `gone` if no process is left of a run that says `running`."""
    hung: list[int] = field(default_factory=list)
    """Ranks that made no record for too long."""

    @property
    def killed(self) -> set[int]:
        """The ranks that were killed here."""
        return {fault.rank for fault in self.faults if fault.kind == "kill"}

    @property
    def died_otherwise(self) -> list[int]:
        """The ranks that died during the watch without being killed here."""
        return sorted(rank for rank, at_s in self.died.items() if at_s > 0 and rank not in self.killed)

    @property
    def survivors(self) -> list[int]:
        """The ranks that were seen to train and have not died."""
        return [] if self.status == "gone" else sorted(self.intervals.keys() - self.died.keys() - self.left)

    def others_s(self, fault: Fault) -> float | None:
        """Return the seconds from a fault until each rank that was as usual had made one whole interval after it; None
        if there was no such rank, or one never did."""
        others = [self._first_after(rank, fault.at_s) for rank in self._undisturbed(fault)]
        ends = [interval.end_s for interval in others if interval is not None]
        return max(ends) - fault.at_s if ends and len(ends) == len(others) else None

    def back_s(self, fault: Fault) -> float | None:
        """Return the seconds from the end of a stop or slowness until its rank had made one whole interval; None if it
        never did."""
        if fault.until_s is None or (first := self._first_after(fault.rank, fault.until_s)) is None:
            return None
        return first.end_s - fault.until_s

    def steps_per_s(self, begin_s: float, end_s: float) -> float | None:
        """Return the steps of all ranks a second between two times; None if no record tells.

        A rank that dies or leaves counts until its last record. Any other keeps its pace until the end: its next
        record is still to come.
        """
        end_s = min(end_s, max((of[-1].end_s for of in self.intervals.values() if of), default=0.0))
        total, is_known = 0.0, False
        for rank, intervals in self.intervals.items():
            steps = sum(interval.steps_within(begin_s, end_s) for interval in intervals)
            seconds = sum(interval.seconds_within(begin_s, end_s) for interval in intervals)
            if seconds > 0:
                trains_s = seconds if self._is_gone(rank) else end_s - max(begin_s, intervals[0].begin_s)
                total, is_known = total + steps / seconds * trains_s, True
        return total / (end_s - begin_s) if is_known else None

    def before(self, fault: Fault) -> float | None:
        """Return the speed of all ranks between the fault before and this one."""
        earlier = [other.at_s for other in self.faults if other.at_s < fault.at_s]
        return self.steps_per_s(max(earlier, default=self.begin_s), fault.at_s)

    def after(self, fault: Fault) -> float | None:
        """Return the speed of all ranks between this fault's end and the next fault."""
        later = [other.at_s for other in self.faults if other.at_s > fault.at_s]
        next_s = min(later, default=self.end_s)
        return self.steps_per_s(fault.end_s, next_s) if next_s > fault.end_s else None

    def recovered(self, fault: Fault) -> bool:
        """Return whether all whom a fault concerns have made a whole interval since, or are gone."""
        waits = [rank for rank in self._undisturbed(fault) if self._first_after(rank, fault.at_s) is None]
        return not waits and (fault.kind == "kill" or self._is_gone(fault.rank) or self.back_s(fault) is not None)

    def as_usual(self, rank: int, begin_s: float, end_s: float) -> bool:
        """Return whether a rank is expected to train, and no fault disturbs it between two times."""
        return not self._is_gone(rank) and not any(fault.disturbs(rank, begin_s, end_s) for fault in self.faults)

    def _is_gone(self, rank: int) -> bool:
        return rank in self.died or rank in self.left

    def facts(self) -> Iterator[dict[str, Any]]:
        """Yield each fault with its figures, as the report has them."""
        for fault in self.faults:
            noticed_s = None if fault.noticed_s is None else fault.noticed_s - fault.at_s
            lasted_s = None if fault.until_s is None else fault.until_s - fault.at_s
            figures = {
                "lasted_s": lasted_s,
                "noticed_s": noticed_s,
                "others_s": self.others_s(fault),
                "back_s": self.back_s(fault),
                "steps_per_s_before": self.before(fault),
                "steps_per_s_after": self.after(fault),
            }
            rounded = {name: None if value is None else round(value, 2) for name, value in figures.items()}
            yield {"at_s": round(fault.at_s, 2), "fault": fault.kind, "rank": fault.rank} | rounded

    def _undisturbed(self, fault: Fault) -> Sequence[int]:
        """Return the ranks whose first interval after a fault says how the others fared: all that had trained before,
        but its own, and those whom another fault or death reaches before they have made that interval."""
        found = []
        for rank, intervals in self.intervals.items():
            first = self._first_after(rank, fault.at_s)
            until_s = self.end_s if first is None else first.end_s
            had_begun = bool(intervals) and intervals[0].begin_s <= fault.at_s
            disturbed = any(other.disturbs(rank, fault.at_s, until_s) for other in self.faults if other is not fault)
            has_died = self.died.get(rank, until_s) < until_s
            if rank != fault.rank and had_begun and not disturbed and not has_died and rank not in self.left:
                found.append(rank)
        return found

    def _first_after(self, rank: int, time_s: float) -> Interval | None:
        """Return the first interval of a rank that began after a time."""
        return next((interval for interval in self.intervals.get(rank, ()) if interval.begin_s >= time_s), None)
