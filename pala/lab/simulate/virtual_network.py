"""A simulated network with a clock of its own: a transport for any number of ranks in one process. Pure.

No MPI, no threads, no waiting: a heap of events and one random stream. Packets are delayed and overtake each other, all
from the seed, so every run replays. What ranks do between messages is up to whoever uses the network
(`virtual_cluster.py`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from pala.comm.base import Packet, Received, Receiver, Transport
from pala.lab.simulate.scenario import Range, Scenario


class OnItsWay(NamedTuple):
    """A packet for one receiver."""

    sender: int
    receiver: int
    packet: Packet
    data: Any  # what it holds: a packet is filled again for others once it has left
    bulk: bool
    time_s: float  # when it was sent


class VirtualTransport(Transport):
    """One rank's end of the network."""

    def __init__(self, network: VirtualNetwork, rank: int) -> None:
        self._network, self._rank = network, rank

    def start(self, receiver: Receiver) -> None:
        self._network.receivers[self._rank] = receiver

    def now_s(self) -> float:
        return self._network.now

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        packet.pending += 1
        self._network.post(OnItsWay(self._rank, peer, packet, packet.data, bulk, self._network.now))


class VirtualNetwork:
    """Events in the order of time. Ranks are numbers here."""

    def __init__(self, scenario: Scenario) -> None:
        self.now = 0.0
        self.observe: Callable[[], None] | None = None  # called after each event
        self.receivers: dict[int, Receiver] = {}
        self.on_their_way: dict[int, OnItsWay] = {}
        self.scenario, self._random = scenario, random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_events = 0  # that were ever to happen

    def run(self, until_s: float = float("inf")) -> None:
        """Play until nothing more happens, or to a time."""
        events, observe = self._events, self.observe
        while events and events[0][0] <= until_s:
            self.now, _, handler, arguments = heapq.heappop(events)
            handler(*arguments)
            if observe is not None:
                observe()

    def notice(self, rank: int) -> None:
        """Take note that there is something new for this rank: a message, or a bulk packet that may be filled again."""

    # ---- packets -------------------------------------------------------------------------------------------------

    def post(self, on_its_way: OnItsWay) -> None:
        """Put a packet on its way."""
        ticket = self.num_events
        self.on_their_way[ticket] = on_its_way
        self._carry(ticket)

    def _carry(self, ticket: int) -> None:
        """See to it that the packet is delivered. `gossip.py` models links and cores here."""
        bulk = self.on_their_way[ticket].bulk
        self._after(self.scenario.model_s if bulk else self.scenario.control_s, self._deliver, ticket)

    def _deliver(self, ticket: int) -> None:
        on_its_way = self.on_their_way.pop(ticket)
        sender, packet = on_its_way.sender, on_its_way.packet
        assert packet.data is on_its_way.data, f"rank {sender} wrote over a message on its way"
        packet.pending -= 1
        if on_its_way.bulk:
            self.notice(sender)
        self._receive(on_its_way, self.now - on_its_way.time_s)

    def _receive(self, on_its_way: OnItsWay, took_s: float) -> None:
        sender, receiver = on_its_way.sender, on_its_way.receiver
        self.receivers[receiver].on_message(Received(sender, on_its_way.data, on_its_way.bulk, took_s))
        self.notice(receiver)

    # ---- the clock -----------------------------------------------------------------------------------------------

    def _draw(self, bounds: Range) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * self._random.random()

    def _at(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, self.num_events, handler, arguments))
        self.num_events += 1

    def _after(self, delay_s: Range, handler: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + self._draw(delay_s), handler, *arguments)
