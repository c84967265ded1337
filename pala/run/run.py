"""A run on the disk, as one rank works in it from a start to the end: its folder and lock, and what is written there.

Every rank has a metrics file. The lowest rank that lives leads: it keeps run.json and the console, too. Loads no torch.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pala.comm.agreement import collectively, from_first
from pala.comm.base import Communicator
from pala.config import Config
from pala.run import run_folder
from pala.run.console import Reporter
from pala.run.lock import check_identity, join_lock, lock_folder, lock_identity
from pala.run.metrics import MetricsWriter, Record, metrics_path, packed_alone
from pala.run.run_folder import RunRecord
from pala.run.view import RunView
from pala.system.errors import CollectiveError, EndError, PalaError, reason
from pala.system.output import log, say_death

if TYPE_CHECKING:  # torch: a spare that sleeps has not loaded it
    from pala.exchange.base import Exchange
    from pala.run.agent import Counters


class Run:
    """One start of a run, on one rank: the run's folder with a new segment in it, and the records that are kept."""

    def __init__(
        self, folder: Path, segment: Path, previous: Path | None, config: Config, rank: int, hosts: list[str]
    ) -> None:
        """`segment`: folder of this start's checkpoints; `previous`: folder of the checkpoints that it continues from.
        `config`: the configuration in run.json. `hosts`: hosts of all ranks, spares included."""
        self.folder = folder
        self.segment = segment
        self.previous = previous
        self.config = config
        self.identity: tuple[int, int] | None = None  # of the folder, once it is locked
        self.hosts, self.spares = hosts, config.run.spares
        self.num_trainers = len(hosts) - self.spares
        self.rank = rank
        self._trained = set(range(self.num_trainers))  # ranks that train, or did
        self._metrics = MetricsWriter(metrics_path(folder, rank), rank)
        self._record: RunRecord | None = None  # of the rank that leads
        self._reporter: Reporter | None = None

    def check_folder(self) -> None:
        """Raise EndError if the run's folder was deleted and another job has made it again. Before anything is written:
        the two would mix their files. Not collective."""
        check_identity(self.folder, self.identity)

    @contextmanager
    def removed_if_nobody_starts(self) -> Iterator[None]:
        """Remove what was made for this start if every rank fails to start inside the block."""
        try:
            yield
        except CollectiveError:
            if self.rank == 0:
                with contextlib.suppress(EndError):  # then it is another job's by now
                    self.check_folder()
                    shutil.rmtree(self.folder if self.previous is None else self.segment, ignore_errors=True)
            raise

    @property
    def trace_folder(self) -> Path:
        """Folder of this start's timeline, a file a rank."""
        return self.folder / "trace" / self.segment.name

    # ---- records -------------------------------------------------------------------------------------------------

    def start_metrics(self, counters: Counters, global_steps: int) -> None:
        """Write the first record of this rank's metrics. Raises EndError as `check_folder`."""
        start = {
            "type": "start",
            "segment": self.segment.name,
            "rank": self.rank,
            "ranks": self.num_trainers,
            "time_s": round(counters.time_s, 3),
            "local_steps": counters.local_steps,
            "global_steps": global_steps,
        }
        self.write([start])

    def start_record(self, comm: Communicator, description: dict[str, Any]) -> None:
        """Begin run.json, or a segment in it, that `description` tells of. Collective."""

        def on_rank_0() -> None:
            described = {"segment": self.segment.name, **description, "hosts": self.hosts}
            self._record = RunRecord.begin(self.folder, self.config, described, self.check_folder)

        from_first(comm, on_rank_0)

    def open_reporter(self, begin_steps: int | None = None) -> None:
        """Begin what the console and TensorBoard show, if this rank leads. `begin_steps`: steps of all ranks at the
        start; None for a rank that continues another one's."""
        if self._record is not None:
            self._reporter = Reporter(self.folder, self.num_trainers, self.config, begin_steps)

    def write(self, records: list[Record]) -> None:
        """Append to this rank's metrics. Raises EndError if the run's folder is another job's by now."""
        self.check_folder()
        self._metrics.write(records)

    def report(self, global_steps: int) -> None:
        """Show what is new of all ranks, if this rank leads."""
        if self._reporter is not None:
            self._reporter.report(global_steps)

    @property
    def view(self) -> RunView | None:
        """View of all ranks' metrics, if this rank leads."""
        return self._reporter.view if self._reporter is not None else None

    def stop_leading(self) -> None:
        """Leave run.json and the console to the rank that leads, which this one is not, or no more."""
        self._close_reporter()
        self._record = None

    def lead_if_first(self, exchange: Exchange, living: Sequence[int], time_s: float) -> bool:
        """Take the lead if this is the lowest rank that lives; returns whether it is. Note the ranks that have died,
        left or joined, except those that are joining and may not come to train. `time_s`: training time. Not
        collective."""
        self._trained |= set(living).difference(exchange.joining)
        if not living or self.rank != living[0]:  # of a rank that has left all others may be gone, too
            return False
        try:
            self.lead(exchange, living, time_s)
        except (OSError, PalaError) as error:  # a full disk: the next interval tries again
            log(f"[rank {self.rank}] 'run.json' cannot be written: {reason(error)}. Training continues.")
        return True

    def lead(self, exchange: Exchange, living: Sequence[int], time_s: float) -> None:
        """Take the lead on the lowest rank that lives, and note as `lead_if_first` does. Raises OSError, PalaError if
        run.json cannot be written, or read after the death of the rank that kept it."""
        if self._record is None:
            self._record = RunRecord.take_over(self.folder, self.check_folder)
            if self._record.segment["status"] == "running":
                self.open_reporter()
        left = exchange.left
        self._trained |= set(living).difference(exchange.joining)
        gone = sorted(self._trained.difference(living))
        self._take_back_left([rank for rank in living if rank not in left])
        self._note("left_ranks", [rank for rank in gone if rank in left], time_s)
        for rank in self._note("lost_ranks", [rank for rank in gone if rank not in self._noted("left_ranks")], time_s):
            say_death(self.rank, rank, len(living), self.hosts[rank])
        spares = [rank for rank in sorted(self._trained) if rank >= self.num_trainers]
        for rank in self._note("joined_ranks", spares, time_s):
            log(f"[rank {self.rank}] rank {rank}, a spare, on {self.hosts[rank]} has joined; {len(living)} train.")
        if self._reporter is not None:
            self._reporter.view.living = living

    def _noted(self, key: str) -> dict[int, Any]:
        assert self._record is not None
        return {entry["rank"]: entry for entry in self._record.segment.get(key, [])}

    def _note(self, key: str, ranks: Collection[int], time_s: float) -> list[int]:
        """Name these ranks in run.json under this key; returns those that are new there."""
        noted = self._noted(key)
        fresh = [rank for rank in ranks if rank not in noted]
        if fresh:
            entries = [{"rank": rank, "host": self.hosts[rank], "noticed_s": round(time_s, 3)} for rank in fresh]
            assert self._record is not None
            self._record.note(**{key: sorted([*noted.values(), *entries], key=lambda entry: entry["rank"])})
        return fresh

    def _take_back_left(self, ranks: Collection[int]) -> None:
        """Remove these ranks from those that left, in run.json."""
        noted = self._noted("left_ranks")
        kept = [entry for rank, entry in noted.items() if rank not in ranks]
        if len(kept) < len(noted):
            assert self._record is not None
            self._record.note(left_ranks=kept or None)

    def end(self, status: str, **facts: Any) -> None:
        """Close console and TensorBoard, and say in run.json how it ended, if this rank leads: `completed`, or
        `stopped` by a signal."""
        self._close_reporter()
        if self._record is None:
            return
        try:
            self._record.end(status, **facts)
        except OSError as error:
            if status == "completed":  # else the job would end well, and its record say otherwise
                raise
            log(f"run.json cannot be written: {reason(error)}.")

    def fail(self, error: BaseException) -> None:
        """Say in run.json that the run `failed`, and why. Any rank may, since the one that leads may be the one that
        does not answer. A run that is complete stays so, and of several reasons the first one stays."""
        self._close_reporter()
        note_failure(self.folder, self.segment.name, self.rank, error, self._record, self.check_folder)

    def conclude(self, outcomes: dict[str, str]) -> None:
        """Note what became of the evaluation and the learning curve, if this rank leads."""
        self._note_or_say(conclusion=outcomes | {"rank": self.rank})

    def saved(self) -> None:
        """Note that no rank has anything left to save, if this rank leads."""
        self._note_or_say(saved=True)

    def _note_or_say(self, **facts: Any) -> None:
        """Add to run.json, if this rank leads, or say why that cannot be written."""
        try:
            if self._record is not None:
                self._record.note(**facts)
        except OSError as error:
            log(f"run.json cannot be written: {reason(error)}.")

    def _close_reporter(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


@contextmanager
def open_run(comm: Communicator, config: Config, resume: Path | None, preset: str, hosts: list[str]) -> Iterator[Run]:
    """Make or take up the run's folder, a new segment in it, and lock it on every rank until the block ends.
    Collective.

    A new run's folder is named after `preset`, unless the configuration says how. `resume`: the folder of the run to
    continue.
    """
    from pala.run import checkpoint, user_code  # torch

    lock: BinaryIO | None = None  # held on every rank, so that the folder stays locked while any of them lives

    def begin() -> tuple[Path, Path, Path | None, bool]:
        nonlocal lock
        folder = resume if resume is not None else run_folder.create(config, preset)
        if resume is not None:
            _note_on_name(resume, config)
        lock = lock_folder(folder)  # before anything in it is changed
        if lock is not None:
            run_folder.remove_unfinished(folder)
        if resume is None:
            user_code.forget(folder)  # of a job that never began
            previous = None
        else:
            _check_metrics(resume, len(hosts))
            previous = checkpoint.newest_segment(resume)
        return folder, checkpoint.new_segment(folder), previous, lock is not None

    def join() -> None:
        nonlocal lock
        if is_locked and comm.rank != 0:
            lock = join_lock(folder)

    try:
        folder, segment, previous, is_locked = from_first(comm, begin)
        run = Run(folder, segment, previous, config, comm.rank, hosts)
        with run.removed_if_nobody_starts():
            collectively(comm, join)
        run.identity = lock_identity(lock)
        yield run
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):  # of a network file system that is gone: the real outcome is another
                lock.close()


