"""The data proxy: the one place that calls MPI between start-up and the end of training.

It moves bytes for its rank. The learner hands it what to send and goes on at once; what arrives is handed to
`on_message`. It never blocks inside MPI and never spins: the learner's thread lets it look after its messages between
two steps (`poll`, a microsecond when there is nothing), and a thread of its own does so when the learner does not, as
in a long step, while it waits, and at the end. A thread alone would cost more: each time that it wakes up beside a busy
learner takes 60 to 100 microseconds.

Every send is synchronous (`Issend`): it completes only when the peer has begun to receive, so that the non-blocking
barrier at the end (Hoefler et al. 2010, NBX) proves that nothing is left in flight.

A peer that dies takes what is under way to and from it along; whoever asked for it hears of the death (`on_death`). A
peer that stops while it sends a model would keep the others' from coming in: after a while that model gets a block of
its own, and is too late when it comes.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from pala.system.runtime import Interrupt
from pala.transport.faults import Barrier, Deaths, is_death, wait_quietly

_MODEL_TAG, _CONTROL_TAG = 1, 2
_HURRY_SLEEP_S, _BUSY_SLEEP_S, _IDLE_SLEEP_S = 0.0003, 0.002, 0.1


class Outgoing(Protocol):
    """A block of bytes that may still be under way from a GPU."""

    bytes: np.ndarray
    pending: int

    def ready(self) -> bool: ...


@dataclass
class Block:
    """Bytes that are ready to be sent."""

    bytes: np.ndarray
    pending: int = 0  # copies that have not left

    def ready(self) -> bool:
        return True


class Incoming(Protocol):
    """Where the next model is to be received."""

    @property
    def bytes(self) -> np.ndarray: ...

    def give_up_block(self) -> None: ...


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
    buffer: Outgoing

    def done(self) -> None:
        self.buffer.pending -= 1


class DataProxy(threading.Thread):
    """Sends and receives for one rank of `comm`, which it duplicates. Starting and closing are collective."""

    def __init__(
        self, comm: MPI.Comm, incoming: Incoming | None, on_message: Callable[[int, np.ndarray, float, bool], None],
        on_death: Callable[[int], None], on_tick: Callable[[], None], patience_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Each model is received into what `incoming.bytes` then is (None: nobody sends models); `on_message(source,
        bytes, seconds that it took, whether it is too late)` and `on_death(rank)` are called on whichever thread polls,
        `on_tick()` ten times a second on this one. A model that has taken more than `patience_s()` seconds when the
        next one comes is too late, and no more in `incoming.bytes`."""
        super().__init__(name="pala-data-proxy", daemon=True)
        self.failure: BaseException | None = None
        self._hurry = False
        self._comm = comm.Dup()
        self._deaths = Deaths(self._comm)
        self._incoming, self._on_message, self._on_death = incoming, on_message, on_death
        self._on_tick, self._patience_s = on_tick, patience_s
        self._outbox: deque[tuple[int, Outgoing]] = deque()
        self._control_outbox: deque[tuple[int, Block]] = deque()
        self._sends: list[_Send] = []
        self._receives: list[_Receive] = []  # at most one model that is not too late
        self._wake = threading.Event()
        self._closing = False
        self._calling_mpi = threading.Lock()

    def poll(self) -> None:
        """Move on what there is to send and to receive; at once. The learner's thread, without the exchange's lock."""
        if self._calling_mpi.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._calling_mpi.release()

    def hurry(self, waiting: bool) -> None:
        """Whether the learner is waiting for a message. Any thread."""
        self._hurry = waiting
        if waiting:
            self._wake.set()

    def send_model(self, peer: int, buffer: Outgoing) -> None:
        """Send `buffer.bytes` to `peer` with the next poll; `buffer.pending` falls by one when they have left. Any
        thread."""
        buffer.pending += 1
        self._outbox.append((peer, buffer))

    def send_control(self, peer: int, data: np.ndarray) -> Block:
        """Send a message of its own memory to `peer` with the next poll; `pending` of what is returned is 0 when it has
        left. Any thread."""
        block = Block(data, pending=1)
        self._control_outbox.append((peer, block))
        return block

    def close(self, timeout_s: float, interrupt: Interrupt) -> None:
        """Receive what is still coming until every rank that lives has closed. Collective.

        Raises EndError if the others have not closed after `timeout_s` seconds, or soon after a signal.
        """
        self._closing = True
        self._wake.set()

        def closed() -> bool:
            self.join(0.01)
            return not self.is_alive()

        wait_quietly(closed, timeout_s, interrupt)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise in the caller's thread what ended this one."""
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        """The thread: poll and sleep until closed."""
        try:
            self._poll_until_closed()
        except BaseException as error:  # raised again in the learner's thread
            self.failure = error

    def _poll_until_closed(self) -> None:
        barrier: Barrier | None = None
        busy_s, ticked_s = _BUSY_SLEEP_S, 0.0
        while True:
            if (now_s := time.monotonic()) > ticked_s + 0.9 * _IDLE_SLEEP_S:
                self._on_tick()
                ticked_s = now_s
            with self._calling_mpi:
                moved = self._poll()
                if self._closing and barrier is None and not (self._outbox or self._control_outbox or self._sends):
                    barrier = Barrier(self._comm)
                if barrier is not None and barrier.done():
                    if not self._deaths.ranks:  # it would have to be freed by all
                        self._comm.Free()
                    return
            busy_s = _BUSY_SLEEP_S if moved else min(2 * busy_s, _IDLE_SLEEP_S)  # the longer, the slower the link is
            sleep_s = busy_s if moved or self._receives else _IDLE_SLEEP_S
            self._wake.wait(_HURRY_SLEEP_S if self._hurry or self._closing else sleep_s)
            self._wake.clear()

    def _poll(self) -> bool:
        """One look at everything; True if something moved."""
        for rank in self._deaths.look():
            self._on_death(rank)
        moved = self._start_sends()
        while self._start_receive() or self._complete_receives():
            moved = True
        moved |= self._start_sends()  # answers to what came
        for send in self._sends[:]:
            if _test(send.request) is not _Fate.UNDER_WAY:  # a dead peer needs it no more
                self._sends.remove(send)
                moved = True
                send.done()
        return moved

    def _start_receive(self) -> bool:
        """Begin to receive a message that has come; one model at a time."""
        coming = next((r for r in self._receives if r.tag == _MODEL_TAG and not r.too_late), None)
        may_come = coming is None or time.monotonic() - coming.begin_s > self._patience_s()
        status = MPI.Status()
        try:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG if may_come else _CONTROL_TAG, status)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            return False  # it can be acknowledged at the next look
        if message is None:
            return False
        tag, count = status.Get_tag(), status.Get_count(MPI.BYTE)
        data = self._memory_for(tag, count, coming)
        try:
            request = message.Irecv([data, MPI.BYTE])
        except MPI.Exception as error:
            if not is_death(error):
                raise
            return False
        self._receives.append(_Receive(request, status.Get_source(), tag, data, time.monotonic()))
        return True

    def _memory_for(self, tag: int, count: int, coming: _Receive | None) -> np.ndarray:
        """Where a message goes. One of the wrong size is received all the same, so that it can be refused."""
        if tag == _MODEL_TAG and self._incoming is not None:
            if coming is not None:
                coming.too_late = True
                self._incoming.give_up_block()
            if count <= len(self._incoming.bytes):
                return self._incoming.bytes[:count]
        return np.empty(count, np.uint8)

    def _complete_receives(self) -> bool:
        completed = False
        incomplete: set[int] = set()  # sources whose messages after one that is still coming must wait for it:
        for receive in self._receives[:]:  # MPI keeps the order in which they begin, not that in which they end
            if receive.source in incomplete:
                continue
            fate = _test(receive.request)
            if fate is _Fate.UNDER_WAY and receive.tag == _CONTROL_TAG:
                incomplete.add(receive.source)
            if fate is not _Fate.UNDER_WAY:
                self._receives.remove(receive)
                completed = True
            if fate is _Fate.DONE:
                took_s = time.monotonic() - receive.begin_s
                self._on_message(receive.source, receive.data, took_s, receive.too_late)
        return completed

    def _start_sends(self) -> bool:
        started = False
        while self._control_outbox:
            peer, block = self._control_outbox.popleft()
            self._send(peer, block, _CONTROL_TAG)
            started = True
        while self._outbox and self._outbox[0][1].ready():
            peer, buffer = self._outbox.popleft()
            self._send(peer, buffer, _MODEL_TAG)
            started = True
        return started

    def _send(self, peer: int, buffer: Outgoing, tag: int) -> None:
        try:
            self._sends.append(_Send(self._comm.Issend([buffer.bytes, MPI.BYTE], peer, tag), buffer))
        except MPI.Exception as error:
            if not is_death(error):
                raise
            _Send(MPI.REQUEST_NULL, buffer).done()


class _Fate(enum.Enum):
    UNDER_WAY, DONE, LOST = range(3)


def _test(request: MPI.Request) -> _Fate:
    """What has become of it; LOST with a peer that died."""
    try:
        return _Fate.DONE if request.Test() else _Fate.UNDER_WAY
    except MPI.Exception as error:
        if not is_death(error):
            raise
        return _Fate.LOST
