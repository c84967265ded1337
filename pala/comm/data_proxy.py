"""The data proxy: with gossip and Gorila the one place that calls MPI between start-up and the end of training.

It moves bytes for its rank. The learner hands it what to send and continues at once; what arrives is handed to the
`Receiver`. It never blocks inside MPI and never spins. The learner's thread lets it look after its messages between two
steps: `poll`, a microsecond when there is nothing. A thread of its own does so when the learner does not, as in a long
step, while it waits, and at the end. A thread alone would cost more: each time that it wakes up beside a busy learner
takes 60 to 100 microseconds.

Every send is synchronous (`Issend`): it completes only when the peer has begun to receive, so that the non-blocking
barrier at the end (Hoefler et al. 2010, NBX) proves that nothing is left in flight.

A peer that dies takes what is under way to and from it along; the receiver hears of the death. A peer that stops while
it sends a model would keep the others' from coming in: after a while that model gets to keep its memory, and is too
late when it comes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from pala.comm.base import Meeting, Packet, Received
from pala.comm.roll_call import RollCall
from pala.comm.threaded import TICK_S, ThreadedTransport
from pala.comm.ulfm import Barrier, MpiDeaths, is_death
from pala.system.interrupt import Interrupt

_BULK_TAG, _SMALL_TAG = 1, 2
_MOST_BYTES = 2**30  # that are counted one by one
_MOST_AT_ONCE = 32  # messages that are taken in between two looks at what is to be sent
_HURRY_SLEEP_S = 0.0003
_BUSY_SLEEP_S = 0.002
_CLOSING_SLEEP_S = 0.01
_IDLE_SLEEP_S = TICK_S


@dataclass
class _Receive:
    """A message that is arriving."""

    request: MPI.Request
    source: int
    tag: int
    data: np.ndarray
    begin_s: float
    too_late: bool = False


class _Send(NamedTuple):
    """A message that is leaving."""

    request: MPI.Request
    packet: Packet


class DataProxy(ThreadedTransport):
    """Sends and receives for one rank of `comm`, which it duplicates. `roll_call`: that of `comm`."""

    def __init__(self, comm: MPI.Comm, roll_call: RollCall, interrupt: Interrupt) -> None:
        super().__init__("pala-data-proxy", interrupt)
        self._hurry = False
        self._comm, self._roll_call = comm.Dup(), roll_call
        self._deaths = MpiDeaths(self._comm, polls=False)
        self._sends: list[_Send] = []
        self._receives: list[_Receive] = []  # at most one bulk message that is not too late

    def hurry(self, waiting: bool) -> None:
        self._hurry = waiting
        if waiting:
            self._wake.set()

    def meeting(self, where: str | None) -> Meeting:
        with self._polling:
            barrier = Barrier(self._comm)

        def have_come() -> bool:
            with self._polling:
                return barrier.done()

        return Meeting(have_come, self._roll_call.wait(where, self._deaths.ranks, self._polling))

    def free(self) -> None:
        if not self._deaths.ranks:  # it would have to be freed by all
            self._comm.Free()

    def _poll_until_closed(self) -> None:
        barrier: Barrier | None = None
        busy_s = _BUSY_SLEEP_S
        while not self._is_abandoned:
            self._tick()
            with self._polling:
                moved = self._poll()
                # Until all are here a rank may still have to hear of the end: a death that is heard of now leaves this
                # rank to tell whom the dead one should have told.
                if self._closing and barrier is None and not (self._bulk_outbox or self._small_outbox or self._sends):
                    barrier = Barrier(self._comm)
                if barrier is not None and not self._receives and barrier.done():  # a send is done when it is met
                    return
            busy_s = _BUSY_SLEEP_S if moved else min(2 * busy_s, _IDLE_SLEEP_S)  # the longer, the slower the link is
            sleep_s = busy_s if moved or self._receives else _IDLE_SLEEP_S
            if self._closing:  # the longer, the slower the others are
                sleep_s = min(busy_s, _CLOSING_SLEEP_S)
            self._wake.wait(_HURRY_SLEEP_S if self._hurry else sleep_s)
            self._wake.clear()

    def _poll(self) -> bool:
        self._report_deaths()
        moved = self._empty_outboxes()
        moved |= self._take_in()
        moved |= self._empty_outboxes()  # answers to what came
        for send in self._sends[:]:
            if (fate := _test(send.request)) is not _Fate.UNDER_WAY:  # a dead peer needs it no more
                self._sends.remove(send)
                moved = True
                if fate is _Fate.LOST:
                    self._report_deaths()  # at once: a rank that has sent its last news must not count on the dead
                self._has_left(send.packet)
        return moved

    def _take_in(self) -> bool:
        """Receive up to 32 messages, then let sends proceed: a fast sender must not starve this rank's own sends.

        Return True if any arrived. What is under way has no limit: peers that stop in the midst would use it up."""
        for turn in range(_MOST_AT_ONCE):
            if not (self._start_receive() or self._complete_receives()):
                return turn > 0
        self._complete_receives()
        return True

    def _report_deaths(self) -> None:
        for rank in self._deaths.look():
            self._receiver.on_death(rank)

    def _start_receive(self) -> bool:
        """Begin to receive a message that has come; one bulk message at a time. Return True if there was one."""
        coming = next((r for r in self._receives if r.tag == _BULK_TAG and not r.too_late), None)
        may_come = coming is None or self.now_s() - coming.begin_s > self._receiver.patience_s
        status = MPI.Status()
        try:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG if may_come else _SMALL_TAG, status)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            return False  # it can be acknowledged at the next look
        if message is None:
            return False
        tag, count = status.Get_tag(), status.Get_elements(MPI.BYTE)
        data = self._memory_for(tag, count, coming)
        try:
            with _countable(data) as buffer:
                request = message.Irecv(buffer)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            return False
        self._receives.append(_Receive(request, status.Get_source(), tag, data, self.now_s()))
        return True

    def _memory_for(self, tag: int, count: int, coming: _Receive | None) -> np.ndarray:
        """Return memory for a message. A message of the wrong size is received, too, so that it can be rejected."""
        if tag == _BULK_TAG:
            if coming is not None:
                coming.too_late = True
                self._receiver.give_up_memory()
            memory = self._receiver.memory_for(count)
            if memory is not None:
                return memory[:count]
        return np.empty(count, np.uint8)

    def _complete_receives(self) -> bool:
        """Hand over the messages that have come whole, in their senders' order. Return True if there was one."""
        completed = False
        incomplete: set[int] = set()  # sources whose messages after one that is still coming must wait for it:
        for receive in self._receives[:]:  # MPI keeps the order in which they begin, not that in which they end
            if receive.source in incomplete:
                continue
            fate = _test(receive.request)
            if fate is _Fate.UNDER_WAY and receive.tag == _SMALL_TAG:
                incomplete.add(receive.source)
            if fate is not _Fate.UNDER_WAY:
                self._receives.remove(receive)
                completed = True
            if fate is _Fate.DONE:
                took_s = self.now_s() - receive.begin_s
                bulk = receive.tag == _BULK_TAG
                self._receiver.on_message(Received(receive.source, receive.data, bulk, took_s, receive.too_late))
        return completed

    def _send_now(self, peer: int, packet: Packet, bulk: bool) -> None:
        try:
            with _countable(packet.data) as buffer:
                request = self._comm.Issend(buffer, peer, _BULK_TAG if bulk else _SMALL_TAG)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            self._has_left(packet)
        else:
            self._sends.append(_Send(request, packet))


@contextmanager
def _countable(data: np.ndarray) -> Iterator[tuple[np.ndarray, int, MPI.Datatype]]:
    """Give the bytes as MPI takes them. Open MPI 5.0 counts to 2 GiB (it has no `MPI_Issend_c`), so a larger message is
    one element of a type of its own."""
    if len(data) <= _MOST_BYTES:
        yield data, len(data), MPI.BYTE
        return
    num_blocks, rest = divmod(len(data), _MOST_BYTES)
    block = MPI.BYTE.Create_contiguous(_MOST_BYTES)
    whole = MPI.Datatype.Create_struct([num_blocks, rest], [0, num_blocks * _MOST_BYTES], [block, MPI.BYTE]).Commit()
    try:
        yield data, 1, whole
    finally:
        block.Free()
        whole.Free()  # what is under way keeps it


class _Fate(enum.Enum):
    """Fates of a send or a receive."""

    UNDER_WAY, DONE, LOST = range(3)


def _test(request: MPI.Request) -> _Fate:
    """Return the fate of a send or receive; LOST if its peer has died."""
    try:
        return _Fate.DONE if request.Test() else _Fate.UNDER_WAY
    except MPI.Exception as error:
        if not is_death(error):
            raise
        return _Fate.LOST
