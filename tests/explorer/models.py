"""A model of the explorer: no parameters, but whether they are finite and fresh; and what must not be done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from explorer.states import CURRENT, Letter
from pala.comm.base import Packet, Received
from pala.exchange.gossip.driver import Models, Opened
from pala.exchange.gossip.messages import Kind
from pala.exchange.wire import NOT_FINITE, Format, Message, Refusal


class SymbolicPacket:
    """A message, and to whom it has not left yet; of an offer, too, what is known of its answer."""

    def __init__(self, letter: Letter | None = None) -> None:
        self.data, self.pending = letter, 0
        self.to: list[tuple[int, Kind]] = []
        self.answer: Any = None
        self.before_heal = False

    def ready(self) -> bool:
        return True


class SymbolicModels(Models):
    """A rank's model: whether it is finite and fresh, who is in the inbox, and what one event did with them."""

    def __init__(self, finite: bool, old: bool, inbox: dict[int, Letter]) -> None:
        self.finite, self.old, self.inbox = finite, old, inbox
        self.offered: Callable[[], list[SymbolicPacket]] = list  # the open offers
        self._opened = (-1, Letter(Kind.STOP))
        self.faults: list[str] = []
        self.mixes, self.healed = 0, False
        self.moved: list[SymbolicPacket] = []
        self._answered: dict[int, Any] = {}  # the fractions

    def new_snapshot(self) -> Packet:
        return SymbolicPacket()

    def fill(self, snapshot: SymbolicPacket, message: Message, whole: bool) -> int:
        if snapshot.pending:
            self.faults.append("wrote over a message on its way")
        if self.offered().count(snapshot) > (message.kind is Kind.OFFER):
            self.faults.append("wrote over an open offer")
        snapshot.data = _letter(message)._replace(whole=whole, finite=self.finite, old=False)
        snapshot.answer, snapshot.before_heal = None, False
        return 0

    def fill_answer(self, snapshot: SymbolicPacket, message: Message, peer: int) -> int:
        if peer not in self.inbox:
            self.faults.append("answered an offer after it had moved, or that it has not")
        self._answered[peer] = message.weight
        return self.fill(snapshot, message, whole=True)

    def control(self, message: Message) -> Packet:
        return SymbolicPacket(_letter(message))

    def open(self, received: Received, offer: Any = None) -> Opened:
        if received.data is None:
            return Opened(None, Refusal("it cannot be read"))
        letter: Letter
        sender, letter, size = received.data
        self._opened = sender, letter
        steps = np.array(letter.steps_by_rank or (0,) * size, np.uint64)
        format_ = Format.FLOAT32 if letter.whole else Format.TOP_K
        message = Message(letter.kind, sender, letter.number, letter.weight, letter.stop, steps, format_)
        if not letter.bulk or received.too_late:
            return Opened(message)
        return Opened(message, None if letter.finite else NOT_FINITE)

    def add(self, weight: float) -> None:
        sender, letter = self._opened
        if sender in self.inbox:
            self.faults.append(f"counts rank {sender} twice")
        if letter.kind is Kind.ANSWER:
            self.faults.append("sum of all models: took an answer for an offer")
        self.inbox[sender] = letter._replace(weight=weight)

    def clear(self) -> None:
        self.inbox.clear()

    def mix(self, own_weight: float, measure: bool) -> None:
        if not self.inbox:
            self.faults.append("mixed nothing")
        self._take(mixes=True)

    def pull(self, fraction: float, measure: bool) -> None:
        if self._answered != dict.fromkeys(self.inbox, fraction):
            self.faults.append("sum of all models: moved otherwise than it answered")
        self._answered = {}
        self._take(mixes=True)

    def keep(self, offer: SymbolicPacket) -> None:
        if self._opened[1].number != CURRENT:
            self.faults.append("took the answer to another offer")
        offer.answer = self._opened[1].weight

    def move(self, offer: SymbolicPacket, fraction: float) -> None:
        assert offer.answer is not None, "an offer moves this rank's model only when it was answered"
        if offer.before_heal:
            self.faults.append("moved by what its model was before it was healed")
        if offer.answer != fraction:
            self.faults.append("sum of all models: moved by another fraction than its peer")
        if offer in self.moved:
            self.faults.append("sum of all models: moved twice")
        self.moved.append(offer)
        self.mixes += 1

    def heal(self) -> None:
        if not any(letter.whole for letter in self.inbox.values()):
            self.faults.append("was healed by a part of a model")
        self.finite = self.healed = True
        for offer in self.offered():
            offer.before_heal = True
        self._take()

    def _take(self, mixes: bool = False) -> None:
        """Take the inbox into the model; `mixes`: and not in its place."""
        letters = self.inbox.values()
        if not all(letter.finite for letter in letters):
            self.faults.append("poison was mixed")
        if any(letter.old for letter in letters):
            self.faults.append("stale: took what was sent while it was away")
        if mixes and self.old:
            self.faults.append("stale: mixed its own model of before it was away")
        self.old = False
        self.mixes += 1
        self.inbox.clear()


def _letter(message: Message) -> Letter:
    steps = tuple(int(s) for s in message.steps_by_rank)
    return Letter(Kind(message.kind), message.round, message.weight, message.stop, steps if any(steps) else ())
