"""Ranks as threads of one process, with faults by script: whole trainings in a second, without MPI.

A loop with `pala.Gossip` needs no more than `run_ranks`. Other trainings are given their rank:

    from pala.job.rank import run_rank
    from pala.job.request import Request
    from pala.testing.faults import drop, fail_at

    def main(comm):
        return run_rank(comm, Request(config))

    results = run_ranks(4, main, faults=[fail_at(2, update=10), drop(0, 1, n=3)])

The others survive the death of a rank, as under `mpirun --with-ft ulfm`. A rank that raises something is dead, unless
that is an EndError, by which it ends the job. No rank waits for one that has ended or returned.
"""

from __future__ import annotations

import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

from pala.comm.base import Communicator, Deaths, Reduction, SharedBlock, Survivors, Transport, rank_of_thread
from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.waiting import wait_asleep
from pala.testing.faults import Fault, ToRank
from pala.testing.memory_transport import Channel, MemoryTransport

T = TypeVar("T")
_LOOK_S = 0.1  # the most between two looks of who waits, at signals and at the time
_ROUNDS_KEPT = 2  # who joins a collective has completed the one before, which all have joined


class Killed(BaseException):
    """Raised in the threads of a rank that has died."""


class _MemberDiedError(Exception):
    """The error of a wait for a rank that is dead."""


def run_ranks(size: int, main: Callable[[MemoryCommunicator], T], faults: Iterable[Fault] = ()) -> list[Any]:
    """Call `main(comm)` for each rank on a thread of its own; return what each returned, or raised, by rank.

    `comm` has the rank's number, `comm.rank`, and the number of ranks, `comm.size`. A `pala.Gossip` inside `main` finds
    it by itself. `faults`: what happens to whom (`pala.testing.faults`); updates are counted by `after_update`. Torch's
    global random numbers are those of all threads: seed a `torch.Generator` by the rank.
    """
    world = _World(size, list(faults))
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            comm = MemoryCommunicator(world, rank)
            rank_of_thread.set(comm)
            results[rank] = main(comm)
            world.say_that(rank, world.ended)
        except BaseException as error:  # handed to the caller
            results[rank] = error
            world.say_that(rank, world.ended if isinstance(error, EndError) else world.dead)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass
class _Round:
    """One collective."""

    given: dict[int, Any] = field(default_factory=dict)  # rank -> what it brought
    members: list[int] | None = None  # of those who live: who took part, once it is decided


class _World:
    """State that all ranks see, under one lock."""

    def __init__(self, size: int, faults: list[Fault]) -> None:
        self.size, self.faults = size, faults
        self.changed = threading.Condition()
        self.dead: set[int] = set()
        self.ended: set[int] = set()
        self.stopped_until_s = [0.0] * size
        self.in_transport: set[int] = set()  # ranks whose transport's thread may be inside MPI, if this were MPI
        self._rounds: dict[tuple[Any, int], _Round] = {}

    @property
    def gone(self) -> set[int]:
        return self.dead | self.ended

    def say_that(self, rank: int, is_among: set[int]) -> None:
        with self.changed:
            is_among.add(rank)
            self.changed.notify_all()

    def join(self, context: Any, number: int, rank: int, value: Any) -> _Round:
        """Take part in the collective of this number among the ranks of this context."""
        with self.changed:
            self._rounds.pop((context, number - _ROUNDS_KEPT), None)
            round_ = self._rounds.setdefault((context, number), _Round())
            round_.given[rank] = value
            self.changed.notify_all()
        return round_

    def have_come(self, round_: _Round, ranks: Iterable[int]) -> bool:
        """Return whether all of `ranks` have come; raises _MemberDiedError if one never will."""
        with self.changed:
            missing = set(ranks).difference(round_.given)
            if missing & self.gone:
                raise _MemberDiedError(", ".join(map(str, sorted(missing & self.gone))))
            return not missing

    def living_in(self, round_: _Round) -> tuple[list[int], list[int]]:
        """Return the living ranks that have joined a collective of all, and those that have not."""
        with self.changed:
            living = [rank for rank in range(self.size) if rank not in self.gone]
        here = set(round_.given)
        return [rank for rank in living if rank in here], [rank for rank in living if rank not in here]

    def living_have_come(self, round_: _Round, ranks: Iterable[int]) -> bool:
        """Return whether the living of `ranks` have come. Which ones live is decided once, for all."""
        with self.changed:
            if round_.members is None and self.gone.issuperset(set(ranks).difference(round_.given)):
                round_.members = sorted(set(round_.given) - self.gone)
            return round_.members is not None

    def wait(self, done: Callable[[], bool], timeout_s: float | None, interrupt: Interrupt) -> None:
        def sleep(seconds: float) -> None:
            with self.changed:
                if not done():
                    self.changed.wait(_LOOK_S)

        wait_asleep(done, timeout_s, interrupt, sleep=sleep)


