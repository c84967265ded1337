"""What a rank writes down of a run, and who keeps the records of all.

Every rank has a metrics file. The lowest rank that lives leads: it keeps run.json and the console, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pala.comm.agreement import from_first
from pala.comm.base import Communicator
from pala.config import Config, to_table
from pala.config.influence import settings_that_matter
from pala.run.console import Reporter
from pala.run.metrics import MetricsWriter, Record, metrics_path
from pala.run.run_folder import RunRecord
from pala.run.segment import Segment
from pala.run.view import RunView
from pala.system.errors import PalaError, reason
from pala.system.output import say
from pala.system.tables import flatten

if TYPE_CHECKING:
    from pala.exchange.base import Exchange  # torch: a spare that sleeps has not loaded it


class Records:
    """What one rank records, from the start of a segment to its end."""

    def __init__(self, rank: int, hosts: list[str], config: Config, segment: Segment, start: Record) -> None:
        """`hosts`: of all ranks, the spares too; `start`: the first record of this rank's metrics."""
        self._rank, self._hosts, self._config, self._segment = rank, hosts, config, segment
        self._num_trainers = len(hosts) - config.run.spares
        self._trained = set(range(self._num_trainers))  # ranks that train, or did
        self._metrics = MetricsWriter(metrics_path(segment.run, rank), rank)
        self._record: RunRecord | None = None  # of who leads
        self._reporter: Reporter | None = None
        self._to_note: dict[str, Any] = {}
        self._begin_steps: int = start["global_steps"]
        self._metrics.write([start])

    def begin(self, comm: Communicator, description: dict[str, Any]) -> None:
        """Begin run.json, or a segment in it, that `description` tells of. Collective."""

        def on_rank_0() -> None:
            described = {"segment": self._segment.path.name, **description, "hosts": self._hosts}
            self._record = RunRecord.begin(self._segment.run, self._config, described, self._segment.check_folder)

        from_first(comm, on_rank_0)

    def open_reporter(self) -> None:
        """Begin what the console and TensorBoard show, if this rank leads."""
        if self._record is not None:
            self._reporter = self._make_reporter(self._begin_steps)

    def note_later(self, **facts: Any) -> None:
        """Add to run.json at the next report, if this rank leads: a file system that is slow now would have this rank
        train after all others."""
        self._to_note |= facts

    def write(self, records: list[Record]) -> None:
        """Append to this rank's metrics. Raises EndError if the run's folder is another job's by now."""
        self._segment.check_folder()
        self._metrics.write(records)

    def report(self, global_steps: int) -> None:
        """Show what is new of all ranks, if this rank leads."""
        if self._to_note and self._note_or_say(**self._to_note):
            self._to_note.clear()
        if self._reporter is not None:
            self._reporter.report(global_steps)

    @property
    def view(self) -> RunView | None:
        """What the metrics of all ranks show, if this rank leads."""
        return self._reporter.view if self._reporter is not None else None

    def resign(self) -> None:
        """This rank does not lead, or no more: who does goes on with run.json and the console."""
        self._close_reporter()
        self._record = None

    def lead_if_first(self, exchange: Exchange, living: Sequence[int], time_s: float) -> bool:
        """Take the lead if this is the lowest rank that lives, and note who has died, left or joined, but for those who
        are joining and may not come to train; whether this rank leads. `time_s`: training time. Not collective."""
        self._trained |= set(living).difference(exchange.joining)
        if not living or self._rank != living[0]:  # of a rank that has left all others may be gone, too
            return False
        try:
            self.lead(exchange, living, time_s)
        except (OSError, PalaError) as error:  # a full disk: the next interval tries again
            say(f"[rank {self._rank}] 'run.json' cannot be written: {reason(error)}. Training goes on.")
        return True

    def lead(self, exchange: Exchange, living: Sequence[int], time_s: float) -> None:
        """The same, for the lowest rank that lives. Raises OSError, PalaError if run.json cannot be written, or read
        after the death of who kept it."""
        if self._record is None:
            self._record = RunRecord.take_over(self._segment.run, self._segment.check_folder)
            if self._record.segment["status"] == "running":
                self._reporter = self._make_reporter()
        left = exchange.left
        self._trained |= set(living).difference(exchange.joining)
        gone = sorted(self._trained.difference(living))
        self._take_back_left([rank for rank in living if rank not in left])
        self._note("left_ranks", [rank for rank in gone if rank in left], time_s)
        for rank in self._note("lost_ranks", [rank for rank in gone if rank not in self._noted("left_ranks")], time_s):
            say(f"[rank {self._rank}] rank {rank} on {self._hosts[rank]} has died; {len(living)} go on.")
        spares = [rank for rank in sorted(self._trained) if rank >= self._num_trainers]
        for rank in self._note("joined_ranks", spares, time_s):
            say(f"[rank {self._rank}] rank {rank}, a spare, on {self._hosts[rank]} has joined; {len(living)} train.")
        if self._reporter is not None:
            self._reporter.view.living = living

    def _noted(self, key: str) -> dict[int, Any]:
        assert self._record is not None
        return {entry["rank"]: entry for entry in self._record.segment.get(key, [])}

    def _note(self, key: str, ranks: Collection[int], time_s: float) -> list[int]:
        """See to it that run.json names these ranks under this key; returns those that are new there."""
        noted = self._noted(key)
        fresh = [rank for rank in ranks if rank not in noted]
        if fresh:
            entries = [{"rank": rank, "host": self._hosts[rank], "noticed_s": round(time_s, 3)} for rank in fresh]
            assert self._record is not None
            self._record.note(**{key: sorted([*noted.values(), *entries], key=lambda entry: entry["rank"])})
        return fresh

    def _take_back_left(self, ranks: Collection[int]) -> None:
        """See to it that run.json does not name these ranks among those that left."""
        noted = self._noted("left_ranks")
        kept = [entry for rank, entry in noted.items() if rank not in ranks]
        if len(kept) < len(noted):
            assert self._record is not None
            self._record.note(left_ranks=kept or None)

    def end(self, status: str, **facts: Any) -> None:
        """Close console and TensorBoard, and say in run.json how it ended: `completed`, or `stopped` by a signal. Who
        does not lead does nothing."""
        self._close_reporter()
        if self._record is None:
            return
        try:
            self._record.end(status, **facts)
        except OSError as error:
            if status == "completed":  # what nobody recorded did not happen: the job must not end well
                raise
            say(f"run.json cannot be written: {reason(error)}.")

    def fail(self, error: BaseException) -> None:
        """The same for `failed`, and why. Any rank may say so, since who leads may be the one that does not answer;
        not of a run that is complete, and who comes first is believed."""
        self._close_reporter()
        note_failure(self._segment, self._rank, error, self._record)

    def conclude(self, outcomes: dict[str, str]) -> None:
        """Note what became of the last words, if this rank leads."""
        self._note_or_say(conclusion=outcomes | {"rank": self._rank})

    def saved(self) -> None:
        """Note that no rank has anything left to save, if this rank leads."""
        self._note_or_say(saved=True)

    def _note_or_say(self, **facts: Any) -> bool:
        """Add to run.json, if this rank leads. Returns whether it could be written."""
        try:
            if self._record is not None:
                self._record.note(**facts)
        except OSError as error:
            say(f"run.json cannot be written: {reason(error)}.")
            return False
        return True

    def _close_reporter(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def _make_reporter(self, begin_steps: int | None = None) -> Reporter:
        """`begin_steps`: None for one that goes on with what another rank's has told."""
        run = self._config.run
        steps = self._config.total_steps
        settings = settings_that_matter(flatten(to_table(self._config)))
        folder, ranks = self._segment.run, self._num_trainers
        return Reporter(folder, ranks, steps, run.console, run.tensorboard, run.spares, settings, begin_steps)


def note_failure(segment: Segment, rank: int, error: BaseException, record: RunRecord | None = None) -> None:
    """Say in run.json that the segment `failed`, and why; also for a spare, which has no records. `record`: of who
    leads."""
    why = str(error) if isinstance(error, PalaError) else f"{type(error).__name__}: {error}"
    try:
        record = record or RunRecord.take_over(segment.run, segment.check_folder)
        is_ours = record.segment["segment"] == segment.path.name
        if is_ours and record.segment["status"] in ("running", "stopped"):
            record.end("failed", error=why)
    except (OSError, PalaError) as fault:
        say(f"[rank {rank}] run.json cannot be written: {fault}.")
