"""The paired exchange: two ranks move towards each other by the same amount, so that nothing learned is taken back.

A plain average mixes a rank's new model with a peer's older one, and so undoes a part of the rank's last step. Here the
two moves of a pair cancel in the sum of all models, however late they are made. Between rank A and rank B:

      A, whose model is x                              B, whose model is y
    1 offer: send a copy s of x, and keep s   ─ s ─▶     learn on, until its update ends
      learn on: x changes, s does not         ◀─ y ─   2 answer: send y, and move: y <- y + f (s - y)
    3 adopt: x <- x + f (y - s)                          learn on

B moves by f (s - y), A by the opposite, f (y - s). A adopts a *difference* of models that were sent, so what it learned
since stays. If B has k offers to answer, it answers all of them, with f = 1 / (1 + k): one alone moves both half-way.

| event at a rank | what it does | in the code |
|---|---|---|
| its update ends | adopts the answers that came; answers the offers that came; makes the next offer | `advance` |
| an offer comes | holds it until its update ends, or refuses it | `_offer_came` |
| an answer comes | keeps y - s until its update ends; the offer is closed | `_answer_came` |
| a refusal (any credit) comes | closes the offer: neither rank moves | `_refused` |

Every rank offers and answers, and learns on meanwhile; it waits only where `max_staleness` says so. It has one open
offer (beside those to peers that are `silent`), and every offer gets one reply, which frees the process lock. If A and
B offer to each other at once, the lower rank refuses, as its own offer will do. A rank that takes a model in place of
its own makes its open offers *void*: their answers belong to a model that is gone.

Which offers are refused and why, what can change the sum, and pairs in step (`max_staleness` 0): docs/architecture.md,
"Pairs". Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import (
    CREDITS,
    WITHOUT_MODEL,
    Action,
    Clear,
    Close,
    GoOn,
    Keep,
    Kind,
    Move,
    Pull,
    SendControl,
    SendModel,
    Wait,
)
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState, Offer, Rules
from pala.exchange.wire import Message

MOST_FRACTION = 0.5  # of an answer, to one offer or more
ANY = 0  # number in a refusal that means whichever offer is open; the first offer is number 1


class Paired(GossipProtocol):
    """The transitions of a rank that exchanges by pairs: adopt what was answered, answer what was offered, offer."""

    kinds = (Kind.OFFER, Kind.ANSWER, *WITHOUT_MODEL)

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._in_step = rules.in_step

    # ---- events --------------------------------------------------------------------------------------------------

    def update_finished(self, s: GossipState, now_s: float, steps: int, healthy: bool = True) -> list[Action]:
        if self._in_step:
            s.only_late_answers = True
            s.offers = {peer: offer._replace(of_earlier_update=True) for peer, offer in s.offers.items()}
        return super().update_finished(s, now_s, steps, healthy)

    def advance(self, s: GossipState, now_s: float, can_send: Callable[[], bool] = lambda: True) -> list[Action]:
        self.clock(s, now_s)
        actions = self._adopt(s)
        if self.must_wait(s):
            return [*actions, *self._offer(s), *self._drop_parts(s), *self._ask(s), Wait()]
        self._begin_update(s)
        if self.mix_is_due(s):
            actions += self._mix(s, give_credit=True)
        return [*actions, *self._offer(s), GoOn()]

    def is_idle(self, s: GossipState) -> bool:
        may_go_on = s.has_model and s.staleness < self.rules.max_staleness
        return may_go_on and self._waits_for_reply(s) and not (s.to_mix or s.answers or s.leavers)

    def unreadable_model_came(self, s: GossipState, sender: int) -> list[Action]:
        """Take note of what was an offer or the answer to one; neither is open any more."""
        if sender not in s.to_mix:
            return super().unreadable_model_came(s, sender) + self._close(s, sender)
        s.counts["models_refused"] += 1  # its offer has come, so this was its answer
        return self._close(s, sender)

    def finish(self, s: GossipState) -> list[Action]:
        """Move by the answers that came; both models of an offer without an answer stay as they are."""
        if s.has_model:
            s.to_mix.clear()
            return [*self._adopt(s), Clear()]
        return super().finish(s)

    # ---- offers --------------------------------------------------------------------------------------------------

    def _waits_for_reply(self, s: GossipState) -> bool:
        """Return whether an offer is open that forbids another."""
        return any(peer not in s.silent for peer in s.offers)

    def _offer(self, s: GossipState) -> list[Action]:
        """Send the model to the peer of this round, or one that waits to heal, which will answer."""
        if s.budget.stop is not Stop.NONE or not s.has_model:
            return []
        if self._in_step and s.staleness == 0:  # this update's exchange is made
            s.owed = [peer for peer in s.owed if peer in s.wants_whole]
        if not s.owed or self._waits_for_reply(s):
            return []
        peers = sorted(s.owed, key=lambda peer: peer not in s.wants_whole)
        peer = next((peer for peer in peers if s.lock.is_free(peer)), None)
        if peer is None:
            return []
        s.owed.clear()
        s.lock.acquire(peer, s.now_s)
        s.offers[peer] = Offer(s.round)
        return [SendModel(self._message(s, Kind.OFFER), (peer,), self._sends_whole(s, peer))]

    def _take_in(self, s: GossipState, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender = message.sender
        if message.kind is Kind.OFFER:
            return self._offer_came(s, message, took_s, late, rejected)
        offer = s.offers.get(sender)
        if message.kind is Kind.ANSWER:
            if offer is not None and message.round == offer.number:
                rejected |= message.weight > MOST_FRACTION
                return self._answer_came(s, sender, message.weight, offer, usable=not (late or rejected))
            s.counts["models_refused"] += 1
            return []
        if offer is not None and message.kind in CREDITS and message.round in (offer.number, ANY):
            self._credit_came(s, sender, wants_whole=message.kind is Kind.ASK_WHOLE)
            s.refusing.add(sender)
            return self._refused(s, sender, peer_has_offered=self._in_step and message.kind is Kind.CROSSED)
        return []

    def _offer_came(self, s: GossipState, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender, usable = message.sender, not (late or rejected)
        s.offer_numbers[sender] = message.round
        if usable and sender in s.to_mix:
            # A message of the sender could not be read, and was refused as if it were the offer in the inbox. So the
            # sender has closed that one, and now offers again; the model in the inbox will do.
            return []
        if usable and s.has_model and self._crosses(s, sender):
            self._note_transfer(s, sender, took_s)
            ends = s.budget.stop is not Stop.NONE
            return [] if ends else [SendControl(self._reply(s, Kind.CROSSED, sender), sender)]
        s.refusing.discard(sender)
        return self._model_came(s, message, took_s, late, rejected)

    def _crosses(self, s: GossipState, sender: int) -> bool:
        """Return whether an offer to this rank is to be refused, since the sender has been offered to and will answer.
        Of a sender that has been silent that is not sure: what was offered to it may be lost. Nor of one that has
        refused the last offer: it may refuse all, as of a rank whose model is not finite, which that rank does not know
        yet. Then both would wait for each other forever."""
        if sender in s.silent or sender in s.refusing:
            return False
        return s.budget.rank < sender and sender in s.offers

    def _answer_came(self, s: GossipState, sender: int, fraction: float, offer: Offer, usable: bool) -> list[Action]:
        self._credit_came(s, sender, wants_whole=False)
        if not usable or offer.void:
            s.counts["models_refused"] += not usable
            return self._refused(s, sender)
        s.counts["models_received"] += 1
        s.refusing.discard(sender)
        del s.offers[sender]
        s.answers[sender] = fraction
        s.only_late_answers &= offer.of_earlier_update
        return [Keep(sender)]

    def _refused(self, s: GossipState, peer: int, peer_has_offered: bool = False) -> list[Action]:
        """Close the offer to this peer, of which nothing came. A rank that waits makes the next one, but not if
        `peer_has_offered`: that offer is on the way, and will do."""
        closed = self._close(s, peer)
        if s.between_updates and not s.owed and not self._waits_for_reply(s) and not peer_has_offered:
            s.owed += self._next_peers(s)
        return closed

    def _close(self, s: GossipState, peer: int) -> list[Action]:
        """Let the offer to this peer move nothing."""
        s.lock.release(peer)
        return [Close(peer)] if s.offers.pop(peer, None) is not None else []

    def _forget(self, s: GossipState, peer: int) -> list[Action]:
        return self._close(s, peer) + super()._forget(s, peer)

    # ---- adopt, and answer -------------------------------------------------------------------------------------

    def _adopt(self, s: GossipState) -> list[Action]:
        """Move by the answers that came to this rank's offers."""
        if not s.has_model or not s.answers:
            return []
        moves: list[Action] = [Move(peer, fraction) for peer, fraction in s.answers.items()]
        s.answers.clear()
        s.gave_up, s.num_rejected = False, 0
        if not s.only_late_answers:
            s.staleness = 0
        return moves

    def _mix(self, s: GossipState, give_credit: bool) -> list[Action]:
        """Answer all offers that came and move towards them; or take their mean for this rank's own model."""
        if not s.has_model:
            return self._void_offers(s) + super()._mix(s, give_credit)
        num_offers = len(s.to_mix)
        fraction = 1.0 / (1 + num_offers)
        answers = [SendModel(self._answer(s, peer, fraction), (peer,), True) for peer in s.to_mix]
        s.to_mix.clear()
        self._has_mixed(s)
        return [*answers, Pull(fraction, num_offers)]

    def _void_offers(self, s: GossipState) -> list[Action]:
        s.offers = {peer: offer._replace(void=True) for peer, offer in s.offers.items()}
        closed: list[Action] = [Close(peer) for peer in s.answers]
        s.answers.clear()
        return closed

    def _answer(self, s: GossipState, peer: int, fraction: float) -> Message:
        return self._reply(s, Kind.ANSWER, peer)._replace(weight=fraction)

    def _reply(self, s: GossipState, kind: Kind, peer: int) -> Message:
        return self._message(s, kind)._replace(round=s.offer_numbers.pop(peer, ANY))
