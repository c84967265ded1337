"""The ranks of a job: those that train from the beginning, and the spares. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pala.comm.agreement import collectively, cores_of_hosts, cores_per_rank
from pala.comm.base import Communicator
from pala.config import Config, Precision, to_table
from pala.exchange.budget import Stop
from pala.exchange.sleeping import Beginning
from pala.run.segment import Segment
from pala.system.errors import CollectiveError, PalaError
from pala.system.resources import most_cores
from pala.system.tables import flatten
from pala.system.text import counted


@dataclass(frozen=True)
class Briefing:
    """What a spare is told of the run when training begins."""

    segment: Segment  # without identity: other ranks may see another
    is_locked: bool  # the run's folder
    precision: Precision  # in which the ranks compute
    time_s: float  # training time of earlier segments
    exchange: Beginning


class Job:
    """What a rank knows of all when it begins."""

    patience_s = 300.0
    """For the slowest rank, at the end."""
    stop_patience_s = 60.0
    """The same where a run is stopped, for a rank that got no signal itself: after one it waits less (`waiting.py`).
    Others may have to save, or be spares that were about to take a place."""

    def __init__(self, comm: Communicator, config: Config, resume: Path | None) -> None:
        """Collective. Raises CollectiveError if ranks were started with unlike configurations, or cannot be spares."""
        check_agreement(comm, config, resume)
        check_spares_can_sleep(comm, config.run.spares)
        self.comm, self.spares = comm, config.run.spares
        self.num_trainers = comm.size - self.spares
        self.hosts = comm.allgather(comm.host)
        cores = cores_of_hosts(comm)
        limits = dict(comm.allgather((comm.host, most_cores(cores[comm.host]))))
        self.cores = max(1, int(sum(min(len(cores[host]), limits[host]) for host in cores)))
        self.host_cores = cores[comm.host]  # that its ranks may use, between them
        self.threads = config.run.threads or cores_per_rank(comm, self.spares)  # that this rank may use
        self.trainers = comm.first(self.num_trainers)  # None on a spare
        self._briefed = self.spares == 0

    def patience_after(self, stop: Stop) -> float:
        """How long to wait for the others once training has ended so."""
        return self.patience_s if stop.completes else min(self.patience_s, self.stop_patience_s)

    def brief(self, briefing: Briefing | None) -> Briefing | None:
        """What rank 0 gives is told to all; None: it could not start. A spare waits for it asleep. Collective."""
        if self._briefed:
            return briefing
        self._briefed = True
        return self.comm.bcast(briefing)

    @contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """If those who train fail to start inside the block, tell the spares, who wait for it."""
        try:
            yield
        except CollectiveError:
            self.brief(None)
            raise


def check_agreement(comm: Communicator, config: Config, resume: Path | None = None) -> None:
    """Raise on all ranks if ranks were started with different configurations, or runs to resume. Collective."""
    mine = flatten(to_table(config)) | {"resume": None if resume is None else str(resume)}
    first = comm.bcast(mine)
    differing = [key for key in mine if mine[key] != first.get(key)]

    def check() -> None:
        if differing:
            key = differing[0]
            raise PalaError(
                f"this rank was started with another configuration than rank 0: '{key}' is {mine[key]!r}, there it is "
                f"{first.get(key)!r}. Start all ranks with the same preset and options."
            )

    collectively(comm, check)


def check_spares_can_sleep(comm: Communicator, spares: int) -> None:
    """Raise on all ranks if so many of them cannot sleep until they are needed. Collective."""

    def check() -> None:
        if spares >= comm.size:
            raise PalaError(
                f"'run.spares' is {spares}, but the job has {counted(comm.size, 'rank')}, the spares among them; start "
                f"more than {spares}."
            )
        if spares > 0 and not comm.outlives_ranks:
            raise PalaError(
                f"'run.spares' is {spares}, but this job ends with the first rank that dies: spares need Open MPI 5 "
                "and `mpirun --with-ft ulfm`, as `./launch/train.sh` and `launch/supervise.py` start it; "
                "`--run.spares 0` does without."
            )

    collectively(comm, check)
