"""Gossip by models that go one way, each answered by a credit once it was mixed: `uniform` and `push_sum`. Pure."""

from __future__ import annotations

from collections.abc import Callable

from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import WITHOUT_MODEL, Action, GoOn, Kind, SendModel, Wait
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState
from pala.exchange.wire import Message


class OneWay(GossipProtocol):
    """A rank sends what it owes, then mixes what has come."""

    kinds = (Kind.MODEL, *WITHOUT_MODEL)

    def advance(self, s: GossipState, now_s: float, can_send: Callable[[], bool] = lambda: True) -> list[Action]:
        self.clock(s, now_s)
        actions = self._send_owed(s, can_send)
        if self.must_wait(s):
            return [*actions, *self._drop_parts(s), *self._ask(s), Wait()]
        self._begin_update(s)
        if self.mix_is_due(s):
            actions += self._mix(s, give_credit=True)
        return [*actions, GoOn()]

    def _send_owed(self, s: GossipState, can_send: Callable[[], bool]) -> list[Action]:
        """Send the model to the peers that are owed it and whose lock is free."""
        if not s.owed or s.budget.stop is not Stop.NONE or not s.has_model:
            return []
        peers = tuple(dict.fromkeys(peer for peer in s.owed if s.lock.is_free(peer)))
        if not peers:
            return []
        if not can_send():
            s.counts["sends_without_buffer"] += not s.has_put_off
            s.has_put_off = True
            return []
        whole = self._sends_whole(s, *peers)
        for peer in peers:
            s.lock.acquire(peer, s.now_s)
            s.owed.remove(peer)
        s.weight = self._mixing.share(s.weight, len(peers))
        return [SendModel(self._message(s, Kind.MODEL, s.weight), peers, whole)]

    def _take_in(self, s: GossipState, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        if message.kind is Kind.MODEL:
            if message.sender in s.to_mix:
                return self._second_model_came(s, message)
            return self._model_came(s, message, took_s, late, rejected)
        if message.kind in (Kind.CREDIT, Kind.ASK_WHOLE):
            self._credit_came(s, message.sender, wants_whole=message.kind is Kind.ASK_WHOLE)
        return []

    def _second_model_came(self, s: GossipState, message: Message) -> list[Action]:
        """Refuse a second model before the first was mixed: its sender held one credit too many, as from a message that
        was damaged on its way. The first model's credit covers both."""
        s.counts["models_refused"] += 1
        s.weight = self._mixing.gained(s.weight, message.weight)
        return []
