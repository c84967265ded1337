"""The ranks of a job: those that train from the beginning, and the spares. Loads neither numpy nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pala.comm.agreement import collectively, cores_of_hosts, cores_per_rank
from pala.comm.base import Communicator
from pala.config import Config, NetworkConfig, to_table
from pala.job.start_notes import StartNotes
from pala.system.errors import CollectiveError, PalaError
from pala.system.resources import most_cores
from pala.system.tables import flatten
from pala.system.text import counted

if TYPE_CHECKING:  # numpy, whose thread pools are sized when it loads
    from pala.exchange.budget import StartState, Stop


class RunInfo(NamedTuple):
    """The run, as a spare is told of it when training begins."""

    folder: Path
    segment: Path  # of the checkpoints of this start
    previous: Path | None  # of those that it continues from
    config: Config  # as run.json has it
    is_locked: bool  # the run's folder
    network: NetworkConfig  # with what `auto` means in it
    time_s: float  # training time of earlier segments
    exchange: StartState


class Job:
    """The ranks of a job, as one of them knows them at the beginning, and the cores that they may use."""

    patience_s = 300.0
    """Seconds that are waited for the slowest rank at the end."""
    stop_patience_s = 60.0
    """Seconds that a rank without a signal waits for the others when a run is stopped; after a signal it waits less
    (`waiting.py`). Others may have to save, or be spares that were about to take a place."""

    def __init__(self, comm: Communicator, config: Config, resume: Path | None = None) -> None:
        """Gather the ranks' hosts and cores. Collective. Raises CollectiveError if ranks were started with unlike
        configurations, or cannot be spares."""
        mine = flatten(to_table(config)) | {"resume": None if resume is None else str(resume)}
        first = comm.bcast(mine)
        collectively(comm, lambda: _check(mine, first, config.run.spares, comm))
        self.comm, self.spares = comm, config.run.spares
        self.num_trainers = comm.size - self.spares
        self.hosts = comm.allgather(comm.host)
        cores = cores_of_hosts(comm)
        limits = dict(comm.allgather((comm.host, most_cores(cores[comm.host]))))
        self.cores = max(1, int(sum(min(len(cores[host]), limits[host]) for host in cores)))
        self.host_cores = cores[comm.host]  # that its ranks may use, between them
        self.threads = config.run.threads or cores_per_rank(comm, self.spares)  # that this rank may use
        self.trainers = comm.first(self.num_trainers)  # None on a spare
        self.notes = StartNotes()
        self._has_told_run = self.spares == 0

    def patience_after(self, stop: Stop) -> float:
        """Return how long to wait for the others once training has ended for this reason."""
        return self.patience_s if stop.completes else min(self.patience_s, self.stop_patience_s)

    def tell_run(self, info: RunInfo | None) -> RunInfo | None:
        """Give all ranks what rank 0 says of the run; None: it could not start. A spare waits for it asleep.
        Collective."""
        if self._has_told_run:
            return info
        self._has_told_run = True
        return self.comm.bcast(info)

    @contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """Tell the spares, who wait for it, if those who train fail to start inside the block."""
        try:
            yield
        except CollectiveError:
            self.tell_run(None)
            raise


def _check(mine: dict[str, Any], first: dict[str, Any], spares: int, comm: Communicator) -> None:
    """Raise PalaError if this rank was started with other settings than rank 0, or another run to resume; or if the
    job's spares cannot sleep until they are needed."""
    differing = [key for key in mine if mine[key] != first.get(key)]
    if differing:
        key = differing[0]
        raise PalaError(
            f"this rank was started with another configuration than rank 0: '{key}' is {mine[key]!r}, there it is "
            f"{first.get(key)!r}. Start all ranks with the same preset and options."
        )
    if spares >= comm.size:
        raise PalaError(
            f"'run.spares' is {spares}, but the job has {counted(comm.size, 'rank')}, the spares among them; start "
            f"more than {spares}."
        )
    if spares > 0 and not comm.outlives_ranks:
        raise PalaError(
            f"'run.spares' is {spares}, but this job ends with the first rank that dies: spares need Open MPI 5 "
            "and `mpirun --with-ft ulfm`, as `./launch/train.sh` and `pala train -n` start it; "
            "`--run.spares 0` does without."
        )
