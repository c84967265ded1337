"""Faults by a seed: which rank is killed, stopped or slowed when, until a run ends or its time is over."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pala.job.job import Job
from pala.lab.chaos.history import Fault, FaultName, History
from pala.lab.chaos.processes import Guard, RankProcess, find
from pala.lab.chaos.watch import Watch
from pala.system.interrupt import Interrupt
from pala.system.output import log

TICK_S = 0.1
_HANG_S = 60.0
_SLOW_TICKS = 4  # a slow rank runs in one of so many ticks


class Draw(NamedTuple):
    """A fault as it is drawn, whatever the ranks are doing then."""

    wait_s: float
    kind: FaultName
    place: float
    """Place of the rank to disturb in the list of those that can be, in [0, 1)."""
    lasts_s: float


@dataclass(frozen=True)
class Plan:
    """Choices of the user's: which faults, how often, and how long."""

    seed: int
    mean_s: float
    kinds: Sequence[FaultName]
    duration_s: float | None
    """None: until the run ends."""

    def draw(self, source: random.Random) -> Draw:
        """Return the next fault. The times between two are exponential; a stop takes 0.1 to 1 of their mean."""
        wait_s = source.expovariate(1 / self.mean_s)
        return Draw(wait_s, source.choice(self.kinds), source.random(), source.uniform(0.1, 1.0) * self.mean_s)


def hang_limit_s(patience_s: float, log_interval_s: float) -> float:
    """Return the seconds without a record after which a rank that nothing disturbs counts as hung.

    `patience_s`: of the run's exchange, beyond which no rank waits for another; `log_interval_s`: between two records.
    """
    return _HANG_S + patience_s + 2 * log_interval_s


class Shaker:
    """Disturbs a run's ranks on this host, one of them at least excepted, and watches all ranks."""

    def __init__(self, run: Path, processes: dict[int, RankProcess], plan: Plan, limit_s: float, log_s: float) -> None:
        """Begin to watch. `processes`: the ranks on this host; `limit_s`: see `hang_limit_s`; `log_s`: seconds between
        two records. Raises PalaError if the run's files cannot be read."""
        self._run, self._plan = run, plan
        self.processes = processes
        self._limit_s, self._log_s = limit_s, log_s
        self._began_s = time.monotonic()
        self._lasting: list[tuple[Fault, float]] = []  # stops and slowness, and when each is to end
        self._ticks = 0
        self._has_said_alone = False
        self.history = History(begin_s=math.inf)
        self.watch = Watch(run, self.history, self._now_s)

    def shake(self, interrupt: Interrupt) -> None:
        """Disturb the run until it ends, its time is over, a rank hangs or a signal comes. Whatever happens, no process
        is left stopped. Raises PalaError if a file of the run is damaged."""
        guard = Guard()
        try:
            if self._until_all_train(interrupt):
                self.history.begin_s = self._now_s()
                self._disturb(guard, interrupt)
                self._until_recovered(interrupt)
        finally:
            self._end_faults(math.inf)
            guard.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _disturb(self, guard: Guard, interrupt: Interrupt) -> None:
        """Begin and end faults. The first comes after three records, by which the speed before it is known."""
        source = random.Random(self._plan.seed)
        began_s = self._now_s()
        draw = self._plan.draw(source)
        due_s = began_s + 3 * self._log_s + draw.wait_s
        while not self._is_over(interrupt) and not self.watch.is_ending():
            now_s = self._now_s()
            if self._plan.duration_s is not None and now_s >= began_s + self._plan.duration_s:
                break
            self._end_faults(now_s)
            self._keep_slow(guard)
            if now_s >= due_s:
                self._begin(draw, guard)
                draw = self._plan.draw(source)
                due_s += draw.wait_s
        self._end_faults(math.inf)

    def _begin(self, draw: Draw, guard: Guard) -> None:
        """Do to a rank what was drawn, unless all others of this host that can be disturbed are already."""
        self.processes |= find(self._run, self.processes)
        now_s = self._now_s()
        ranks = [
            rank
            for rank, process in sorted(self.processes.items())
            if rank in self.history.intervals and process.lives() and self.history.as_usual(rank, now_s, math.inf)
        ]
        if len(ranks) < 2:
            if not self._has_said_alone:
                log(f"{now_s:7.1f} s  no {draw.kind}: the last rank here that nothing disturbs is left alone")
            self._has_said_alone = True
            return
        self._has_said_alone = False
        rank = ranks[int(draw.place * len(ranks))]
        fault = Fault(draw.kind, rank, now_s)
        self.history.faults.append(fault)
        if draw.kind == "kill":
            log(f"{now_s:7.1f} s  kills rank {rank}")
            self.processes[rank].kill()
            return
        log(f"{now_s:7.1f} s  {draw.kind}s rank {rank} for {draw.lasts_s:.1f} s")
        self._lasting.append((fault, now_s + draw.lasts_s))
        self.processes[rank].stop(guard)

    def _keep_slow(self, guard: Guard) -> None:
        """Stop slow ranks for three ticks, and let them run in the fourth."""
        for fault, _ in self._lasting:
            if fault.kind == "slow" and self._ticks % _SLOW_TICKS == 0:
                self.processes[fault.rank].resume()
            elif fault.kind == "slow" and self._ticks % _SLOW_TICKS == 1:
                self.processes[fault.rank].stop(guard)

    def _end_faults(self, until_s: float) -> None:
        """Let continue all ranks whose stop or slowness is to end by then."""
        for fault, ends_s in self._lasting:
            if ends_s <= until_s:
                self.processes[fault.rank].resume()
                fault.until_s = self._now_s()
        self._lasting = [(fault, ends_s) for fault, ends_s in self._lasting if ends_s > until_s]

    # ---- the course of the run -------------------------------------------------------------------------------------

    def _until_all_train(self, interrupt: Interrupt) -> bool:
        """Wait until each rank has made a record: a job that loses a rank while it starts ends. Returns whether they
        have."""
        while not self._is_over(interrupt):
            if {*self.watch.trainers} <= {*self.history.intervals, *self.history.died}:
                return True
        return False

    def _until_recovered(self, interrupt: Interrupt) -> None:
        """Wait until all ranks have made records after the last fault, three of them for the speed after it."""
        faults, least_s = self.history.faults, self._now_s() + 3 * self._log_s
        while not self._is_over(interrupt):
            if self._now_s() >= least_s and all(map(self.history.recovered, faults)):
                return

    def _is_over(self, interrupt: Interrupt) -> bool:
        """Wait for a tick, take in what is new, and return whether there is nothing more to see."""
        time.sleep(TICK_S)
        self._ticks += 1
        self.watch.look()
        history, now_s = self.history, self._now_s()
        ended = [rank for rank, process in self.processes.items() if not process.lives()]
        if len(ended) == len(self.processes):
            self.watch.note_whether_gone()
        for rank in history.killed.intersection(ended):
            history.died.setdefault(rank, now_s)
        limit_s = self._limit_s + (Job.patience_s if self.watch.is_ending() else 0.0)
        history.hung = [
            rank
            for rank in sorted({*self.watch.trainers, *history.intervals})
            if history.as_usual(rank, now_s, now_s) and now_s - self._last_sign_s(rank) > limit_s
        ]
        return history.status != "running" or bool(history.hung) or interrupt.signal is not None

    def _last_sign_s(self, rank: int) -> float:
        """Return when a rank last made a record, or was let continue."""
        records = [interval.end_s for interval in self.history.intervals.get(rank, [])[-1:]]
        return max([0.0, *records, *(fault.end_s for fault in self.history.faults if fault.rank == rank)])
