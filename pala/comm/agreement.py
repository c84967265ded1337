"""Agreement between the ranks of a job while they start. No torch and no MPI.

An error that one rank meets while all start is raised on all of them, so that none waits forever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from pala.comm.base import Communicator
from pala.system.errors import CollectiveError, PalaError, reason
from pala.system.resources import most_cores, share_of_cores

T = TypeVar("T")


def collectively(comm: Communicator, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if any fails with PalaError or OSError, raise that on all. Collective."""
    value, fault = None, None
    try:
        value = action()
    except (PalaError, OSError) as error:
        fault = reason(error)
    faults = [(rank, text) for rank, text in enumerate(comm.allgather(fault)) if text is not None]
    if not faults:
        return value  # type: ignore[return-value]
    everybody = len(faults) == comm.size and len({text for _, text in faults}) == 1
    rank, text = faults[0]
    raise CollectiveError(text if everybody else f"Rank {rank}: {text}")


def from_first(comm: Communicator, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone and return its value on every rank; raise its PalaError or OSError on all.
    Collective."""
    return comm.bcast(collectively(comm, lambda: action() if comm.rank == 0 else None))  # type: ignore[return-value]


def sum_on_host(comm: Communicator, mine: int) -> int:
    """Return the sum over the ranks on this rank's host. Collective."""
    return sum(value for host, value in comm.allgather((comm.host, mine)) if host == comm.host)


def cores_per_rank(comm: Communicator, spares: int = 0) -> int:
    """Return how many threads this rank may use. The last `spares` ranks sleep, so their share does not make the
    others' smaller: a spare trains only when another rank is gone. Collective."""
    mine = os.sched_getaffinity(0)
    ranks = comm.allgather((comm.host, mine))
    busy = [cores for host, cores in ranks[: comm.size - spares] if host == comm.host]
    most = most_cores(mine.union(*busy))
    return share_of_cores(mine, busy if comm.rank < comm.size - spares else [mine, *busy], most)


def cores_of_hosts(comm: Communicator) -> dict[str, set[int]]:
    """Return the cores that the ranks of each host may use together. Collective."""
    hosts: dict[str, set[int]] = {}
    for host, cores in comm.allgather((comm.host, os.sched_getaffinity(0))):
        hosts.setdefault(host, set()).update(cores)
    return hosts
