"""A simulated rank's model: a small vector, without bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pala.comm.base import Received
from pala.exchange.gossip.driver import Models, Opened
from pala.exchange.wire import Message


class Sent(NamedTuple):
    """Content of a packet."""

    message: Message
    model: np.ndarray | None = None


class VectorPacket:
    """A message, and the copy of a model if it has one."""

    def __init__(self, data: Sent | None = None) -> None:
        self.data, self.pending = data, 0
        self.change: np.ndarray | None = None  # of an offer: what its answer differs by

    def ready(self) -> bool:
        return True


class VectorModels(Models):
    """A rank's model, and the weighted sum of those that came."""

    def __init__(self, model: np.ndarray) -> None:
        self.model = model
        self._opened = model
        self.inbox = np.zeros_like(model)
        self.inbox_weight = 0.0

    def new_snapshot(self) -> VectorPacket:
        return VectorPacket()

    def fill(self, snapshot: VectorPacket, message: Message, whole: bool) -> int:
        snapshot.data, snapshot.change = Sent(message, self.model.copy()), None
        return 0

    def fill_answer(self, snapshot: VectorPacket, message: Message, peer: int) -> int:
        return self.fill(snapshot, message, whole=True)

    def control(self, message: Message) -> VectorPacket:
        return VectorPacket(Sent(message))

    def open(self, received: Received, offer: VectorPacket | None = None) -> Opened:
        message, model = received.data
        if model is not None:
            self._opened = model
        return Opened(message)

    def add(self, weight: float) -> None:
        self.inbox = self.inbox + weight * self._opened
        self.inbox_weight += weight

    def clear(self) -> None:
        self.inbox = np.zeros_like(self.model)
        self.inbox_weight = 0.0

    def mix(self, own_weight: float, measure: bool) -> None:
        fraction = self.inbox_weight / (own_weight + self.inbox_weight)
        self._replace(self.model + fraction * (self.inbox / self.inbox_weight - self.model))

    def pull(self, fraction: float, measure: bool) -> None:
        self._replace(self.model + fraction * (self.inbox - self.inbox_weight * self.model))

    def keep(self, offer: VectorPacket) -> None:
        assert offer.data is not None and offer.data.model is not None
        offer.change = self._opened - offer.data.model

    def move(self, offer: VectorPacket, fraction: float) -> None:
        assert offer.change is not None, "an offer moves this rank's model only when it was answered"
        self.model = self.model + fraction * offer.change

    def heal(self) -> None:
        self._replace(self.inbox / self.inbox_weight)

    def _replace(self, model: np.ndarray) -> None:
        """Take this for the rank's model: all that came is in it."""
        self.model = model
        self.clear()
