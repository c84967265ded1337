"""The common part of transports that move messages on whichever thread looks after them."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque

from pala.comm.base import Packet, Receiver, Transport
from pala.system.interrupt import Interrupt
from pala.system.waiting import wait_asleep

TICK_S = 0.1  # between two calls of `Receiver.on_tick`, if the thread looks as often
_ABANDON_S = 5.0  # a thread ends within its longest sleep, if nothing holds it


class ThreadedTransport(Transport):
    """Transport with outboxes. They are emptied between two steps of the learner (`poll`), or by the transport's own
    thread when the learner does not poll. What fails on that thread is raised again in the learner's."""

    def __init__(self, name: str, interrupt: Interrupt) -> None:
        """`interrupt`: signals that end its waits."""
        self.failure: BaseException | None = None
        self._receiver: Receiver
        self._name, self._interrupt = name, interrupt
        self._thread = threading.Thread()  # of the last `start`
        self._bulk_outbox: deque[tuple[int, Packet]] = deque()
        self._small_outbox: deque[tuple[int, Packet]] = deque()
        self._wake = threading.Event()
        self._ticked_s = 0.0
        self._closing = False
        self._is_abandoned = False
        self._num_pending = 0  # copies of packets that have not left
        self._polling = threading.Lock()
        self._counting = threading.Lock()

    def start(self, receiver: Receiver) -> None:
        """Report messages and deaths to `receiver` from now on, on the thread that polls; `on_tick` always on the
        transport's own."""
        self._receiver = receiver
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        """Return the time of a clock that runs while the host is suspended: a suspended rank has been away."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def poll(self) -> None:
        if self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def poll_soon(self) -> None:
        self._wake.set()

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        """Put the packet into an outbox; the next poll sends it."""
        with self._counting:
            packet.pending += 1
            self._num_pending += 1
        (self._bulk_outbox if bulk else self._small_outbox).append((peer, packet))

    def wait_until_sent(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        self.hurry(True)
        while self._num_pending > 0 and time.monotonic() < deadline and self._interrupt.signal is None:
            self.raise_failure()
            self.poll()
            time.sleep(0.001)
        self.hurry(False)

    def close(self, timeout_s: float) -> None:
        self.pause(timeout_s)
        self.free()

    def pause(self, timeout_s: float | None) -> None:
        self._closing = True
        self._wake.set()

        def closed() -> bool:
            self._thread.join(0.01)
            return not self._thread.is_alive()

        wait_asleep(closed, timeout_s, self._interrupt)
        self.raise_failure()

    def abandon(self) -> None:
        self._is_abandoned = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_ABANDON_S)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    @abstractmethod
    def _poll_until_closed(self) -> None:
        """Poll and sleep until the transport is closed or abandoned. Runs on the transport's thread."""

    def _tick(self) -> None:
        """Call the receiver's `on_tick` if it is due."""
        if (now_s := self.now_s()) > self._ticked_s + 0.9 * TICK_S:
            self._receiver.on_tick()
            self._ticked_s = now_s

    @abstractmethod
    def _poll(self) -> bool:
        """Look once at all sends and receives, with `_polling` held. Return True if something moved."""

    @abstractmethod
    def _send_now(self, peer: int, packet: Packet, bulk: bool) -> None:
        """Begin to send a packet to a peer."""

    def _has_left(self, packet: Packet) -> None:
        """Count a copy of the packet as left: the transport does not read its bytes for that copy any more."""
        with self._counting:  # another thread may be sending it to another peer
            packet.pending -= 1
            self._num_pending -= 1

    def _run(self) -> None:
        try:
            self._poll_until_closed()
        except BaseException as error:  # raised again in the learner's thread
            self.failure = error

    def _empty_outboxes(self) -> bool:
        """Begin to send every packet that may leave. Return True if there was one."""
        begun = False
        while self._small_outbox:
            self._send_now(*self._small_outbox.popleft(), bulk=False)
            begun = True
        while self._bulk_outbox and self._bulk_outbox[0][1].ready():
            self._send_now(*self._bulk_outbox.popleft(), bulk=True)
            begun = True
        return begun
