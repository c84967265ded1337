"""Messages between ranks that are threads of one process."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pala.system.runtime import Interrupt
from pala.system.waiting import wait_quietly
from pala.transport.base import Packet, Received, Receiver, Transport
from pala.transport.faults import AtMessage, OnTheWay

if TYPE_CHECKING:
    from pala.transport.memory import MemoryCommunicator

_TICK_S = 0.1


@dataclass(eq=False)
class _Message:
    source: int
    peer: int
    data: np.ndarray  # a copy
    bulk: bool
    packet: Packet
    taken: bool = False  # by the peer, or lost


class Channel:
    """What the transports of all ranks share, which were opened together."""

    def __init__(self, size: int) -> None:
        self.mailboxes: list[deque[_Message]] = [deque() for _ in range(size)]
        self.wakes = [threading.Event() for _ in range(size)]
        self.closed: set[int] = set()  # ranks from which nothing more will come

    def close(self, rank: int) -> None:
        self.closed.add(rank)
        for wake in self.wakes:
            wake.set()


class MemoryTransport(Transport):
    """Moves messages between threads: at once, if the receiving rank's learner polls or its thread wakes up."""

    def __init__(self, comm: MemoryCommunicator, channel: Channel) -> None:
        self.failure: BaseException | None = None
        self._comm, self._world, self._rank, self._channel = comm, comm.world, comm.rank, channel
        self._receiver: Receiver
        self._thread = threading.Thread(target=self._run, name=f"pala-memory-{comm.rank}", daemon=True)
        self._deaths, self._wake = comm.deaths(), channel.wakes[comm.rank]
        self._bulk_outbox: deque[tuple[int, Packet]] = deque()
        self._small_outbox: deque[tuple[int, Packet]] = deque()
        self._sends: list[_Message] = []  # on their way
        self._num_sent, self._num_bulk = 0, Counter[int]()  # messages; bulk messages by peer
        self._closing = False
        self._polling = threading.Lock()

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread.start()

    def now_s(self) -> float:
        return time.monotonic()

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        self._comm.end_if_dead()
        packet.pending += 1
        (self._bulk_outbox if bulk else self._small_outbox).append((peer, packet))
        self._wake.set()

    def poll(self) -> None:
        self._comm.end_if_dead()
        if self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def hurry(self, waiting: bool) -> None:
        self._comm.end_if_dead()

    def close(self, timeout_s: float, interrupt: Interrupt) -> None:
        self._closing = True
        self._wake.set()

        def closed() -> bool:
            self._thread.join(0.01)
            return not self._thread.is_alive()

        wait_quietly(closed, timeout_s, interrupt)
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._deliver_until_closed()
        except BaseException as error:  # raised again in the learner's thread
            self.failure = error

    def _deliver_until_closed(self) -> None:
        ticked_s = 0.0
        while True:
            self._comm.sleep_while_stopped()
            self._comm.end_if_dead()
            if (now_s := time.monotonic()) > ticked_s + 0.9 * _TICK_S:
                self._receiver.on_tick()
                ticked_s = now_s
            with self._polling:
                moved = self._poll()
                nothing_left = not (self._bulk_outbox or self._small_outbox or self._sends)
                if self._closing and nothing_left and self._rank not in self._channel.closed:
                    self._channel.close(self._rank)
                if self._closing and self._channel.closed | self._world.gone >= set(range(self._world.size)):
                    return
            if not moved:
                self._wake.wait(_TICK_S)
                self._wake.clear()

    def _poll(self) -> bool:
        """One look at everything; True if something moved."""
        for rank in self._deaths.look():
            self._receiver.on_death(rank)
        moved = self._send_all()
        mailbox = self._channel.mailboxes[self._rank]
        while mailbox:
            self._receive(mailbox.popleft())
            moved = True
        moved |= self._send_all()  # answers to what came
        for message in [m for m in self._sends if m.taken or m.peer in self._deaths.ranks]:
            self._sends.remove(message)
            message.packet.pending -= 1
            moved = True
        return moved

    def _receive(self, message: _Message) -> None:
        message.taken = True
        self._channel.wakes[message.source].set()
        if message.source in self._deaths.ranks:
            return
        memory = self._receiver.memory_for(len(message.data)) if message.bulk else None
        data = message.data
        if memory is not None:
            data = memory[: len(message.data)]
            data[:] = message.data
        self._receiver.on_message(Received(message.source, data, message.bulk, 0.0))

    def _send_all(self) -> bool:
        sent = False
        while self._small_outbox:
            self._send(*self._small_outbox.popleft(), bulk=False)
            sent = True
        while self._bulk_outbox and self._bulk_outbox[0][1].ready():
            self._send(*self._bulk_outbox.popleft(), bulk=True)
            sent = True
        return sent

    def _send(self, peer: int, packet: Packet, bulk: bool) -> None:
        self._num_sent += 1
        for fault in self._world.faults:
            if isinstance(fault, AtMessage) and (fault.rank, fault.n) == (self._rank, self._num_sent):
                fault.happens(self._comm)
        message = _Message(self._rank, peer, packet.data.copy(), bulk, packet)
        self._sends.append(message)
        if bulk:
            self._num_bulk[peer] += 1
            self._meet_faults(message)
        if not message.taken:
            self._channel.mailboxes[peer].append(message)
            self._channel.wakes[peer].set()

    def _meet_faults(self, message: _Message) -> None:
        """What the script says of a bulk message."""
        moment = (self._rank, message.peer, self._num_bulk[message.peer])
        for fault in self._world.faults:
            if isinstance(fault, OnTheWay) and (fault.sender, fault.receiver, fault.n) == moment:
                arrives = fault.becomes(message.data)
                message.taken = arrives is None
                message.data = message.data if arrives is None else arrives
