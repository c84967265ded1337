"""A simulated network with a clock of its own: a transport for any number of ranks in one process. Pure.

No MPI, no threads, no waiting: a heap of events and one random stream. Packets are delayed, overtake each other, and
are lost with ranks that die, all from the seed, so every failure replays. What ranks do between messages is up to
whoever uses the network (`virtual_cluster.py`).
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
        self.dead: set[int] = set()
        self.receivers: dict[int, Receiver] = {}
        self.on_their_way: dict[int, OnItsWay] = {}
        self.delivering: OnItsWay | None = None  # what its receiver is being told of
        self.scenario, self._random = scenario, random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = 0

    @property
    def num_events(self) -> int:
        """Events that were ever to happen."""
        return self._ticket

    def run(self, until_s: float = float("inf")) -> None:
        """Play until nothing more happens, or to a time."""
        events, observe = self._events, self.observe
        while events and events[0][0] <= until_s:
            self.now, _, handler, arguments = heapq.heappop(events)
            handler(*arguments)
            if observe is not None:
                observe()

    # ---- what whoever uses it may add to -------------------------------------------------------------------------

    def sent(self, rank: int) -> None:
        """Take note that a bulk packet of this rank has left: it may be filled again."""

    def overwritten(self, on_its_way: OnItsWay) -> None:
        """Take note that its sender filled it again while it was on its way: real bytes would have been torn."""

    def heard(self, rank: int) -> None:
        """Take note that something has been told to this rank."""

    def lost(self, on_its_way: OnItsWay) -> None:
        """Take note that this will never arrive: its sender or its receiver is dead."""

    # ---- packets -------------------------------------------------------------------------------------------------

    def post(self, on_its_way: OnItsWay) -> None:
        """Put a packet on its way."""
        ticket = self._ticket
        self.on_their_way[ticket] = on_its_way
        self._carry(ticket)

    def _carry(self, ticket: int) -> None:
        """See to it that the packet is delivered. `gossip.py` models links and cores here."""
        bulk = self.on_their_way[ticket].bulk
        self._after(self.scenario.model_s if bulk else self.scenario.control_s, self._deliver, ticket)

    def _deliver(self, ticket: int) -> None:
        on_its_way = self.on_their_way.get(ticket)
        if on_its_way is None:  # lost with its sender
            return
        sender, receiver, packet, data, bulk, time_s = on_its_way
        begin_s, end_s = self.scenario.cut_s
        cut_at = self.scenario.cut_at
        if begin_s <= self.now < end_s and (sender < cut_at) != (receiver < cut_at):
            if ticket % 2:  # not even its announcement has come: nobody can tell how old it will be
                self.on_their_way[ticket] = on_its_way._replace(time_s=end_s)
            self._at(end_s + self._draw(self.scenario.control_s), self._deliver, ticket)
            return
        if self.is_stopped(receiver, self._deliver, ticket):
            return
        if bulk and ticket % 2 and self.is_stopped(sender, self._deliver, ticket):
            return  # some packets need their sender to the end, some do not
        del self.on_their_way[ticket]
        packet.pending -= 1
        if packet.data is not data:
            self.overwritten(on_its_way)
        if bulk:
            self.sent(sender)
        if receiver in self.dead:
            self.lost(on_its_way)
            return
        went_on_s = self.scenario.stops.get(receiver, (0.0, 0.0))[1]  # it cannot tell what came while it was stopped
        took_s = self.now - (went_on_s if time_s < went_on_s <= self.now else time_s)
        self.delivering = on_its_way
        self.receivers[receiver].on_message(Received(sender, data, bulk, took_s))
        self.heard(receiver)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def die(self, rank: int) -> None:
        """Kill a rank. Some of what it has sent is lost; the others hear of it after a while."""
        self.dead.add(rank)
        for ticket, on_its_way in list(self.on_their_way.items()):
            if on_its_way.sender == rank and self._random.random() < self.scenario.death_loss:
                del self.on_their_way[ticket]
                self.lost(on_its_way)
        for peer in range(self.scenario.size):
            if peer not in self.dead:
                self._after(self.scenario.death_notice_s, self._hear_of_death, peer, rank)

    def _hear_of_death(self, rank: int, dead: int) -> None:
        if rank not in self.dead:
            self.receivers[rank].on_death(dead)
            self.heard(rank)

    def is_stopped(self, rank: int, handler: Callable[..., None], *arguments: Any) -> bool:
        """Put a call off until the rank continues, if the rank is stopped now. A dead rank holds nothing up."""
        if rank in self.dead or not self.scenario.stops:
            return False
        begin_s, end_s = self.scenario.stops.get(rank, (0.0, 0.0))
        if stopped := begin_s <= self.now < end_s:
            self._at(end_s, handler, *arguments)
        return stopped

    # ---- the clock -----------------------------------------------------------------------------------------------

    def _draw(self, bounds: Range) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * self._random.random()

    def _at(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, self._ticket, handler, arguments))
        self._ticket += 1

    def _after(self, delay_s: Range, handler: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + self._draw(delay_s), handler, *arguments)