# ---- collectives -----------------------------------------------------------------------------------------------------


class _Group:
    """The ranks that take part in some collectives, as one rank sees them."""

    def __init__(self, comm: MemoryCommunicator, members: Sequence[int], context: Any) -> None:
        self.members = members
        self._comm = comm
        self._context = context
        self._number = 0

    def join(self, value: Any) -> _Round:
        self._comm.end_if_dead()
        self._comm.check_that_no_transport_is_open()
        self._number += 1
        return self._comm.world.join(self._context, self._number, self._comm.rank, value)

    def gather(self, value: Any, timeout_s: float | None, interrupt: Interrupt) -> list[Any]:
        """Return what each member gave; raises _MemberDiedError if one died before it gave something."""
        round_, world = self.join(value), self._comm.world
        world.wait(lambda: world.have_come(round_, self.members), timeout_s, interrupt)
        return [round_.given[rank] for rank in self.members]

    def gather_living(self, value: Any, timeout_s: float | None) -> dict[int, Any]:
        """Return what each member gave that lived when it was complete, by rank: the same for all."""
        round_, world = self.join(value), self._comm.world
        world.wait(lambda: world.living_have_come(round_, self.members), timeout_s, self._comm.interrupt)
        return {rank: round_.given[rank] for rank in round_.members or ()}


class _MemorySurvivors(Survivors):
    def __init__(self, comm: MemoryCommunicator, group: _Group, timeout_s: float | None) -> None:
        self.members = group.members
        self._group = group
        self._timeout_s = timeout_s
        self._interrupt = comm.interrupt

    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        array[...] = _reduced(self._group.gather(array.copy(), self._timeout_s, self._interrupt), how)


def _reduced(arrays: Sequence[np.ndarray], how: Reduction) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        (np.add if how == "sum" else np.maximum)(total, array, out=total)
    return total


class _MemoryDeaths(Deaths):
    def __init__(self, comm: MemoryCommunicator, of_transport: bool) -> None:
        self._comm = comm
        self._of_transport = of_transport
        self.ranks = set()

    def look(self) -> set[int]:
        self._comm.end_if_dead()
        if not self._of_transport:
            self._comm.check_that_no_transport_is_open()
        with self._comm.world.changed:
            fresh = self._comm.world.dead - self.ranks
        self.ranks |= fresh
        return fresh


class _Array(SharedBlock):
    def __init__(self, comm: MemoryCommunicator, data: np.ndarray) -> None:
        self._comm = comm
        self.data = data

    def fence(self) -> None:
        """Let a rank that is dead write nothing more; the interpreter's lock orders what its threads write."""
        self._comm.end_if_dead()


