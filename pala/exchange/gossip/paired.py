"""The paired exchange: gossip by which the sum of all models does not change, and no step of a rank is taken back.

Two ranks move towards each other by the same amount, whatever happens to them meanwhile. A rank

1. *offers* its model s to a peer, and keeps a copy of s;
2. *answers* the k offers m that have come: it sends its model y to their senders and moves, x <- x + f sum of (m - y),
   with f = 1 / (1 + k);
3. *moves* when its own offer is answered: x <- x + f (y - s).

A rank has one open offer, but for those to peers that are `silent`. Each gets one reply, an answer or a refusal (a
credit), after which the process lock is free. A rank that takes a model in place of its own makes its open offers
*void*.

With `exchanges_per_update` above 1 a rank does all three between two steps of a rollout, too. There the parameters must
not change. So it exchanges y, its model with the moves that are *owed* to it, and its driver makes all of them at the
end of the update, as one difference: x <- x + (y - x of the rollout). All that is said above of x holds of y.

Which offers are refused and why, what can change the sum, and pairs in step (`max_staleness` 0): docs/architecture.md,
"Mixing". Pure, as `protocol.py`, of which this keeps the clock, the patience, the budget and the deaths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.actions import Action, Clear, Close, Keep, Move, Pull, SendModel
from pala.exchange.gossip.messages import WITHOUT_MODEL, Kind
from pala.exchange.gossip.mixing import Mixing
from pala.exchange.gossip.protocol import GossipProtocol, Rules
from pala.exchange.wire import Message

_MOST_FRACTION = 0.5  # of an answer, to one offer or more
_CROSSED = 0.5  # weight of a refusal whose sender has an offer on the way, which will do
_ANY = 0  # in a refusal: of whichever offer is open; the first offer is number 1


@dataclass
class _Offer:
    number: int  # as the reply says it
    void: bool = False  # of a model that has been replaced since
    is_late: bool = False  # made before the last update ended; noted where ranks go in step


class PairedProtocol(GossipProtocol):
    """The state of one rank."""

    kinds = (Kind.OFFER, Kind.ANSWER, *WITHOUT_MODEL)
    _debts_stay = False
    _offers: dict[int, _Offer]

    def __init__(self, budget: StepBudget, mixing: Mixing, rules: Rules, round_: int = 0) -> None:
        super().__init__(budget, mixing, rules, round_)
        self._offers = {}  # to peers that have not replied
        self._answers: dict[int, float] = {}  # that came: the fraction to move by
        self._answered_late = False  # none of them is to an offer of this update
        self._numbers: dict[int, int] = {}  # of the offers in the inbox
        self._refusing: set[int] = set()  # peers that have refused this rank's last offer to them
        self._num_offers = 0  # made since the last update ended

    # ---- events --------------------------------------------------------------------------------------------------

    def update_finished(self, now_s: float, steps: int, healthy: bool = True) -> list[Action]:
        self._num_offers = 0
        if self._in_step:
            self._answered_late = True
            for offer in self._offers.values():
                offer.is_late = True
        return super().update_finished(now_s, steps, healthy)

    def between_steps(self, now_s: float) -> list[Action]:
        most = self.rules.exchanges_per_update
        may_offer = self._num_offers < most and not self._waits_for_reply and len(self.living) > 1
        if most == 1 or not (may_offer or self._inbox or self._answers):
            return []
        self.clock(now_s)  # it may have been away
        if self._between_updates or not self.has_model or self.budget.stop is not Stop.NONE:
            return []
        actions = self._move()
        if self.can_mix:
            actions += self._mix(give_credit=True)
        if may_offer and not self._owed:
            self._owed += self._next_peers()
        return actions + (self._offer() if may_offer else [])

    def unreadable_model_came(self, sender: int) -> list[Action]:
        """It was an offer or the answer to one; neither is open any more."""
        if sender not in self._inbox:
            return super().unreadable_model_came(sender) + self._close(sender)
        self.counts["models_refused"] += 1  # its offer has come, so this was its answer
        return self._close(sender)

    def finish(self) -> list[Action]:
        """Both models of an offer that nobody answered stay as they are."""
        if self.has_model:
            self._inbox.clear()
            return [*self._move(), Clear()]
        return super().finish()

    # ---- offers --------------------------------------------------------------------------------------------------

    @property
    def _in_step(self) -> bool:
        return self.rules.max_staleness == 0 and self.rules.exchanges_per_update == 1

    @property
    def _waits_for_reply(self) -> bool:
        """True while it may make no offer."""
        return any(peer not in self.silent for peer in self._offers)

    def _offer(self) -> list[Action]:
        """To the peer of this round, or one that waits to heal."""
        if self.budget.stop is not Stop.NONE or not self.has_model:
            return []
        if self._in_step and self.staleness == 0:  # this update's exchange is made
            self._owed = [peer for peer in self._owed if peer in self._wants_whole]
        if not self._owed or self._waits_for_reply:
            return []
        peers = sorted(self._owed, key=lambda peer: peer not in self._wants_whole)
        peer = next((peer for peer in peers if self.lock.is_free(peer)), None)
        if peer is None:
            return []
        self._owed.clear()
        self.lock.acquire(peer, self._now_s)
        self._offers[peer] = _Offer(self.round)
        self._num_offers += 1
        return [SendModel(self._message(Kind.OFFER), (peer,), self._goes_whole(peer))]

    def _send_owed(self, can_send: Callable[[], bool]) -> list[Action]:
        """What is owed is offered."""
        return []

    def _take_in(self, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender = message.sender
        if message.kind is Kind.OFFER:
            return self._offer_came(message, took_s, late, rejected)
        offer = self._offers.get(sender)
        if message.kind is Kind.ANSWER:
            if offer is not None and message.round == offer.number:
                rejected |= message.weight > _MOST_FRACTION
                return self._answer_came(sender, message.weight, offer, usable=not (late or rejected))
            self.counts["models_refused"] += 1
            return []
        is_refusal = message.kind in (Kind.CREDIT, Kind.ASK_WHOLE)
        if offer is not None and is_refusal and message.round in (offer.number, _ANY):
            self._credit_came(sender, wants_whole=message.kind is Kind.ASK_WHOLE)
            self._refusing.add(sender)
            return self._refused(sender, waits_for_its=self._in_step and message.weight == _CROSSED)
        return []

    def _offer_came(self, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender, usable = message.sender, not (late or rejected)
        self._numbers[sender] = message.round
        if usable and sender in self._inbox:
            # Something of its sender's could not be read, and was taken for this offer: it has closed that, and means
            # the new one. Its model of before will do.
            return []
        if usable and self.has_model and self._crosses(sender):
            self._note_transfer(sender, took_s)
            return self._return_credit(sender, _CROSSED)
        self._refusing.discard(sender)
        return self._model_came(message, took_s, late, rejected)

    def _crosses(self, sender: int) -> bool:
        """True if an offer to this rank is to be refused, since the sender has been offered to and will answer. Of one
        that has been silent that is not sure: what was offered to it may be lost. Nor of one that has refused the last
        offer: it may refuse them all, as those of a rank whose model is not finite and that does not know it yet, and
        then both would wait for each other for ever."""
        if sender in self.silent or sender in self._refusing:
            return False
        return self.rank < sender and sender in self._offers

    def _answer_came(self, sender: int, fraction: float, offer: _Offer, usable: bool) -> list[Action]:
        self._credit_came(sender, wants_whole=False)
        if not usable or offer.void:
            self.counts["models_refused"] += not usable
            return self._refused(sender)
        self.counts["models_received"] += 1
        self._refusing.discard(sender)
        del self._offers[sender]
        self._answers[sender] = fraction
        self._answered_late &= offer.is_late
        return [Keep(sender)]

    def _refused(self, peer: int, waits_for_its: bool = False) -> list[Action]:
        """Nothing came of the offer to this peer. A rank that waits makes the next one, but not at once if it
        `waits_for_its`, which is on the way."""
        closed = self._close(peer)
        if self._between_updates and not self._owed and not self._waits_for_reply and not waits_for_its:
            self._owed += self._next_peers()
        return closed

    def _close(self, peer: int) -> list[Action]:
        """The offer to this peer will move nothing."""
        self.lock.release(peer)
        return [Close(peer)] if self._offers.pop(peer, None) is not None else []

    def _forget(self, peer: int) -> list[Action]:
        return self._close(peer) + super()._forget(peer)

    # ---- moves ---------------------------------------------------------------------------------------------------

    def _move(self) -> list[Action]:
        """By the answers that came."""
        if not self.has_model or not self._answers:
            return []
        moves: list[Action] = [Move(peer, fraction) for peer, fraction in self._answers.items()]
        self._answers.clear()
        self._gave_up, self._num_rejected = False, 0
        if not self._answered_late:
            self.staleness = 0
        return moves

    def _mix(self, give_credit: bool) -> list[Action]:
        """Answer all offers that came and move towards them; or take their mean for this rank's own model."""
        if not self.has_model:
            return self._void_offers() + super()._mix(give_credit)
        num_offers = len(self._inbox)
        fraction = 1.0 / (1 + num_offers)
        answers = [SendModel(self._answer(peer, fraction), (peer,), True) for peer in self._inbox]
        self._inbox.clear()
        self._whole_came = self._gave_up = False
        self._num_rejected = self.staleness = 0
        return [*answers, Pull(fraction, num_offers)]

    def _void_offers(self) -> list[Action]:
        for offer in self._offers.values():
            offer.void = True
        closed: list[Action] = [Close(peer) for peer in self._answers]
        self._answers.clear()
        return closed

    def _answer(self, peer: int, fraction: float) -> Message:
        return self._reply(Kind.ANSWER, peer)._replace(weight=fraction)

    def _reply(self, kind: Kind, peer: int) -> Message:
        return self._message(kind)._replace(round=self._numbers.pop(peer, _ANY))
