"""The data proxy: the one place that calls MPI between start-up and the end of training.

It moves bytes for its rank. The learner hands it what to send and goes on at once; what arrives is handed to
`on_message`. It never blocks inside MPI and never spins: the learner's thread lets it look after its messages between
two steps (`poll`, a microsecond when there is nothing), and a thread of its own does so when the learner does not, as
in a long step, while it waits, and at the end. A thread alone would cost more: each time that it wakes up beside a busy
learner takes 60 to 100 microseconds.

Every send is synchronous (`Issend`): it completes only when the peer has begun to receive, so that the non-blocking
barrier at the end (Hoefler et al. 2010, NBX) proves that nothing is left in flight.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from pala.errors import PalaError
from pala.exchange.protocol import Stop
from pala.runtime import Interrupt

_MODEL_TAG, _CONTROL_TAG = 1, 2
_HURRY_SLEEP_S, _BUSY_SLEEP_S, _IDLE_SLEEP_S = 0.0003, 0.002, 0.1


class Outgoing(Protocol):
    """A block of bytes that may still be under way from a GPU."""

    bytes: np.ndarray
    pending: int

    def ready(self) -> bool: ...


class Incoming(Protocol):
    """Where the next model is to be received."""

    @property
    def bytes(self) -> np.ndarray: ...


class _Receive(NamedTuple):
    """A message that is arriving."""

    request: MPI.Request
    source: int
    tag: int
    data: np.ndarray


class DataProxy(threading.Thread):
    """Sends and receives for one rank of `comm`, which it duplicates. Starting and closing are collective."""

    def __init__(self, comm: MPI.Comm, incoming: Incoming, on_message: Callable[[int, np.ndarray], None]) -> None:
        """Each model is received into what `incoming.bytes` then is; `on_message(source, bytes)` deals with it, on
        whichever thread polls."""
        super().__init__(name="pala-data-proxy", daemon=True)
        self.failure: BaseException | None = None
        self._hurry = False
        self._comm = comm.Dup()
        self._incoming, self._on_message = incoming, on_message
        self._outbox: deque[tuple[int, Outgoing]] = deque()
        self._control_outbox: deque[tuple[int, np.ndarray]] = deque()
        self._sends: list[tuple[MPI.Request, Outgoing | None]] = []
        self._receives: list[_Receive] = []  # at most one model
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

    def send_control(self, peer: int, data: np.ndarray) -> None:
        """Send a small message to `peer` with the next poll. Any thread."""
        self._control_outbox.append((peer, data))

    def close(self, timeout_s: float) -> None:
        """Receive what is still coming until every rank has closed. Collective.

        Raises PalaError if the others have not closed after `timeout_s` seconds.
        """
        self._closing = True
        self._wake.set()
        self.join(timeout_s)
        if self.is_alive():
            raise PalaError(
                f"Rank {self._comm.rank}: the other ranks did not end within {timeout_s:.0f} s of this one; the job "
                "ends here. This rank's checkpoint is written."
            )
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
        barrier: MPI.Request | None = None
        busy_s = _BUSY_SLEEP_S
        while True:
            with self._calling_mpi:
                moved = self._poll()
                if self._closing and barrier is None and not (self._outbox or self._control_outbox or self._sends):
                    barrier = self._comm.Ibarrier()
                if barrier is not None and barrier.Test():
                    self._comm.Free()
                    return
            busy_s = _BUSY_SLEEP_S if moved else min(2 * busy_s, _IDLE_SLEEP_S)  # the longer, the slower the link is
            sleep_s = busy_s if moved or self._receives else _IDLE_SLEEP_S
            self._wake.wait(_HURRY_SLEEP_S if self._hurry or self._closing else sleep_s)
            self._wake.clear()

    def _poll(self) -> bool:
        """One look at everything; True if something moved."""
        moved = self._start_sends()
        while self._start_receive() or self._complete_receives():
            moved = True
        moved |= self._start_sends()  # answers to what came
        for send in self._sends[:]:
            request, buffer = send
            if request.Test():
                self._sends.remove(send)
                moved = True
                if buffer is not None:
                    buffer.pending -= 1
        return moved

    def _start_receive(self) -> bool:
        """Begin to receive a message that has come; one model at a time."""
        receiving_model = any(receive.tag == _MODEL_TAG for receive in self._receives)
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG if receiving_model else MPI.ANY_TAG, status)
        if message is None:
            return False
        tag, count = status.Get_tag(), status.Get_count(MPI.BYTE)
        # A message of the wrong size is received all the same, so that it can be refused.
        fits = tag == _MODEL_TAG and count <= len(self._incoming.bytes)
        data = self._incoming.bytes[:count] if fits else np.empty(count, np.uint8)
        self._receives.append(_Receive(message.Irecv([data, MPI.BYTE]), status.Get_source(), tag, data))
        return True

    def _complete_receives(self) -> bool:
        completed = False
        for receive in self._receives[:]:
            if receive.request.Test():
                self._receives.remove(receive)
                self._on_message(receive.source, receive.data)
                completed = True
        return completed

    def _start_sends(self) -> bool:
        started = False
        while self._control_outbox:
            peer, data = self._control_outbox.popleft()
            self._sends.append((self._comm.Issend([data, MPI.BYTE], peer, _CONTROL_TAG), None))
            started = True
        while self._outbox and self._outbox[0][1].ready():
            peer, buffer = self._outbox.popleft()
            self._sends.append((self._comm.Issend([buffer.bytes, MPI.BYTE], peer, _MODEL_TAG), buffer))
            started = True
        return started


_PATIENCE_AFTER_SIGNAL_S = 10.0


def wait_quietly(request: MPI.Request, timeout_s: float | None, interrupt: Interrupt) -> None:
    """Wait for a request without spinning a core; after a signal, not for long. Raises PalaError when time is up."""
    begin, sleep_s = time.monotonic(), 1e-4
    signalled_at: float | None = None
    while not request.Test():
        now = time.monotonic()
        if interrupt.signal is not None and signalled_at is None:
            signalled_at = now
        if timeout_s is not None and now > begin + timeout_s:
            raise PalaError(f"The other ranks did not answer within {timeout_s:.0f} s; the job ends here.")
        if signalled_at is not None and now > signalled_at + _PATIENCE_AFTER_SIGNAL_S:
            raise PalaError("The other ranks did not end after the signal; this one's checkpoint is written.")
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, 0.01)


def agree_on_end(
    comm: MPI.Comm, stop: Stop, local_steps: int, timeout_s: float | None, interrupt: Interrupt
) -> tuple[Stop, list[int]]:
    """(why training ends: SIGNAL if it does for any rank, local steps of every rank, exactly). Collective."""
    mine, table = np.array([stop, local_steps], np.int64), np.empty((comm.size, 2), np.int64)
    wait_quietly(comm.Iallgather(mine, table), timeout_s, interrupt)
    return Stop(int(table[:, 0].max())), [int(steps) for steps in table[:, 1]]
