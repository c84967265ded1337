"""Bugs planted in protocol and driver: each must be found by the schedules, by the search of all states, or by both."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import GossipDriver, Opened
from pala.exchange.gossip.messages import (
    Accept,
    Action,
    Clear,
    Close,
    Keep,
    Kind,
    Mix,
    Move,
    Pull,
    SendControl,
    SendModel,
)
from pala.exchange.gossip.one_way import OneWay
from pala.exchange.gossip.paired import Paired
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState
from pala.exchange.wire import Format

# mypy: ignore-errors

# ---- models that go one way ------------------------------------------------------------------------------------------


class LosesCredits(OneWay):
    def _credit_came(self, s, peer, wants_whole):
        if s.round % 5 != 4:
            super()._credit_came(s, peer, wants_whole)


class LosesCreditsWhileItWaits(OneWay):
    def _credit_came(self, s, peer, wants_whole):
        if not s.between_updates:
            super()._credit_came(s, peer, wants_whole)


class CountsReceivedWeightTwice(OneWay):
    def _mix(self, s, give_credit):
        received = sum(s.to_mix.values())
        actions = super()._mix(s, give_credit)
        s.weight = self._mixing.gained(s.weight, received)
        return actions


class KeepsTheWeightItSends(OneWay):
    def _send_owed(self, s, can_send):
        weight = s.weight
        actions = super()._send_owed(s, can_send)
        s.weight = weight
        return actions


class LosesTheWeightOfTheRefused(OneWay):
    def _model_came(self, s, message, took_s, late, rejected):
        weight = s.weight
        actions = super()._model_came(s, message, took_s, late, rejected)
        s.weight = weight
        return actions


class WithAnotherBudget(OneWay):
    """Counts steps, or tells of the end, in a wrong way."""

    budget_type: type[StepBudget]

    def new_state(self, budget, weight=1.0, round_=0):
        spares = budget.size - len(budget.living)
        budget = self.budget_type(budget.rank, budget.size, budget.budget_steps, spares=spares)
        return super().new_state(budget, weight, round_)


class TakesEveryDeathForItsTurn(WithAnotherBudget):
    class budget_type(StepBudget):
        @property
        def is_needed(self):
            return self.stop is Stop.NONE and any(rank not in self.present for rank in range(self.num_places))


class LeavesThePlacesOfSparesEmpty(WithAnotherBudget):
    class budget_type(StepBudget):
        @property
        def is_needed(self):
            dead = sum(rank not in self.present for rank in range(self.num_places))
            return self.stop is Stop.NONE and self.rank < self.num_places + dead


class AsksNobody(OneWay):
    def _ask(self, s):
        return []


@dataclasses.dataclass(slots=True, eq=False)
class WithFirstLook(GossipState):
    just_finished: bool = False


class PaysNoDebtsWhileItWaits(OneWay):
    def new_state(self, budget, weight=1.0, round_=0):
        state = super().new_state(budget, weight, round_)
        return WithFirstLook(budget, state.weight, round_, state.num_sends)

    def update_finished(self, s, now_s, steps, healthy=True):
        s.just_finished = True
        return super().update_finished(s, now_s, steps, healthy)

    def _send_owed(self, s, can_send):
        actions = super()._send_owed(s, can_send) if s.just_finished else []
        s.just_finished = False
        return actions


class IgnoresTheLock(OneWay):
    def _send_owed(self, s, can_send):
        for peer in s.owed:
            s.lock.release(peer)
        return super()._send_owed(s, can_send)


class WaitsOneUpdateTooLate(OneWay):
    def must_wait(self, s):
        return super().must_wait(s) and s.staleness > self.rules.max_staleness + 1


class AddsUpWhatItHears(WithAnotherBudget):
    class budget_type(StepBudget):
        def merge(self, steps_by_rank, stop):
            steps_by_rank = steps_by_rank.copy()
            steps_by_rank[self.rank] += self.steps_by_rank[self.rank]
            StepBudget.merge(self, steps_by_rank, stop)


class TellsNobodyOfTheEnd(OneWay):
    def _tell_stop(self, s):
        return []


class TellsTheEndOnlyOnce(WithAnotherBudget):
    class budget_type(StepBudget):
        def peer_died(self, peer):
            told = self.stop_told
            StepBudget.peer_died(self, peer)
            self.stop_told = told


class ForgetsTheDead(OneWay):
    def peer_died(self, s, peer):
        return []


class IgnoresWhoLeaves(OneWay):
    def message_came(self, s, message, took_s=0.0, late=False, rejected=False):
        if message.kind is Kind.LEAVE:
            return []
        return super().message_came(s, message, took_s, late, rejected)


class NeverSendsOnceMore(OneWay):
    def __init__(self, rules):
        super().__init__(dataclasses.replace(rules, again_s=math.inf))


class HealsOnlyWithAFullRound(OneWay):
    def mix_is_due(self, s):
        return self.can_mix(s)

    def must_wait(self, s):
        return super().must_wait(s) or (not s.has_model and s.budget.stop is Stop.NONE and not self.can_mix(s))


class WaitsForTheStopped(OneWay):
    def must_wait(self, s):
        s.gave_up = False
        return super().must_wait(s)


class KeepsItsStaleModel(OneWay):
    def clock(self, s, now_s):
        super().clock(s, now_s)
        s.returning = False
        s.stale.clear()


class TakesWhatWasSentLongAgo(OneWay):
    def _is_stale(self, s, sender, took_s, late):
        return late


class TakesWhoWaitsForAnAnswerForSilent(OneWay):
    def _in_touch(self, s):
        return [peer for peer in s.living if peer not in s.silent]


class SendsToAllOfAGroup(OneWay):
    def _in_touch(self, s):
        return s.budget.living


class NeverHearsWhoLeads(Paired):
    def _in_touch(self, s):
        first = [s.budget.groups.index(group) for group in dict.fromkeys(s.budget.groups)]
        return [peer for peer in range(s.budget.size) if peer in first or peer == s.rank]


class TakesTheDeadsWeightForLost(OneWay):
    def peer_died(self, s, peer):
        actions = super().peer_died(s, peer)
        s.to_mix.pop(peer, None)
        return actions


class CountsTheDeadsStepsTwice(OneWay):
    def peer_died(self, s, peer):
        if peer in s.living:
            s.budget.base_steps += int(s.budget.steps_by_rank[peer])
        return super().peer_died(s, peer)


class HealsFromParts(OneWay):
    def _model_came(self, s, message, took_s, late, rejected):
        return super()._model_came(s, message._replace(format=Format.FLOAT32), took_s, late, rejected)


class KeepsPartsWhileItMustHeal(OneWay):
    def _drop_parts(self, s):
        return []


class ForgetsWhoAsked(OneWay):
    """Who asks in a credit, and who asks because it has waited in vain."""

    def _credit_came(self, s, peer, wants_whole):
        super()._credit_came(s, peer, wants_whole=False)

    def _joined(self, s, peer):
        super()._joined(s, peer)
        s.wants_whole.discard(peer)


class DropsAndMerges(OneWay):
    """As it was before: with fewer and fewer models about, the ranks come to take turns."""

    def update_finished(self, s, now_s, steps, healthy=True):
        s.owed.clear()
        s.rounds_due = 1
        return super().update_finished(s, now_s, steps, healthy)


class Stumbles(OneWay):
    def update_finished(self, *arguments: object) -> list[Action]:
        raise KeyError("offer")


# ---- the paired exchange ---------------------------------------------------------------------------------------------


class WaitsForAnyMix(Paired):
    def __init__(self, rules):
        super().__init__(rules)
        self._in_step = False


class RefusesWhoRefuses(Paired):
    """As it was before schedule 72,799 was found."""

    def _crosses(self, s, sender):
        return s.rank < sender and sender in s.offers and sender not in s.silent


class WaitsForTheAnswerOfWhoIsGone(Paired):
    def _forget(self, s, peer):
        return []


class BothAnswerWhenOffersCross(Paired):
    def _crosses(self, s, sender):
        return False


class NobodyAnswersWhenOffersCross(Paired):
    def _crosses(self, s, sender):
        return sender in s.offers


class MakesASecondOffer(Paired):
    def _waits_for_reply(self, s):
        return False


class MovesByItsOwnFraction(Paired):
    def _answer_came(self, s, sender, fraction, offer, usable):
        return super()._answer_came(s, sender, 0.5, offer, usable)


class ForgetsToCloseAtADeath(Paired):
    def _forget(self, s, peer):
        return GossipProtocol._forget(self, s, peer)


class ForgetsTheAnswersOfTheDead(Paired):
    def peer_died(self, s, peer):
        forgotten = [Close(peer)] if s.answers.pop(peer, None) is not None else []
        return forgotten + super().peer_died(s, peer)


class AnswersWithoutMoving(Paired):
    def _mix(self, s, give_credit):
        return [Clear() if isinstance(a, Pull) else a for a in super()._mix(s, give_credit)]


class AnswersWhenItHasMoved(Paired):
    def _mix(self, s, give_credit):
        return sorted(super()._mix(s, give_credit), key=lambda action: not isinstance(action, Pull))


class AnswersOnlyTheFirst(Paired):
    def _mix(self, s, give_credit):
        answered, actions = False, []
        for action in super()._mix(s, give_credit):
            if not (answered and isinstance(action, SendModel)):
                actions.append(action)
            answered |= isinstance(action, SendModel)
        return actions


class ClosesNothingThatIsRefused(Paired):
    def _refused(self, s, peer, peer_has_offered=False):
        return []


class ClosesOffersToTheSilent(Paired):
    def _offer(self, s):
        closed = [action for peer in s.silent for action in self._close(s, peer)]
        return closed + super()._offer(s)


class KeepsTheAnswersToVoidOffers(Paired):
    def _void_offers(self, s):
        s.offers = {peer: offer._replace(void=True) for peer, offer in s.offers.items()}
        return []


class DoesNotVoidAfterHealing(Paired):
    def _answer_came(self, s, sender, fraction, offer, usable):
        return super()._answer_came(s, sender, fraction, offer._replace(void=False), usable)


class IgnoresTheNumber(Paired):
    def _take_in(self, s, message, took_s, late, rejected):
        offer = s.offers.get(message.sender)
        if offer is not None and message.kind is not Kind.OFFER:
            message = message._replace(round=offer.number)
        return super()._take_in(s, message, took_s, late, rejected)


class RepliesToNothingThatCannotBeRead(Paired):
    def unreadable_model_came(self, s, sender):
        return self._close(s, sender)


class LeavesAnAnswerThatCannotBeReadOpen(Paired):
    def unreadable_model_came(self, s, sender):
        return GossipProtocol.unreadable_model_came(self, s, sender)


# ---- the driver ------------------------------------------------------------------------------------------------------


class CountsOnAnyRank(OneWay):
    """Takes whoever lives for one that has a model of use."""

    def wish_to_leave(self, s: GossipState) -> list[Action]:
        actions = super().wish_to_leave(s)
        s.stayers |= {*s.living} - {s.rank}
        return actions


class CountsOnTheDead(OneWay):
    """Takes the dead for ranks that stay."""

    def peer_died(self, s: GossipState, peer: int) -> list[Action]:
        actions = super().peer_died(s, peer)
        if s.has_left:
            s.stayers.add(peer)
            s.budget.living = sorted([*s.budget.living, peer])
        return actions


class KeepsTheCredit(GossipDriver):
    def _perform(self, actions):
        kept = [a for a in actions if not (isinstance(a, SendControl) and a.message.kind is Kind.CREDIT)]
        super()._perform(kept if any(isinstance(a, Mix) for a in actions) else actions)


class TellsNoDeaths(GossipDriver):
    def on_death(self, rank):
        pass


class AcceptsPoison(GossipDriver):
    def __init__(self, protocol, state, transport, models, *arguments: Any, **options: Any):
        read = models.open
        models.open = lambda received, offer=None: Opened(read(received, offer).message)
        super().__init__(protocol, state, transport, models, *arguments, **options)


class AddsNothing(GossipDriver):
    def _perform(self, actions):
        super()._perform([a for a in actions if not isinstance(a, Accept)])


class KeepsWhatItShouldForget(GossipDriver):
    def _perform(self, actions):
        super()._perform([a for a in actions if not isinstance(a, Clear)])


class FillsASnapshotOnItsWay(GossipDriver):
    def _free_snapshot(self):
        return self.snapshots[0]


class HasNoSpareSnapshots(GossipDriver):
    """As the virtual cluster once was: peers that do not answer hold all."""

    def _free_snapshot(self):
        return next((snapshot for snapshot in self.snapshots if snapshot.is_free), None)


class SendsToOneOnly(GossipDriver):
    def _send_model(self, action):
        super()._send_model(action._replace(peers=action.peers[:1]))


class AnswersAnother(GossipDriver):
    """What cannot be read names nobody: whom to answer, the transport alone says."""

    def on_message(self, message):
        super().on_message(message._replace(source=(message.source + 1) % self.state.budget.size))


class ReusesAnOpenOffersSnapshot(GossipDriver):
    def _free_snapshot(self):
        return next((snapshot for snapshot in self.snapshots if snapshot.packet.pending == 0), None)


class AnswersFromItsOffersSnapshot(GossipDriver):
    def _free_snapshot(self):
        for snapshot in self.offers.values():
            if snapshot.packet.pending == 0:
                return snapshot
        return super()._free_snapshot()


class MovesTwice(GossipDriver):
    def _perform(self, actions):
        for action in actions:
            if isinstance(action, Move):
                self.models.move(self.offer_to(action.peer), action.fraction)
        super()._perform(actions)


class KeepsNothing(GossipDriver):
    def _perform(self, actions):
        super()._perform([action for action in actions if not isinstance(action, Keep)])


class KeepsForAnother(GossipDriver):
    def _perform(self, actions):
        newest = next(reversed(self.offers), None)
        super()._perform([Keep(newest) if isinstance(action, Keep) else action for action in actions])


class AddsTheAnswerToTheInbox(GossipDriver):
    def _perform(self, actions):
        for action in actions:
            if isinstance(action, Keep):
                self.models.add(1.0)
        super()._perform(actions)


class AnswersTheOfferItself(GossipDriver):
    """With what has come, not with its own model."""

    def _send_model(self, action):
        model = self.models.model
        if action.message.kind is Kind.ANSWER:
            self.models.model = self.models.inbox / self.models.inbox_weight
        super()._send_model(action)
        self.models.model = model


class ClosesNothing(GossipDriver):
    def _perform(self, actions):
        super()._perform([action for action in actions if not isinstance(action, Close)])


class PullsTwice(GossipDriver):
    def _perform(self, actions):
        for action in actions:
            if isinstance(action, Pull):
                self.models.pull(action.fraction, False)
        super()._perform(actions)
