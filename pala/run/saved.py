"""The checkpoints that a resumed run continues from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pala.comm.agreement import collectively, from_first
from pala.comm.base import Communicator
from pala.config import Config
from pala.run import checkpoint, run_folder
from pala.run.checkpoint import RankState
from pala.system.output import log
from pala.system.text import counted


@dataclass(frozen=True)
class Saved:
    """The checkpoints that a run continues from."""

    segment: Path  # folder of the ranks' checkpoints
    own: RankState | None  # this rank's, if the job has all its old ranks again, and their models are close enough
    num_trainers: int  # ranks that trained then; of spares none, though they took a place
    num_lost: int  # ranks that had died; at least so many
    config: Config  # that the run had
    hosts: Sequence[str]  # of each rank

    @classmethod
    def find(cls, comm: Communicator, segment: Path, signature: int, coupling: int) -> Saved:
        """Read the checkpoints of the network of this signature. `coupling`: closeness that the ranks' models must
        have. Collective."""

        def facts() -> tuple[Config, list[str]]:
            record = run_folder.read(segment.parents[1])
            hosts = [entry.get("hosts", []) for entry in record["segments"] if entry["segment"] == segment.name]
            return run_folder.config_of(segment.parents[1], record), hosts[0] if hosts else []

        config, hosts = from_first(comm, facts)

        def load(rank: int, ranks: int | None = None) -> RankState:
            return checkpoint.load_rank(segment, rank, signature, ranks)

        first = collectively(comm, lambda: load(0))
        if first.num_trainers != comm.size or coupling > config.exchange_kind.coupling:
            return cls(segment, None, first.num_trainers, 0, config, hosts)
        own = collectively(comm, lambda: load(comm.rank, first.ranks))
        # A spare that trains is in the place of somebody who may have died before the next checkpoint of any other.
        replaced = from_first(comm, lambda: checkpoint.has_spares(segment, first))
        num_lost = max(comm.allgather(max(len(own.counters["lost"]), int(replaced))))
        updates = comm.allgather(own.counters["updates"])
        # Killed between the ranks' first checkpoints: some have weights that nobody learned.
        untrained = coupling == 1 and any(updates) and not all(updates)
        return cls(segment, None if num_lost or untrained else own, first.num_trainers, num_lost, config, hosts)

    def say_ranks_changed(self, comm: Communicator, what: str) -> None:
        """Say on rank 0 what the ranks begin with when they are not those of before."""
        if comm.rank == 0:
            had = f"had {counted(self.num_trainers, 'rank')} and now has {comm.size}"
            if self.num_trainers == comm.size:
                had = "had a model for each rank, which are now brought together"
            text = f"had lost {counted(self.num_lost, 'rank')}" if self.num_lost else had
            log(f"The run {text}: {what}; the steps made count; random streams are new.")