class MemoryCommunicator(Communicator):
    """The communicator of ranks that are threads. `interrupt` is this rank's: a test sets its `signal`, as the kernel
    would."""

    outlives_ranks = True  # a test may say otherwise, if it kills none

    def __init__(self, world: _World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.size = world.size
        self.host = platform.node()
        self.interrupt = Interrupt()
        self._all = _Group(self, range(world.size), "all")
        self._patient = Interrupt()  # never signalled: collectives at the start and the end wait for all ranks
        mine = [fault for fault in world.faults if isinstance(fault, ToRank) and fault.rank == rank]
        self._to_come = [fault for fault in mine if fault.when == "update"]

    # ---- faults --------------------------------------------------------------------------------------------------

    def on_count(self, updates: int) -> None:
        """Carry out what the script says of a rank after this many updates."""
        for fault in [fault for fault in self._to_come if updates >= fault.n]:
            self._to_come.remove(fault)
            fault.happens(self)

    def die(self) -> NoReturn:
        """Die as if killed, from any thread of this rank; the others end when they next communicate."""
        self.world.say_that(self.rank, self.world.dead)
        raise Killed

    def be_stopped_until(self, time_s: float) -> None:
        """Hold this thread and the transport's until that time (`time.monotonic`)."""
        self.world.stopped_until_s[self.rank] = time_s
        self.sleep_while_stopped()

    def sleep_while_stopped(self) -> None:
        """Sleep while the rank is suspended, for the transport's thread. A rank that is alone continues."""
        while (rest_s := self.world.stopped_until_s[self.rank] - time.monotonic()) > 0 and not self._has_nobody_left():
            time.sleep(min(rest_s, _LOOK_S))

    def end_if_dead(self) -> None:
        """Raise Killed if this rank is."""
        if self.rank in self.world.dead:
            raise Killed

    def check_that_no_transport_is_open(self) -> None:
        """Check that no transport is open: over MPI its thread may be inside a call, and one thread at a time is
        allowed there."""
        assert self.rank not in self.world.in_transport, "a transport is open: two threads would call MPI"

    # ---- the interface -------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._gather(None)

    def allgather(self, value: T) -> list[T]:
        return [pickle.loads(data) for data in self._gather(pickle.dumps(value))]

    def bcast(self, value: T, root: int = 0) -> T:
        return pickle.loads(self._gather(pickle.dumps(value) if self.rank == root else None)[root])

    def bcast_array(self, array: np.ndarray, root: int = 0) -> None:
        array[...] = self._gather(array.copy() if self.rank == root else None)[root]

    def first(self, size: int) -> MemoryCommunicator | None:
        if size == self.size:
            return self
        self.barrier()
        if self.rank >= size:
            return None
        part = MemoryCommunicator(self.world, self.rank)
        part.size, part.interrupt = size, self.interrupt
        part._all = _Group(part, range(size), ("first", size, self._all._number))
        return part

    def ibarrier(self) -> Callable[[], bool]:
        round_ = self._all.join(None)

        def all_are_here() -> bool:
            self.end_if_dead()
            try:
                return self.world.have_come(round_, self._all.members)
            except _MemberDiedError:
                self.deaths().end_if_any()
                raise

        return all_are_here

    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        array[...] = _reduced(self._gather(array.copy()), how)

    def with_survivors(self, action: Callable[[Survivors], T], timeout_s: float | None) -> T:
        while True:
            living = self._all.gather_living(None, timeout_s)
            group = _Group(self, list(living), ("living", self._all._number))
            try:
                result, whole = action(_MemorySurvivors(self, group, timeout_s)), True
            except _MemberDiedError:
                whole = False
            agreement = _Group(self, group.members, ("agreement", self._all._number))
            done = agreement.gather_living(whole, timeout_s)
            if list(done) == group.members and all(done.values()):
                return result

    def deaths(self, of_transport: bool = False) -> Deaths:
        return _MemoryDeaths(self, of_transport)

    def detach(self) -> None:
        self.world.say_that(self.rank, self.world.dead)

    def is_alone(self) -> bool:
        self.check_that_no_transport_is_open()
        return self._has_nobody_left()

    def _has_nobody_left(self) -> bool:
        with self.world.changed:
            return len(self.world.gone - {self.rank}) == self.size - 1

    def open_transport(self) -> Transport:
        channel = self._gather(Channel(self.size) if self.rank == 0 else None)[0]
        return MemoryTransport(self, channel)

    def share_memory(self, num_bytes: int, among: Sequence[int]) -> SharedBlock:
        first = among[0]
        return _Array(self, self._gather(np.zeros(num_bytes, np.uint8) if self.rank == first else None)[first])

    def facts(self) -> dict[str, Any]:
        return {"mpi": "none: ranks are threads of one process", "mpi_standard": [], "mpi_thread_level": None}

    def _gather(self, value: Any) -> list[Any]:
        try:
            return self._all.gather(value, None, self._patient)
        except _MemberDiedError as error:
            raise EndError(
                f"rank {self.rank}: rank {error} died while the job was starting or ending; start it again."
            ) from None
