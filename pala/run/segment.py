"""One start of a run on the disk: the run's folder and a new segment in it. Loads no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pala.run.lock import check_identity
from pala.system.errors import CollectiveError, EndError


@dataclass(frozen=True)
class Segment:
    """Folders that all ranks of a start work in."""

    run: Path
    path: Path  # for this start's checkpoints
    previous: Path | None  # with the checkpoints that it goes on from
    identity: tuple[int, int] | None = None  # of the run's folder, where it is locked

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
                with suppress(EndError):  # then it is another job's by now
                    self.check_folder()
                    shutil.rmtree(self.run if self.previous is None else self.path, ignore_errors=True)
            raise
