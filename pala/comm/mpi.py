"""The communicator of an MPI job's ranks. `mpi_process.py` starts MPI before this is loaded.

MPI's blocking collectives spin while they wait. Ranks come at unlike times, and where they share cores those that wait
would take the time of those that are waited for; so all come together asleep first.

`ulfm.py` has what ranks do when one of them dies.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI

from pala.comm.base import Communicator, Deaths, Reduction, SharedBlock, Survivors, Transport
from pala.comm.mapped_file import share
from pala.comm.roll_call import roll_call_of
from pala.comm.ulfm import Barrier, MpiDeaths, is_death
from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.launcher import can_survive
from pala.system.waiting import wait_asleep

if TYPE_CHECKING:  # not loaded yet when MPI starts: see `resources.prepare`
    import numpy as np

T = TypeVar("T")
_BEGIN_S = 60.0  # for a thread to begin
_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}


class _Survivors(Survivors):
    def __init__(self, comm: MpiCommunicator, living: MPI.Comm, timeout_s: float | None) -> None:
        """`living`: MPI's communicator of those ranks of `comm` that live."""
        self._living, self._timeout_s, self._interrupt = living, timeout_s, comm.interrupt
        ranks = MPI.Group.Translate_ranks(living.group, list(range(living.size)), comm.mpi.group)
        self.members: Sequence[int] = sorted(ranks)

    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        request = self._living.Iallreduce(MPI.IN_PLACE, array, _OPERATIONS[how])
        wait_asleep(request.Test, self._timeout_s, self._interrupt)


class MpiCommunicator(Communicator):
    """Communication between all ranks of an mpi4py communicator, `mpi`."""

    def __init__(self, comm: MPI.Comm, interrupt: Interrupt | None = None) -> None:
        self.mpi = comm
        self.rank = comm.rank
        self.size = comm.size
        self.host = MPI.Get_processor_name()
        self.interrupt = interrupt or Interrupt()
        self._roll_call = roll_call_of(comm)

    def barrier(self) -> None:
        wait_asleep(self.mpi.Ibarrier().Test, None, self.interrupt, wait=self._roll_call.wait())

    def allgather(self, value: T) -> list[T]:
        self.barrier()
        return self.mpi.allgather(value)

    def bcast(self, value: T, root: int = 0) -> T:
        self.barrier()
        return self.mpi.bcast(value, root)

    def bcast_array(self, array: np.ndarray, root: int = 0) -> None:
        self.barrier()
        self.mpi.Bcast(array, root)

    def first(self, size: int) -> MpiCommunicator | None:
        if size == self.size:
            return self
        self.barrier()
        part = self.mpi.Split(0 if self.rank < size else MPI.UNDEFINED, self.rank)
        return MpiCommunicator(part, self.interrupt) if self.rank < size else None

    def ibarrier(self) -> Callable[[], bool]:
        with self._ending_at_a_death():
            request = self.mpi.Ibarrier()

        def all_are_here() -> bool:
            with self._ending_at_a_death():
                return request.Test()

        return all_are_here

    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        with self._ending_at_a_death():
            self.mpi.Allreduce(MPI.IN_PLACE, array, _OPERATIONS[how])

    def with_survivors(self, action: Callable[[Survivors], T], timeout_s: float | None) -> T:
        while True:
            wait_asleep(Barrier(self.mpi).done, timeout_s, self.interrupt)  # asleep: what follows would spin
            living = self._shrink(timeout_s)
            try:
                result, whole = action(_Survivors(self, living, timeout_s)), True
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                living.Revoke()  # no rank waits in the action for one that has left it
                whole = False
            # Asleep again: in the action some may have much to do, and others nothing.
            end = Barrier(living, whole)
            wait_asleep(end.done, timeout_s, self.interrupt)
            if living is not self.mpi:
                living.Free()
            if end.everywhere:
                return result

    def _shrink(self, timeout_s: float | None) -> MPI.Comm:
        """Return a communicator of the living ranks, which all have just come; this one where no rank outlives another.

        Shrinking blocks, and Open MPI 5.0 has no other way: a thread does it, so that the others hear signals though a
        rank is stopped in just that moment."""
        if not can_survive():
            return self.mpi
        shrunken: Future[MPI.Comm] = Future()
        has_begun: Future[None] = Future()

        def shrink() -> None:
            has_begun.set_result(None)
            try:
                shrunken.set_result(self.mpi.Shrink())
            except BaseException as error:  # whatever it is, the thread that waits must hear of it
                shrunken.set_exception(error)

        try:
            # Not `Thread.start`, which waits without a limit for a thread that may have no memory to begin.
            _thread.start_new_thread(shrink, ())
        except RuntimeError as error:
            raise EndError(
                f"[rank {self.rank}] cannot look which ranks live: {error}. Continue from the newest checkpoint."
            ) from None
        wait_asleep(has_begun.done, _BEGIN_S, self.interrupt)
        wait_asleep(shrunken.done, timeout_s, self.interrupt)
        return shrunken.result()

    def deaths(self) -> Deaths:
        return MpiDeaths(self.mpi)

    @property
    def num_dead(self) -> int:
        """Number of ranks known to be dead here; 0 where no rank would outlive them. Not collective."""
        return self.mpi.Get_failed().size if can_survive() else 0

    @property
    def outlives_ranks(self) -> bool:
        return can_survive()

    def is_alone(self) -> bool:
        return not can_survive() or self.num_dead == self.size - 1

    def open_transport(self) -> Transport:
        from pala.comm.data_proxy import DataProxy

        self.barrier()
        return DataProxy(self.mpi, self._roll_call, self.interrupt)

    def share_memory(self, num_bytes: int, among: Sequence[int]) -> SharedBlock:
        return share(self, num_bytes, among)

    def facts(self) -> dict[str, Any]:
        return {
            "mpi": MPI.Get_library_version().strip("\0").splitlines()[0],
            "mpi_standard": list(MPI.Get_version()),
            "mpi_thread_level": MPI.Query_thread(),
        }

    @contextmanager
    def _ending_at_a_death(self) -> Iterator[None]:
        """Raise EndError for an MPI call inside that failed because a rank has died."""
        try:
            yield
        except MPI.Exception as error:
            if is_death(error):
                self.deaths().end_if_any()
            raise
