"""The wait for the slowest rank while a job starts, which names the ranks that have not come.

A barrier does not tell whom it waits for. So a rank that waits for long tells the others, and the lowest of those that
wait says who has not told. Nothing is sent where nobody waits for long.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from mpi4py import MPI

from pala.system.output import log
from pala.system.waiting import LongWait

TELL_S, SAY_S = 2.0, 20.0
_TAG = 4  # of the world's communicator, as in `reach.py`; the data proxy has one of its own
_NUMBER_BYTES = 8
_MOST_TOLD = 64  # ranks that are told; above that not all need to know
_MOST_NAMED = 8

_num_told: Counter[int] = Counter()  # times that this process has told all others, by communicator
_taken: Counter[tuple[int, int]] = Counter()  # what it has received, by communicator and rank


class RollCall:
    """The barriers of a communicator, counted, and who is known to wait in the present one."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self.rank = comm, comm.rank
        self._number = 0
        self._reached: dict[int, int] = {}  # the latest barrier that each other rank has told of
        self._told: list[MPI.Request] = []

    def wait(self) -> LongWait:
        """Begin to wait in the next barrier."""
        self._number += 1
        return _Wait(self)

    def tell(self) -> None:
        """Tell the other ranks that this one waits."""
        number = self._number.to_bytes(_NUMBER_BYTES, "little")
        _num_told[self._comm.py2f()] += 1
        with suppress(MPI.Exception):  # of a rank that is dead: the barrier itself will say so
            others = [rank for rank in range(min(self._comm.size, _MOST_TOLD)) if rank != self.rank]
            self._told += [self._comm.Isend(bytearray(number), rank, _TAG) for rank in others]
        self._told = [request for request in self._told if not _is_done(request)]

    def missing(self) -> list[int]:
        """Return the ranks that have not told that they wait; none if this rank was not told, or a lower one speaks."""
        status, number = MPI.Status(), bytearray(_NUMBER_BYTES)
        with suppress(MPI.Exception):
            while self._comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
                self._comm.Recv(number, status.Get_source(), _TAG)
                _taken[self._comm.py2f(), status.Get_source()] += 1
                self._reached[status.Get_source()] = int.from_bytes(number, "little")
        here = {rank for rank, reached in self._reached.items() if reached >= self._number}
        if self.rank >= _MOST_TOLD or min(here, default=self.rank) < self.rank:
            return []
        return [rank for rank in range(self._comm.size) if rank not in here and rank != self.rank]


def take_rest(comm: MPI.Comm) -> None:
    """Receive what other ranks have told and this one has not read: MPICH fails to end with messages that nobody took.
    Collective, and no rank may have died."""
    handle = comm.py2f()
    told = comm.allgather(_num_told[handle])
    others = [rank for rank in range(comm.size) if rank != comm.rank] if comm.rank < _MOST_TOLD else []
    for rank in others:
        for _ in range(told[rank] - _taken[handle, rank]):
            comm.Recv(bytearray(_NUMBER_BYTES), rank, _TAG)
        _taken[handle, rank] = told[rank]


class _Wait(LongWait):
    """A rank's wait in a barrier."""

    def __init__(self, call: RollCall) -> None:
        super().__init__()
        self._call = call
        self._has_told = False
        self._say_s = SAY_S

    def look(self) -> None:
        super().look()
        if self.took_s > TELL_S and not self._has_told:
            self._has_told = True
            self._call.tell()
        if self.took_s > self._say_s:
            self._say_s *= 2
            if missing := self._call.missing():
                log(f"[rank {self._call.rank}] has waited {self.took_s:.0f} s for {named(missing)}.")


def named(ranks: list[int]) -> str:
    """Return the names of some ranks: `rank 3`, `ranks 3, 5 and 60 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True
