"""What MPI says of ranks that died, and collectives among those that live: fault tolerance by ULFM.

Under `mpirun --with-ft ulfm` (Open MPI 5) a rank's death does not end the job: what the others have to do with it fails
with MPI_ERR_PROC_FAILED, and they can agree without it. Without ULFM the launcher ends the job, and `--resume` goes on.

ULFM: Bland et al., "Post-failure recovery of MPI communication capability", 2013; MPI 5.0 draft, chapter 17.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from pala.system.errors import EndError
from pala.system.runtime import Interrupt, can_survive, say

T = TypeVar("T")

_PATIENCE_AFTER_SIGNAL_S = 10.0
_COMPLAIN_AFTER_S = 60.0


def is_death(error: BaseException) -> bool:
    """True if an MPI call failed because a rank that it needed is dead."""
    return can_survive() and isinstance(error, MPI.Exception) and error.Get_error_class() in (
        MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED,
    )  # fmt: skip


class Deaths:
    """Which ranks of a communicator have died, as far as this rank has been told. Not collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._can_survive = comm, can_survive()
        self.ranks: set[int] = set()

    def look(self) -> set[int]:
        """Ranks that died since the last look (a fifth of a microsecond when there are none). They are acknowledged:
        receives from any source go on without them."""
        if not self._can_survive:
            return set()
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

    def end_if_any(self) -> None:
        """For an exchange that needs every rank: raise EndError if one has died."""
        if self._can_survive:
            try:
                self._comm.Iprobe()  # MPI hears of deaths only while it is called
            except MPI.Exception as error:
                if not is_death(error):
                    raise
        self.look()
        if self.ranks:
            raise EndError(
                f"Rank {', '.join(map(str, sorted(self.ranks)))} has died, and this 'exchange.kind' cannot go on "
                "without it; the job ends here. Go on from the last checkpoint by `--resume`."
            )


class Barrier:
    """A barrier that is waited for asleep, by `done`, and that does not wait for the dead. Making one is collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._flag = np.ones(1, np.int32)
        # An agreement completes when all who live take part in it.
        self._request = comm.Iagree(self._flag) if can_survive() else comm.Ibarrier()

    def done(self) -> bool:
        """True when all who live have come."""
        try:
            return self._request.Test()
        except MPI.Exception as error:
            if is_death(error):  # somebody died before it was complete: it is complete all the same
                return True
            raise


def wait_quietly(
    done: Callable[[], bool], timeout_s: float | None, interrupt: Interrupt, longest_sleep_s: float = 0.01,
    what: str = "",
) -> None:  # fmt: skip
    """Wait without spinning a core; after a signal, not for long. Raises EndError when time is up.

    If it takes long, says again and again that it waits for `what`, if that is given.
    """
    begin, sleep_s = time.monotonic(), 1e-4
    complain_at = begin + _COMPLAIN_AFTER_S if what else math.inf
    signalled_at: float | None = None
    while not done():
        now = time.monotonic()
        if interrupt.signal is not None and signalled_at is None:
            signalled_at = now
        if now > complain_at:
            say(f"{what}: has waited for it for {now - begin:.0f} s")
            complain_at = now + _COMPLAIN_AFTER_S
        if timeout_s is not None and now > begin + timeout_s:
            raise EndError(
                f"The other ranks did not answer within {timeout_s:.0f} s; the job ends here. This rank's checkpoint "
                "is written: go on by `--resume`."
            )
        if signalled_at is not None and now > signalled_at + _PATIENCE_AFTER_SIGNAL_S:
            raise EndError(
                "The other ranks did not end within 10 s of the signal; go on from the last checkpoint by `--resume`."
            )
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)


def among_the_living(
    comm: MPI.Comm, action: Callable[[MPI.Comm], T], timeout_s: float | None, interrupt: Interrupt
) -> T:
    """`action(communicator of those who live)`, in which it may communicate; if one dies meanwhile, all do it again
    without it. Collective, for all who live. Raises EndError when the others do not come within `timeout_s`."""
    while True:
        wait_quietly(Barrier(comm).done, timeout_s, interrupt)  # asleep: what follows would spin
        if not can_survive():
            return action(comm)
        living = comm.Shrink()
        try:
            result, whole = action(living), True
        except MPI.Exception as error:
            if not is_death(error):
                raise
            living.Revoke()  # nobody waits in the action for somebody who has left it
            whole = False
        try:
            agreed = bool(living.Agree(int(whole)))
        except MPI.Exception as error:
            if not is_death(error):
                raise
            agreed = False
        living.Free()
        if agreed:
            return result
