"""Deaths of ranks as MPI reports them: fault tolerance by ULFM.

Under `mpirun --with-ft ulfm` (Open MPI 5) a rank's death does not end the job: what the others have to do with it fails
with MPI_ERR_PROC_FAILED, and they can agree without it. Without ULFM the launcher ends the job, and `--resume`
continues it.

ULFM: Bland et al., "Post-failure recovery of MPI communication capability", 2013; MPI 5.0 draft, chapter 17.
"""

from __future__ import annotations

from array import array

from mpi4py import MPI

from pala.comm.base import Deaths
from pala.system.launcher import can_survive


def is_death(error: BaseException) -> bool:
    """Return True if an MPI call failed because a rank that it needed is dead."""
    if not can_survive() or not isinstance(error, MPI.Exception):
        return False
    return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class MpiDeaths(Deaths):
    """The deaths among the ranks of an MPI communicator."""

    def __init__(self, comm: MPI.Comm, polls: bool = True) -> None:
        """Watch `comm`. `polls`: each look calls MPI's progress, for MPI hears of deaths only then; False where another
        caller does."""
        self._comm, self._polls = comm, polls
        self.ranks: set[int] = set()

    def look(self) -> set[int]:
        """Return the ranks that died since the last look, and acknowledge them: receives from any source continue
        without them. Without `polls` a look that finds none takes a fifth of a microsecond."""
        if not can_survive():
            return set()
        if self._polls:
            self._poll()
        group = self._comm.Get_failed()
        try:
            if group.size == len(self.ranks):
                return set()
            self._comm.Ack_failed(group.size)
            everyone = MPI.Group.Translate_ranks(group, list(range(group.size)), self._comm.group)
        finally:
            group.Free()
        fresh = set(everyone) - self.ranks
        self.ranks |= fresh
        return fresh

    def _poll(self) -> None:
        try:
            self._comm.Iprobe()
        except MPI.Exception as error:
            if not is_death(error):
                raise


class Barrier:
    """A barrier without the dead, which a rank can wait for asleep, by `done`. Making one is collective."""

    def __init__(self, comm: MPI.Comm, holds: bool = True) -> None:
        """Begin the barrier. `holds`: a fact about this rank; `everywhere` then tells whether it holds on all."""
        self._flag, self._died = array("i", [int(holds)]), False
        # An agreement completes when all who live take part in it.
        self._request = comm.Iagree(self._flag) if can_survive() else comm.Ibarrier()

    def done(self) -> bool:
        """Return True when all living ranks have come."""
        try:
            return self._request.Test()
        except MPI.Exception as error:
            if not is_death(error):
                raise
            self._died = True  # a rank died before the barrier was complete: it is complete all the same
            return True

    @property
    def everywhere(self) -> bool:
        """True if no rank had died when the barrier was done and all ranks said that it holds; the same on all."""
        return bool(self._flag[0]) and not self._died
