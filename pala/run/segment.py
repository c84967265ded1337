"""One start of a run on the disk: the run's folder, locked against other jobs, and a new segment in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pala.config import Config
from pala.run import checkpoint, run_folder, user_code
from pala.run.lock import check_identity, join_lock, lock_folder, lock_identity
from pala.run.metrics import packed_alone
from pala.system.errors import CollectiveError, PalaError
from pala.transport.agreement import collectively
from pala.transport.base import Communicator


@dataclass(frozen=True)
class Segment:
    """Folders that all ranks of a start work in."""

    run: Path
    path: Path  # for this start's checkpoints
    previous: Path | None  # with the checkpoints that it goes on from
    identity: tuple[int, int] | None = None  # of the run's folder, where it is locked

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from an earlier start."""
        return self.previous is not None

    def check_folder(self) -> None:
        """Raise EndError if the run's folder was deleted and another job has made it anew. Before anything is written:
        the two would mix their files. Not collective."""
        check_identity(self.run, self.identity)

    @contextmanager
    def removed_if_nobody_starts(self, rank: int) -> Iterator[None]:
        """If every rank fails to start inside the block, take away what was made for this start."""
        try:
            yield
        except CollectiveError:
            if rank == 0:
                shutil.rmtree(self.path if self.is_resumed else self.run, ignore_errors=True)
            raise


@contextmanager
def joined(segment: Segment, is_locked: bool) -> Iterator[Segment]:
    """Keep the run's folder locked, if it is, on a rank that comes later than others, until the block ends. Raises
    PalaError if it cannot see the folder."""
    with join_lock(segment.run) if is_locked else contextlib.nullcontext() as lock:
        yield replace(segment, identity=lock_identity(lock))


@contextmanager
def open_segment(comm: Communicator, config: Config, resume: Path | None, preset: str) -> Iterator[Segment]:
    """Make the folders and lock the run's, on every rank, until the block ends. Collective.

    A new run's is named after `preset`, unless the configuration says how.
    """
    lock: BinaryIO | None = None  # held on every rank, so that the folder stays locked while any of them lives

    def make() -> tuple[Segment, bool] | None:
        nonlocal lock
        if comm.rank != 0:
            return None
        run = resume if resume is not None else run_folder.create(config, preset)
        lock = lock_folder(run)  # before anything in it is changed
        if lock is not None:
            run_folder.remove_unfinished(run)
        if resume is not None and (packed := packed_alone(run, comm.size)) is not None:
            raise PalaError(
                f"The metrics '{packed}' are packed, and training would begin a new file beside them, which would hide "
                "what they hold: `gunzip` them first."
            )
        if resume is None:
            user_code.forget(run)  # of a job that never began
        previous = checkpoint.newest_segment(run) if resume is not None else None
        segment = Segment(run, checkpoint.new_segment(run), previous)
        return segment, lock is not None

    def join() -> None:
        nonlocal lock
        if is_locked and comm.rank != 0:
            lock = join_lock(segment.run)

    try:
        made = comm.bcast(collectively(comm, make))
        assert made is not None
        segment, is_locked = made
        with segment.removed_if_nobody_starts(comm.rank):
            collectively(comm, join)
        yield replace(segment, identity=lock_identity(lock))
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):  # of a network file system that is gone: the real outcome is another
                lock.close()
