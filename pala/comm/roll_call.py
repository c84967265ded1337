"""The wait for the slowest rank where all meet, which names the ranks that have not come.

A barrier does not tell whom it waits for. So a rank that waits for long tells the others, and the lowest of those that
wait says who has not told. Nothing is sent where no rank waits for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext, suppress

from mpi4py import MPI

from pala.system.waiting import WaitForRanks

_TAG = 4  # of the world's communicator, as in `reach.py`; the data proxy has one of its own
_NUMBER_BYTES = 8
_MOST_TOLD = 64  # ranks that are told; above that not all need to know
_keys: list[int] = []  # the one by which a communicator holds its roll call, once MPI has begun


class RollCall:
    """The barriers of a communicator, counted, and who is known to wait in the present one."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self.rank = comm, comm.rank
        self._number = 0
        self._num_told = 0  # times that this rank has told all others
        self._taken = Counter[int]()  # what it has received, by rank
        self._reached: dict[int, int] = {}  # the latest barrier that each other rank has told of
        self._told: list[MPI.Request] = []

    def wait(
        self,
        where: str | None = "",
        dead: Set[int] = frozenset(),
        lock: AbstractContextManager[object] | None = None,
    ) -> WaitForRanks:
        """Begin to wait in the next barrier, `where` as for `WaitForRanks`. `dead`: ranks that never come; `lock`: held
        while MPI is called, where another thread may call it."""
        self._number += 1
        return _Wait(self, where, dead, lock or nullcontext())

    def tell(self) -> None:
        """Tell the other ranks that this one waits."""
        number = self._number.to_bytes(_NUMBER_BYTES, "little")
        self._num_told += 1
        with suppress(MPI.Exception):  # of a rank that is dead: the barrier itself will say so
            others = [rank for rank in range(min(self._comm.size, _MOST_TOLD)) if rank != self.rank]
            self._told += [self._comm.Isend(bytearray(number), rank, _TAG) for rank in others]
        self._told = [request for request in self._told if not _is_done(request)]

    def missing(self) -> list[int]:
        """Return the ranks that have not told that they wait; none if this rank is not told."""
        self._hear()
        if self.rank >= _MOST_TOLD:
            return []
        return [rank for rank in range(self._comm.size) if not self._waits(rank) and rank != self.rank]

    def ahead(self) -> list[int]:
        """Return the ranks that have told that they wait in a barrier to which this one has not come."""
        self._hear()
        return sorted(rank for rank, number in self._reached.items() if number > self._number)

    def _hear(self) -> None:
        """Receive what other ranks have told."""
        number = bytearray(_NUMBER_BYTES)
        for rank in range(self._comm.size):
            with suppress(MPI.Exception):  # of a rank that is dead
                while self._comm.Iprobe(rank, _TAG):
                    self._comm.Recv(number, rank, _TAG)
                    self._taken[rank] += 1
                    self._reached[rank] = int.from_bytes(number, "little")

    def take_rest(self) -> None:
        """Receive what other ranks have told and this one has not read: MPICH fails to end with messages that no rank
        took. Collective, and no rank may have died."""
        told = self._comm.allgather(self._num_told)
        others = [rank for rank in range(self._comm.size) if rank != self.rank] if self.rank < _MOST_TOLD else []
        for rank in others:
            for _ in range(told[rank] - self._taken[rank]):
                self._comm.Recv(bytearray(_NUMBER_BYTES), rank, _TAG)
            self._taken[rank] = told[rank]

    def is_first(self, dead: Set[int]) -> bool:
        """Return whether no lower rank that lives has told that it waits, as far as `missing` has heard."""
        return not any(self._waits(rank) for rank in range(self.rank) if rank not in dead)

    def _waits(self, rank: int) -> bool:
        return self._reached.get(rank, 0) >= self._number


def roll_call_of(comm: MPI.Comm) -> RollCall:
    """Return the roll call of a communicator, which lasts as long as that: what was told in one training may be read in
    the next."""
    if not _keys:
        _keys.append(MPI.Comm.Create_keyval())
    call = comm.Get_attr(_keys[0])
    if not isinstance(call, RollCall):
        call = RollCall(comm)
        comm.Set_attr(_keys[0], call)
    return call


class _Wait(WaitForRanks):
    """A rank's wait in a barrier."""

    def __init__(self, call: RollCall, where: str | None, dead: Set[int], lock: AbstractContextManager[object]) -> None:
        super().__init__(call.rank, where)
        self._call, self._dead, self._lock = call, dead, lock

    def tell(self) -> None:
        with self._lock:
            self._call.tell()

    def missing(self) -> list[int]:
        with self._lock:
            missing = self._call.missing()
        return [rank for rank in missing if rank not in self._dead]

    def is_first(self) -> bool:
        return self._call.is_first(self._dead)


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True
