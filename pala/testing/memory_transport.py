"""Messages between ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pala.comm.base import Meeting, Packet, Received, Receiver
from pala.comm.threaded import TICK_S, ThreadedTransport
from pala.system.waiting import WaitForRanks
from pala.testing.faults import OnTheWay, ToRank

if TYPE_CHECKING:
    from pala.testing.memory import MemoryCommunicator


@dataclass(eq=False)
class _Message:
    source: int
    peer: int
    data: np.ndarray  # a copy
    bulk: bool
    packet: Packet
    taken: bool = False  # by the peer, or lost


class Channel:
    """State that the transports of all ranks share, which were opened together."""

    def __init__(self, size: int) -> None:
        self.mailboxes: list[deque[_Message]] = [deque() for _ in range(size)]
        self.wakes = [threading.Event() for _ in range(size)]
        self.closings = Counter[int]()  # by rank: how often it has closed or paused

    def close(self, rank: int) -> None:
        self.closings[rank] += 1
        for wake in self.wakes:
            wake.set()


class _Wait(WaitForRanks):
    """A rank's wait in a meeting, at which all threads see who has come."""

    def __init__(self, rank: int, where: str | None, living: Callable[[], tuple[list[int], list[int]]]) -> None:
        """`living`: returns the living ranks that have come, and those that have not."""
        super().__init__(rank, where)
        self._living = living

    def tell(self) -> None:
        """Tell nothing: the others see it."""

    def missing(self) -> list[int]:
        return self._living()[1]

    def is_first(self) -> bool:
        return self._living()[0][:1] == [self._rank]


class MemoryTransport(ThreadedTransport):
    """Moves messages between threads: at once, if the receiving rank's learner polls or its thread wakes up."""

    def __init__(self, comm: MemoryCommunicator, channel: Channel) -> None:
        super().__init__(f"pala-memory-{comm.rank}", comm.interrupt)
        self._comm = comm
        self._world = comm.world
        self._rank = comm.rank
        self._channel = channel
        self._deaths, self._wake = comm.deaths(of_transport=True), channel.wakes[comm.rank]
        self._sends: list[_Message] = []  # on their way
        self._num_closings, self._num_meetings = 0, 0  # begun
        self._num_sent, self._num_bulk = 0, Counter[int]()  # messages; bulk messages by peer

    def start(self, receiver: Receiver) -> None:
        self._world.in_transport.add(self._rank)
        super().start(receiver)

    def meeting(self, where: str | None) -> Meeting:
        self._num_meetings += 1
        round_ = self._world.join(self._channel, self._num_meetings, self._rank, None)

        def have_come() -> bool:
            self._comm.end_if_dead()
            return self._world.living_have_come(round_, range(self._world.size))

        return Meeting(have_come, _Wait(self._rank, where, lambda: self._world.living_in(round_)))

    def pause(self, timeout_s: float | None) -> None:
        self._num_closings += 1
        super().pause(timeout_s)
        self._world.in_transport.discard(self._rank)

    def abandon(self) -> None:
        super().abandon()
        self._world.in_transport.discard(self._rank)

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        self._comm.end_if_dead()
        super().send(peer, packet, bulk)
        self._wake.set()

    def poll(self) -> None:
        self._comm.end_if_dead()
        super().poll()

    def hurry(self, waiting: bool) -> None:
        self._comm.end_if_dead()

    def _poll_until_closed(self) -> None:
        while not self._is_abandoned:
            self._comm.sleep_while_stopped()
            self._comm.end_if_dead()
            if self._rank in self._world.ended:  # by an EndError: its process would be gone
                return
            self._tick()
            with self._polling:
                moved = self._poll()
                on_their_way = any(message.peer not in self._world.ended for message in self._sends)
                nothing_left = not (self._bulk_outbox or self._small_outbox or on_their_way)
                if self._closing and nothing_left and self._channel.closings[self._rank] < self._num_closings:
                    self._channel.close(self._rank)
                if self._closing and self._all_have_closed():
                    return
            if not moved:
                self._wake.wait(TICK_S)
                self._wake.clear()

    def _all_have_closed(self) -> bool:
        open_ = [rank for rank in range(self._world.size) if self._channel.closings[rank] < self._num_closings]
        return self._world.gone.issuperset(open_)

    def _poll(self) -> bool:
        for rank in self._deaths.look():
            self._receiver.on_death(rank)
        moved = self._empty_outboxes()
        mailbox = self._channel.mailboxes[self._rank]
        while mailbox:
            self._receive(mailbox.popleft())
            moved = True
        moved |= self._empty_outboxes()  # answers to what came
        for message in [m for m in self._sends if m.taken or m.peer in self._deaths.ranks]:
            self._sends.remove(message)
            self._has_left(message.packet)
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

    def _send_now(self, peer: int, packet: Packet, bulk: bool) -> None:
        self._num_sent += 1
        for fault in self._world.faults:
            if isinstance(fault, ToRank) and fault[:3] == (self._rank, "message", self._num_sent):
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
        """Carry out what the script says of a bulk message."""
        moment = (self._rank, message.peer, self._num_bulk[message.peer])
        for fault in self._world.faults:
            if isinstance(fault, OnTheWay) and (fault.sender, fault.receiver, fault.n) == moment:
                arrives = fault.becomes(message.data)
                message.taken = arrives is None
                message.data = message.data if arrives is None else arrives
