"""A simulated rank's model: a small vector, without bytes, and what is known from outside of how it is mixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pala.comm.base import Received
from pala.exchange.gossip.driver import Models, Opened
from pala.exchange.wire import NOT_FINITE, Format, Message
from pala.lab.simulate.virtual_network import VirtualNetwork


class Sent(NamedTuple):
    """Content of a packet."""

    message: Message
    model: np.ndarray | None = None


def is_finite(model: np.ndarray) -> bool:
    """Return whether all numbers are finite, in one pass: a sum is only if every term is."""
    return math.isfinite(np.add.reduce(model))


class VectorPacket:
    """A message, and the copy of a model if it has one."""

    def __init__(self, data: Sent | None = None) -> None:
        self.data, self.pending = data, 0
        self.change: np.ndarray | None = None  # of an offer: what its answer differs by
        self.heals = 0  # of its rank, when it was filled

    def ready(self) -> bool:
        return True


class VectorModels(Models):
    """A rank's model: a vector, without bytes; and what is known of its mixes from outside."""

    def __init__(
        self, model: np.ndarray, network: VirtualNetwork, stopped: tuple[float, float], keeps_own: Callable[[], bool]
    ) -> None:
        """Begin with a `model`. `stopped`: begin and end of the time in which the rank is stopped; `keeps_own`: whether
        it afterwards continues with its own old model, since there is no fresher one."""
        self.model = model
        self._network = network
        self._stopped = stopped
        self._keeps_own = keeps_own
        self.mixes = 0
        self.oldest_mixed_s = 0.0  # greatest age of a model when it was mixed, but for time in which its own aged, too
        self.faults: list[str] = []  # what must not be done with models
        self.heals = 0
        self.owed: dict[VectorPacket, np.ndarray] = {}  # offers that were answered -> the moves due to them
        self.unmatched = np.zeros_like(model)  # by which this rank alone has moved, or its peers alone have
        self._opened: tuple[np.ndarray, Message | None, float] = (model, None, 0.0)
        self.inbox = np.zeros_like(model)
        self.inbox_weight = 0.0
        self.inbox_whole = False
        self.inbox_from_s = float("inf")  # when the oldest model in it was sent

    def new_snapshot(self) -> VectorPacket:
        return VectorPacket()

    def fill(self, snapshot: VectorPacket, message: Message, whole: bool) -> int:
        snapshot.data = Sent(message if whole else message._replace(format=Format.TOP_K), self.model.copy())
        snapshot.change, snapshot.heals = None, self.heals
        self.owed.pop(snapshot, None)
        return 0

    def fill_answer(self, snapshot: VectorPacket, message: Message, peer: int) -> int:
        return self.fill(snapshot, message, whole=True)

    def control(self, message: Message) -> VectorPacket:
        return VectorPacket(Sent(message))

    def open(self, received: Received, offer: VectorPacket | None = None) -> Opened:
        message, model = received.data
        if model is None:
            return Opened(message)
        assert self._network.delivering is not None
        self._opened = model, message, self._network.delivering.time_s
        return Opened(message, None if is_finite(model) else NOT_FINITE)

    def add(self, weight: float) -> None:
        model, message, time_s = self._opened
        self.inbox = self.inbox + weight * model
        self.inbox_weight += weight
        self.inbox_whole |= message is not None and message.format.is_whole
        self.inbox_from_s = min(self.inbox_from_s, time_s)

    def clear(self) -> None:
        self.inbox = np.zeros_like(self.model)
        self.inbox_weight = 0.0
        self.inbox_whole = False
        self.inbox_from_s = float("inf")

    def mix(self, own_weight: float, measure: bool) -> None:
        fraction = self.inbox_weight / (own_weight + self.inbox_weight)
        self._replace(self.model + fraction * (self.inbox / self.inbox_weight - self.model))

    def pull(self, fraction: float, measure: bool) -> None:
        self._replace(self.model + fraction * (self.inbox - self.inbox_weight * self.model))

    def keep(self, offer: VectorPacket) -> None:
        assert offer.data is not None and offer.data.model is not None
        model, message, _ = self._opened
        if message is None or message.round != offer.data.message.round:
            self.faults.append("took the answer to another offer")
        offer.change = model - offer.data.model

    def move(self, offer: VectorPacket, fraction: float) -> None:
        assert offer.change is not None, "an offer moves this rank's model only when it was answered"
        if offer.heals < self.heals:
            self.faults.append("moved by what its model was before it was healed")
        self.owed.pop(offer, None)
        self._become(self.model + fraction * offer.change)

    def heal(self) -> None:
        if not self.inbox_whole:
            self.faults.append("was healed by a part of a model")
        self.heals += 1
        if self._network.now >= self._stopped[0]:
            self._stopped = 0.0, 0.0  # its own model is no excuse
        old = self.model
        self._replace(self.inbox / self.inbox_weight)
        self.unmatched += self.model - old
        for offer in list(self.owed):
            self.take_for_lost(offer)

    def owe(self, offer: VectorPacket, move: np.ndarray) -> None:
        """Note the move that is due since a peer has answered this rank's offer, and moved."""
        self.owed[offer] = move
        if offer.heals < self.heals:
            self.take_for_lost(offer)

    def take_for_lost(self, offer: VectorPacket | None) -> None:
        """Give up the move due to this offer, if there is one."""
        if offer in self.owed:
            self.unmatched -= self.owed.pop(offer)

    def _replace(self, model: np.ndarray) -> None:
        self._become(model)
        age_s = self._network.now - self.inbox_from_s
        begin_s, end_s = self._stopped
        if self._network.now >= end_s > begin_s:  # the first since it continues
            age_s -= (end_s - begin_s) if self._keeps_own() else 0.0
            self._stopped = 0.0, 0.0
        self.oldest_mixed_s = max(self.oldest_mixed_s, age_s)
        self.clear()

    def _become(self, model: np.ndarray) -> None:
        self.mixes += 1
        self.model = model