@contextmanager
def locked_too(run: Run, is_locked: bool) -> Iterator[Run]:
    """Keep the run's folder locked, if it is, on a rank that comes later than others, until the block ends. Raises
    PalaError if it cannot see the folder."""
    with join_lock(run.folder) if is_locked else contextlib.nullcontext() as lock:
        run.identity = lock_identity(lock)
        yield run


def _note_on_name(run: Path, config: Config) -> None:
    """Report that a resumed run keeps its name, if it is given another one."""
    if (name := run_folder.own_name(run, config)) != config.run.name:
        log(
            f"'run.name' ('{config.run.name}') is not used: the run continues in its folder as '{name}'. For another "
            "run that begins as it is, copy the folder and resume the copy."
        )


def _check_metrics(run: Path, ranks: int) -> None:
    """Make the folder of metrics, which a copy of a run may lack. Raises PalaError if training would hide what is in
    one that is packed."""
    (run / "metrics").mkdir(exist_ok=True)
    if (packed := packed_alone(run, ranks)) is not None:
        raise PalaError(
            f"The metrics '{packed}' are packed, and training would begin a new file next to them, which would hide "
            "what they hold: `gunzip` them first."
        )


def note_failure(
    run: Path,
    segment: str,
    rank: int,
    error: BaseException,
    record: RunRecord | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Say in run.json that the segment of this name `failed`, and why; also for a spare that sleeps, which has no
    `Run`. `record`: the leading rank's record; `check`: see `RunRecord`."""
    why = str(error) if isinstance(error, PalaError) else f"{type(error).__name__}: {error}"
    try:
        record = record or RunRecord.take_over(run, check)
        is_ours = record.segment["segment"] == segment
        if is_ours and record.segment["status"] in ("running", "stopped"):
            record.end("failed", error=why)
    except (OSError, PalaError) as fault:
        log(f"[rank {rank}] run.json cannot be written: {reason(fault)}.")
