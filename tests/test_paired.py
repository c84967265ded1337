"""The paired exchange: step by step, over whole schedules, and with planted bugs.

Its arithmetic is in `test_codecs.py`, whole trainings are in `test_memory.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.faulty_cluster import FaultyCluster, Schedule
from explorer.planted import (
    AnswersTheOfferItself,
    BothAnswerWhenOffersCross,
    ClosesNothing,
    ClosesOffersToTheSilent,
    DoesNotVoidAfterHealing,
    ForgetsToCloseAtADeath,
    IgnoresTheNumber,
    KeepsForAnother,
    KeepsNothing,
    LeavesAnAnswerThatCannotBeReadOpen,
    MakesASecondOffer,
    MovesByItsOwnFraction,
    MovesTwice,
    NobodyAnswersWhenOffersCross,
    RepliesToNothingThatCannotBeRead,
    WaitsForAnyMix,
)
from explorer.schedules import NETWORKS, InvariantError, check, schedule
from pala.comm.base import Received
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.messages import (
    CREDITS,
    Accept,
    Action,
    Clear,
    Close,
    GoOn,
    Heal,
    Keep,
    Kind,
    Move,
    Pull,
    SendControl,
    SendModel,
)
from pala.exchange.gossip.paired import Paired
from pala.exchange.wire import Format, Message
from support.gossip import Rank, protocol, told, update, waits

IN_STEP = NETWORKS["in step"]
NO_FAULTS: dict[str, Any] = {"deaths": {}, "stops": {}, "cut_at": 0, "poison": {}, "patience_s": 1e9}


def paired(rank: int = 0, size: int = 3, **options: Any) -> Rank:
    """One rank that has begun its first update at 0 s; by default of a ring, with `max_staleness` 1."""
    return protocol(rank, size, mixing="paired", **options)


def came(p: Rank, kind: Kind, sender: int, number: int, weight: float = 1.0, **how: Any) -> list[Action]:
    """A message about the offer of this number."""
    whole = how.pop("whole", True)
    format_ = Format.FLOAT32 if whole else Format.TOP_K
    return p.message_came(
        Message(kind, sender, number, weight, Stop.NONE, np.zeros(p.budget.size, np.uint64), format_), **how
    )  # fmt: skip


def offer_came(p: Rank, sender: int, number: int = 7, **how: Any) -> list[Action]:
    return came(p, Kind.OFFER, sender, number, **how)


def answer_came(p: Rank, sender: int, number: int, fraction: float = 0.5, **how: Any) -> list[Action]:
    return came(p, Kind.ANSWER, sender, number, fraction, **how)


def sent(actions: list[Action], kind: Kind) -> list[tuple[int, int]]:
    """Models of this kind that leave: (to whom, number)."""
    return [(a.peers[0], a.message.round) for a in actions if isinstance(a, SendModel) and a.message.kind is kind]


def offered(actions: list[Action]) -> list[tuple[int, int]]:
    return sent(actions, Kind.OFFER)


def answered(actions: list[Action]) -> list[tuple[int, int, float]]:
    """(to whom, number, fraction)."""
    answers = [a.message for a in actions if isinstance(a, SendModel) and a.message.kind is Kind.ANSWER]
    fractions = [message.weight for message in answers]
    return [(*who, fraction) for who, fraction in zip(sent(actions, Kind.ANSWER), fractions, strict=True)]


def refused(actions: list[Action]) -> list[tuple[int, int, Kind]]:
    """(who, number, in which words)."""
    return [(a.peer, a.message.round, a.message.kind) for a in actions if isinstance(a, SendControl)]


def moved(actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, (Move, Pull, Heal))]


def with_offer(rank: int = 0, size: int = 3, **options: Any) -> tuple[Rank, int, int]:
    """A rank of a ring that has made an offer and trains on: (it, to whom, the offer's number)."""
    p = paired(rank, size, **options)
    actions = update(p)
    ((peer, number),) = offered(actions)
    assert number > 0 and not waits(actions)
    return p, peer, number


# ---- offer, answer, move ---------------------------------------------------------------------------------------------


def test_an_offer_is_answered_at_the_receivers_next_update_and_both_move_by_the_same_fraction() -> None:
    p, peer, number = with_offer()
    q = paired(peer)
    assert offer_came(q, 0, number) == [Accept(1.0)], "its rollout continues"
    actions = update(q)
    assert answered(actions) == [(0, number, 0.5)] and moved(actions) == [Pull(0.5, 1)]
    kinds = [a.message.kind if isinstance(a, SendModel) else type(a) for a in actions]
    assert kinds == [Kind.ANSWER, Pull, Kind.OFFER, GoOn], "the answer is the model of before, the offer that of after"
    assert answer_came(p, peer, number, 0.5) == [Keep(peer)], "a rollout needs one model from start to end"
    assert p.lock.is_free(peer)
    actions = update(p)
    assert actions[0] == Move(peer, 0.5) and offered(actions) == [(peer, number + 1)] and p.staleness == 0
    assert moved(update(p)) == [], "it moves once"


def test_offers_of_several_are_answered_at_once_with_a_smaller_fraction() -> None:
    p = paired(0, 5, topology="random")
    for sender, number in ((1, 4), (3, 8), (4, 2)):
        offer_came(p, sender, number)
    actions = update(p)
    assert answered(actions) == [(1, 4, 0.25), (3, 8, 0.25), (4, 2, 0.25)] and moved(actions) == [Pull(0.25, 3)]
    assert answered(update(p)) == []


def test_a_rank_is_idle_while_its_offer_is_open_and_nothing_has_come() -> None:
    """Then an update sends and mixes no model; else it may."""
    p, peer, number = with_offer(max_staleness=3)
    assert p.is_idle() and update(p) == [GoOn()] and p.is_idle()
    answer_came(p, peer, number)
    assert not p.is_idle(), "it moves"
    update(p)
    offer_came(p, 2)
    assert not p.is_idle(), "it answers"
    assert not paired().is_idle(), "it offers"
    p, _, _ = with_offer(max_staleness=3)
    came(p, Kind.WISH, 2, 0)
    assert not p.is_idle(), "it says that its model is of use"


def test_a_rank_that_may_wait_is_not_idle() -> None:
    """While it waits something comes, and is mixed. Nor is one that has no model, or whose peer is silent."""
    p, _, _ = with_offer(max_staleness=2)
    update(p)
    assert p.staleness == 2 and not p.is_idle() and waits(update(p))
    p, peer, _ = with_offer(max_staleness=10)
    p.silent.add(peer)
    assert not p.is_idle(), "another offer may be made"
    p, _, _ = with_offer(max_staleness=10)
    p.state.healthy = False
    assert not p.is_idle()


def test_a_rank_has_one_open_offer() -> None:
    p, peer, number = with_offer(max_staleness=10)
    for _ in range(3):
        assert offered(update(p)) == []
    answer_came(p, peer, number)
    assert offered(update(p)) == [(peer, number + 4)]


def test_a_rank_moves_before_it_answers_and_answers_before_it_offers() -> None:
    p, peer, number = with_offer()
    offer_came(p, 2)
    answer_came(p, peer, number, 0.25)
    kinds = [a.message.kind if isinstance(a, SendModel) else type(a) for a in update(p)]
    assert kinds == [Move, Kind.ANSWER, Pull, Kind.OFFER, GoOn]


def test_answering_ends_a_wait_and_so_does_an_answer() -> None:
    for answer in (False, True):
        p, peer, number = with_offer()
        assert waits(update(p)) and waits(p.advance(0.0))
        actions = answer_came(p, peer, number) if answer else offer_came(p, 2)
        assert actions == ([Keep(peer)] if answer else [Accept(1.0)])
        actions = p.advance(0.0)
        assert not waits(actions) and len(moved(actions)) == 1 and p.staleness == 0


# ---- crossing offers -------------------------------------------------------------------------------------------------


def test_a_spare_that_joins_refuses_no_offer() -> None:
    """Its number may be that of the offer to it."""
    p = paired(size=2)
    update(p)
    assert 1 in p.offers
    came(p, Kind.JOIN, 1, number=p.offers[1].number)
    assert 1 in p.offers


def test_of_two_that_offer_to_each_other_the_lower_refuses_and_the_higher_answers() -> None:
    low, high = paired(0, 2), paired(1, 2)
    ((_, lows),), ((_, highs),) = offered(update(low)), offered(update(high))
    assert refused(offer_came(low, 1, highs)) == [(1, highs, Kind.CROSSED)]
    assert offer_came(high, 0, lows) == [Accept(1.0)]
    assert came(high, Kind.CROSSED, 0, highs) == [Close(0)] and high.lock.is_free(0)
    assert answered(update(high)) == [(0, lows, 0.5)]
    assert answer_came(low, 1, lows) == [Keep(1)]
    assert moved(update(low)) == [Move(1, 0.5)]


def test_offers_to_who_has_offered_to_another_do_not_cross() -> None:
    p, peer, _ = with_offer(0, 3)
    assert peer == 1 and offer_came(p, 2) == [Accept(1.0)]


def test_who_has_been_silent_may_offer_again_to_who_waits_for_its_answer() -> None:
    """Else two ranks would never exchange again after an offer, or its answer, was lost on its way."""
    p, _, number = with_offer(0, 2, max_staleness=100)
    for second in range(1, 8):
        p.clock(float(second))
    assert p.silent == {1} and offer_came(p, 1) == [Accept(1.0)]
    assert answered(update(p, 7.0)) == [(1, 7, 0.5)]
    assert answer_came(p, 1, number) == [Keep(1)], "it was just late"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"rejected": True}, {"late": True}, {"took_s": 100.0}], ids=str)
def test_an_offer_that_is_refused_moves_neither(how: dict[str, Any]) -> None:
    p, peer, number = with_offer()
    q, _, _ = with_offer(peer)
    actions = offer_came(q, 0, number, **how)
    assert refused(actions) == [(0, number, Kind.CREDIT)]
    actions = update(q)
    assert moved(actions) == [] and answered(actions) == []
    assert came(p, Kind.CREDIT, peer, number) == [Close(peer)] and p.lock.is_free(peer)
    actions = update(p)
    assert moved(actions) == [] and offered(actions) == [(peer, number + 1)]


@pytest.mark.parametrize("how", [{"rejected": True}, {"late": True}], ids=str)
def test_an_answer_that_is_refused_closes_the_offer_and_moves_nothing(how: dict[str, Any]) -> None:
    p, peer, number = with_offer()
    assert answer_came(p, peer, number, **how) == [Close(peer)] and p.counts["models_refused"] == 1
    actions = update(p)
    assert moved(actions) == [] and offered(actions) == [(peer, number + 1)]


@pytest.mark.parametrize("answer", [False, True])
def test_a_waiting_rank_that_is_refused_offers_again_at_once(answer: bool) -> None:
    p = paired(max_staleness=0)
    actions = update(p)
    ((peer, number),) = offered(actions)
    assert waits(actions) and offered(p.advance(0.0)) == []
    if answer:
        answer_came(p, peer, number, rejected=True)
    else:
        came(p, Kind.CREDIT, peer, number)
    actions = p.advance(0.0)
    assert offered(actions) == [(peer, number + 1)] and waits(actions)
    assert offered(p.advance(0.0)) == []


def test_who_is_refused_in_the_middle_of_an_update_offers_at_its_end() -> None:
    p, peer, number = with_offer()
    came(p, Kind.CREDIT, peer, number)
    assert p.round == number
    assert offered(update(p)) == [(peer, number + 1)]


def test_replies_to_other_offers_are_ignored() -> None:
    p, peer, number = with_offer(size=4)
    for kind in (Kind.ANSWER, *CREDITS):
        assert came(p, kind, peer, number - 1 or 99) == [], "of another number"
        assert came(p, kind, 3, number) == [], "of somebody who got no offer"
    assert answer_came(p, peer, 0) == [], "an answer is to one offer; only a refusal may mean any"
    assert not p.lock.is_free(peer)
    assert moved(update(p)) == []
    assert answer_came(p, peer, number) == [Keep(peer)]
    assert answer_came(p, peer, number) == [], "it has been answered"
    assert moved(p.advance(0.0)) == [Move(peer, 0.5)]


def test_who_asks_for_a_whole_model_is_offered_the_next() -> None:
    p, peer, number = with_offer(size=4, whole_every=100, max_staleness=100)
    assert came(p, Kind.ASK_WHOLE, peer, number) == [Close(peer)]
    (offer,) = [a for a in update(p) if isinstance(a, SendModel)]
    assert offer.whole and offer.peers == (peer,)
    came(p, Kind.CREDIT, peer, offer.message.round)
    (offer,) = [a for a in update(p) if isinstance(a, SendModel)]
    assert not offer.whole


# ---- models that cannot be read --------------------------------------------------------------------------------------


def test_an_offer_that_cannot_be_read_is_given_back() -> None:
    p, peer, number = with_offer()
    actions = paired(peer).unreadable_model_came(0)
    assert refused(actions) == [(0, 0, Kind.CREDIT)], "of which number it was cannot be read either"
    assert came(p, Kind.CREDIT, peer, 0) == [Close(peer)]
    assert offered(update(p)) == [(peer, number + 1)]


def test_an_answer_that_cannot_be_read_closes_the_offer_too() -> None:
    p, peer, number = with_offer()
    actions = p.unreadable_model_came(peer)
    assert told(actions) == [(Kind.CREDIT, peer)] and actions[-1] == Close(peer)
    assert offered(update(p)) == [(peer, number + 1)]
    p, peer, _ = with_offer(2)
    offer_came(p, peer)  # so what comes now is no offer, and its sender needs no refusal
    assert p.unreadable_model_came(peer) == [Close(peer)] and p.lock.is_free(peer)
    assert p.counts["models_refused"] == 1


def test_who_made_a_new_offer_since_one_could_not_be_read_gets_the_answer_to_that() -> None:
    """It was told to close any offer, and so closed one that was on its way."""
    p = paired(0, 2)
    p.unreadable_model_came(1)
    assert offer_came(p, 1, 5) == [Accept(1.0)]
    assert offer_came(p, 1, 6) == []
    actions = update(p)
    assert answered(actions) == [(1, 6, 0.5)] and moved(actions) == [Pull(0.5, 1)]
    assert refused(offer_came(paired(0, 2), 1, 6, rejected=True)) == [(1, 6, Kind.CREDIT)]


# ---- deaths, stops, the end ------------------------------------------------------------------------------------------


def test_a_peer_that_dies_before_it_answers_moves_nothing() -> None:
    p, peer, number = with_offer(size=4)
    assert p.peer_died(peer) == [Close(peer)]
    assert answer_came(p, peer, number) == [], "it was on its way"
    actions = update(p)
    assert moved(actions) == [] and offered(actions) == [(2, number + 1)]


def test_the_answer_of_a_peer_that_has_died_since_still_moves() -> None:
    p, peer, number = with_offer(size=4)
    assert answer_came(p, peer, number, 0.25) == [Keep(peer)]
    assert p.peer_died(peer) == []
    actions = update(p)
    assert moved(actions) == [Move(peer, 0.25)] and offered(actions) == [(2, number + 1)]


def test_an_offer_of_a_peer_that_has_died_since_is_still_pulled_towards() -> None:
    p = paired(0, 4)
    offer_came(p, 3)
    assert p.peer_died(3) == []
    assert moved(update(p)) == [Pull(0.5, 1)]


def test_the_last_that_lives_neither_offers_nor_waits() -> None:
    p = paired(0, 2, max_staleness=0)
    assert waits(update(p))
    p.peer_died(1)
    for _ in range(3):
        assert update(p) == [GoOn()]


def test_a_rank_that_heals_voids_its_offers() -> None:
    p, peer, number = with_offer(size=4)
    assert waits(update(p, healthy=False))
    offer_came(p, 3, 5)
    actions = p.advance(0.0)
    assert moved(actions) == [Heal(1)] and answered(actions) == [] and not waits(actions)
    assert refused(actions) == [(3, 5, Kind.CREDIT)], "its model was taken, but its sender does not move"
    assert offered(update(p)) == [], "the peer has not replied"
    assert answer_came(p, peer, number) == [Close(peer)] and p.counts["models_refused"] == 0
    actions = update(p)
    assert moved(actions) == [] and len(offered(actions)) == 1


def test_a_rank_that_heals_drops_the_answers_that_it_has_not_moved_by() -> None:
    p, peer, number = with_offer(size=4)
    answer_came(p, peer, number)
    assert waits(update(p, healthy=False)), "nothing moves a model that is of no use"
    offer_came(p, 3)
    actions = p.advance(0.0)
    assert actions[0] == Close(peer) and moved(actions) == [Heal(1)]
    assert moved(update(p)) == []


@pytest.mark.parametrize("is_away", [False, True])
def test_a_rank_that_begins_again_after_an_average_keeps_nothing_of_before(is_away: bool) -> None:
    p, peer, number = with_offer(patience_s=5.0)
    answer_came(p, peer, number)
    offer_came(p, 2, whole=False)
    if is_away:
        p.clock(60.0)
    forgotten = [Clear(), Close(peer)] if is_away else [Move(peer, 0.5), Clear()]
    assert p.restart() == forgotten and not (p.to_mix or p.answers or p.stale or p.offers)
    p.state.returning = False  # it has the average
    assert moved(update(p, 60.0)) == []


def test_a_rank_without_a_model_refuses_parts_and_asks_for_whole_ones() -> None:
    p = paired(0, 4)
    assert offered(update(p, healthy=False)) == []
    offer_came(p, 3, 5, whole=False)
    actions = p.advance(0.0)
    assert actions[0] == Clear() and refused(actions) == [(3, 5, Kind.ASK_WHOLE)] and waits(actions)
    assert refused(offer_came(p, 3, 6, rejected=True)) == [(3, 6, Kind.ASK_WHOLE)]


def silence(p: Rank, until_s: int = 8) -> None:
    for second in range(1, until_s + 1):
        p.clock(float(second))


def test_an_offer_to_who_is_silent_stays_open_beside_a_new_one_and_its_late_answer_moves() -> None:
    p, peer, number = with_offer(size=4, max_staleness=100)
    silence(p, 20)
    assert p.silent == {peer}
    actions = update(p, 20.0)
    assert offered(actions) == [(2, number + 1)] and Close(peer) not in actions
    assert offered(update(p, 20.1)) == [], "the new one is open"
    assert answer_came(p, peer, number) == [Keep(peer)] and p.silent == set()
    assert answer_came(p, 2, number + 1, 0.25) == [Keep(2)]
    assert moved(update(p, 20.2)) == [Move(peer, 0.5), Move(2, 0.25)]


def test_a_rank_that_goes_on_without_a_mix_still_moves_by_what_comes_late() -> None:
    p = paired(0, 2, max_staleness=0)
    ((peer, number),) = offered(update(p))
    silence(p)
    assert not waits(p.advance(8.0)) and p.counts["waits_given_up"] == 1
    answer_came(p, peer, number)
    assert moved(update(p, 8.5)) == [Move(peer, 0.5)]


def test_after_the_end_nothing_is_offered() -> None:
    p, peer, number = with_offer()
    p.end(Stop.SIGNAL)
    came(p, Kind.CREDIT, peer, number)
    assert update(p) == [GoOn()]


def test_at_the_end_a_rank_moves_by_the_answers_that_came_and_leaves_offers() -> None:
    p, peer, number = with_offer()
    p.end(Stop.SIGNAL)
    answer_came(p, peer, number)
    offer_came(p, 2)
    assert p.finish() == [Move(peer, 0.5), Clear()]
    assert p.finish() == [Clear()]


def test_at_the_end_a_rank_without_a_model_takes_one_that_came() -> None:
    p, peer, number = with_offer()
    answer_came(p, peer, number)
    p.end(Stop.SIGNAL)
    update(p, healthy=False)
    assert p.finish() == []
    offer_came(p, 2)
    assert p.finish() == [Close(peer), Heal(1)]


# ---- in step ---------------------------------------------------------------------------------------------------------


def test_a_late_answer_moves_a_rank_in_step_but_does_not_let_it_go_on() -> None:
    p = paired(0, 4, max_staleness=0)
    ((peer, number),) = offered(update(p))
    offer_came(p, 3, 5)
    actions = p.advance(0.0)
    assert answered(actions) == [(3, 5, 0.5)] and not waits(actions), "it has mixed; its own offer is open"
    answer_came(p, peer, number)
    actions = update(p)
    assert moved(actions) == [Move(peer, 0.5)] and waits(actions) and p.staleness == 1
    ((peer, number),) = offered(actions)
    answer_came(p, peer, number)
    actions = p.advance(0.0)
    assert moved(actions) == [Move(peer, 0.5)] and not waits(actions) and p.staleness == 0


@pytest.mark.parametrize("max_staleness", [0, 10])
def test_an_update_that_ends_with_the_answer_to_its_own_offer_was_one_update_stale(max_staleness: int) -> None:
    p = paired(0, 4, max_staleness=max_staleness)
    for _ in range(3):
        ((peer, number),) = offered(update(p))
        answer_came(p, peer, number)
        p.advance(0.0)
    assert p.counts["staleness_updates"] == 1


def test_who_has_mixed_in_step_makes_no_offer_but_to_who_needs_a_model() -> None:
    p = paired(0, 4, max_staleness=0)
    offer_came(p, 3, 5)
    actions = update(p)
    assert answered(actions) == [(3, 5, 0.5)] and offered(actions) == [] and not waits(actions)
    offer_came(p, 3, 6)
    p.wants_whole.add(2)
    actions = update(p)
    assert answered(actions) == [(3, 6, 0.5)] and [peer for peer, _ in offered(actions)] == [2]


def test_who_is_refused_in_step_waits_only_for_an_offer_that_has_crossed_its_own() -> None:
    replies = {
        "crossed": lambda p, number: came(p, Kind.CROSSED, 0, number),
        "was too old": lambda p, number: came(p, Kind.CREDIT, 0, number),
        "has no model": lambda p, number: came(p, Kind.ASK_WHOLE, 0, number),
        "could not read it": lambda p, number: came(p, Kind.CREDIT, 0, 0),
        "not finite": lambda p, number: answer_came(p, 0, number, rejected=True),
    }
    for why, reply in replies.items():
        p = paired(1, 2, max_staleness=0)
        ((_, number),) = offered(update(p))
        reply(p, number)
        actions = p.advance(0.0)
        assert waits(actions) and len(offered(actions)) == (why != "crossed"), why


def are_in_step(protocol: type[Paired], delay: float, seed: int) -> bool:
    """Whether two ranks hold the same model before every rollout, the mean of what both have learned. No model of a
    rank overtakes another of the same, as between two of MPI's processes."""
    begins: dict[int, list[float]] = {0: [], 1: []}

    def learn(rank: int, model: np.ndarray) -> None:
        begins[rank].append(float(model[0]))  # in a rollout it does not change
        model += 1 + rank

    scenario = Schedule(
        2, "ring", "paired", max_staleness=0, budget_steps=100, seed=seed, update_s=(0.5, 1.5), patience_s=1e3,
        again_s=1e2, model_s=(delay, delay), control_s=(0.01, 0.02),
    )  # fmt: skip
    cluster = FaultyCluster(scenario, learn=learn, protocol=protocol)
    cluster.run()
    assert not cluster.stuck and not cluster.violations and len(begins[0]) > 40
    means = 0.5 + 1.5 * np.arange(1, len(begins[0]) + len(begins[1]))  # they begin as 0 and 1, and learn 1 and 2
    return all(np.allclose(models[1:], means[: len(models) - 1]) for models in begins.values())


@pytest.mark.parametrize("delay", [0.05, 2.0])
def test_two_ranks_in_step_hold_the_same_model_before_every_rollout(delay: float) -> None:
    assert all(are_in_step(Paired, delay, seed) for seed in range(5))


def test_ranks_that_wait_for_any_mix_are_not_in_step() -> None:
    assert not any(are_in_step(WaitsForAnyMix, delay, seed) for delay in (0.05, 2.0) for seed in range(5))


# ---- whole schedules -------------------------------------------------------------------------------------------------


class Learned:
    """A cluster whose ranks add 1 to their model at each update. Delays are counted in updates."""

    def __init__(
        self, mixing: str, size: int, topology: str, delay: float, slow: bool = False, updates: int = 60, seed: int = 0,
    ) -> None:  # fmt: skip
        slowness = (4.0,) + (1.0,) * (size - 1) if slow else ()
        scenario = Schedule(
            size, topology, mixing, max_staleness=10**6, budget_steps=updates * size, seed=seed, update_s=(0.9, 1.1),
            model_s=(0.8 * delay, 1.2 * delay), control_s=(0.01, 0.02), slowness=slowness,
        )  # fmt: skip
        self.updates, self.worst = 0, 0.0
        self.initial = sum(range(size))
        self.cluster = FaultyCluster(scenario, learn=self._learn)
        self.cluster.observe = self._look if mixing == "paired" else None
        self.cluster.run()
        self.models = np.concatenate([rank.model for rank in self.cluster.ranks])

    def _learn(self, rank: int, model: np.ndarray) -> None:
        model += 1
        self.updates += 1

    def _look(self) -> None:
        self.worst = max(self.worst, abs(float(self.cluster.sum_of_models[0]) - self.initial - self.updates))

    @property
    def kept(self) -> float:
        """The part of all progress that is still in the models."""
        return (float(self.models.sum()) - self.initial) / self.updates


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    size=st.integers(2, 16), topology=st.sampled_from(["random", "ring", "exponential"]), delay=st.floats(0.05, 10),
    slow=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_all_progress_is_kept_at_any_delay(size: int, topology: str, delay: float, slow: bool, seed: int) -> None:
    """But for the moves that are owed when the run ends, by which a model is at most as far off as it was apart."""
    learned = Learned("paired", size, topology, delay, slow, seed=seed)
    assert not learned.cluster.stuck and not learned.cluster.violations
    assert learned.worst < 1e-6
    assert np.ptp(learned.models) < 10 + 6 * delay, "they drift apart"


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("topology", ["random", "ring", "exponential"])
@pytest.mark.slow
def test_on_fast_links_nearly_all_progress_is_in_the_models_and_little_of_it_by_uniform(
    topology: str, slow: bool
) -> None:
    for delay in (0.05, 1.0):
        assert Learned("paired", 5, topology, delay, slow).kept == pytest.approx(1, abs=0.02)
        assert Learned("uniform", 5, topology, delay, slow).kept < 0.9


@pytest.mark.parametrize("topology", ["random", "ring", "exponential"])
@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.slow
def test_without_learning_all_ranks_come_to_the_mean_of_their_models(n: int, topology: str) -> None:
    for network in ("ordinary", "in step", "uneven"):
        largest = 0.3 if topology == "ring" and n > 2 else 0.05
        cluster = check(Schedule(n, topology, "paired", 3, budget_steps=60 * n, seed=n, **NETWORKS[network]))
        models = np.concatenate([rank.model for rank in cluster.ranks])
        assert abs(models - np.arange(n).mean()).max() < largest * n, network


class Damages(GossipDriver):
    """Every seventh model that comes cannot be read."""

    num_models = 0

    def on_message(self, message: Received) -> None:
        self.num_models += message.bulk
        if not message.bulk or self.num_models % 7:
            super().on_message(message)
            return
        with self.lock:
            self._perform(self.protocol.unreadable_model_came(self.state, message.source))


def play_with_damage(seed: int, protocol: type[Paired] = Paired) -> list[str]:
    """Most of what must hold of a schedule without faults."""
    scenario = schedule(2 * seed + 1)
    steps = 12 * scenario.size * scenario.steps_per_update
    scenario = dataclasses.replace(scenario, budget_steps=steps, **NO_FAULTS)
    cluster = FaultyCluster(scenario, protocol=protocol, driver=Damages)
    cluster.run(until_s=2000)
    apart = float(np.ptp([rank.model for rank in cluster.ranks]))
    # Who cannot read something takes its own offer for closed, and its peer may not yet know of that.
    violations = [v for v in cluster.violations if "process lock" not in v and "second offer" not in v]
    return violations + ["deadlock"] * bool(cluster.stuck) + ["apart"] * (apart > 2 * scenario.size)


def play_in_step(protocol: type[Paired] = Paired) -> np.ndarray:
    """The models of two ranks whose offers always cross, after at most so long that they need not hurry."""
    scenario = Schedule(2, "ring", "paired", 3, budget_steps=20, **IN_STEP)
    cluster = FaultyCluster(scenario, protocol=protocol)
    cluster.run(until_s=100)
    assert not cluster.stuck, "deadlock"
    return np.concatenate([rank.model for rank in cluster.ranks])


def test_crossing_offers_end_in_the_average_and_do_not_change_places() -> None:
    np.testing.assert_allclose(play_in_step(), 0.5, atol=0.01)


@pytest.mark.slow
def test_damaged_models_leave_nobody_waiting() -> None:
    for seed in range(40):
        assert play_with_damage(seed) == [], seed


# ---- planted bugs: the checks above must find them -------------------------------------------------------------------


# Of each symptom one or two; `test_explore.py` finds the others.
BUGS = {
    MakesASecondOffer: "second offer",
    MovesByItsOwnFraction: "sum of all models",
    ForgetsToCloseAtADeath: "deadlock",
    ClosesOffersToTheSilent: "process lock|sum of all models",
    DoesNotVoidAfterHealing: "before it was healed",
}


# The schedule to begin with, where those before it take long and do not find the bug, or only after long.
FIRST = {MovesByItsOwnFraction: 5, ForgetsToCloseAtADeath: 60, DoesNotVoidAfterHealing: 12}


def paired_schedules(first: int) -> Iterable[Schedule]:
    return (schedule(2 * i + 1) for i in range(first, 200))


@pytest.mark.parametrize(("bug", "symptom"), BUGS.items())
def test_a_planted_bug_is_found(bug: type[Paired], symptom: str) -> None:
    with pytest.raises((InvariantError, AssertionError), match=symptom):
        for scenario in paired_schedules(FIRST.get(bug, 0)):
            check(scenario, bug)


def test_bugs_at_crossing_offers_are_found_where_all_offers_cross() -> None:
    """The schedules above do not find the first, which only brings ranks together more slowly."""
    np.testing.assert_allclose(sorted(play_in_step(BothAnswerWhenOffersCross)), [0, 1])
    with pytest.raises(AssertionError, match="deadlock"):
        play_in_step(NobodyAnswersWhenOffersCross)


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (IgnoresTheNumber, "answer to another"), (RepliesToNothingThatCannotBeRead, "deadlock"),
        (LeavesAnAnswerThatCannotBeReadOpen, "deadlock"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_bugs_after_damage_are_found_where_models_are_damaged(bug: type[Paired], symptom: str) -> None:
    with pytest.raises(AssertionError, match=symptom):
        for seed in range(60):
            assert play_with_damage(seed, bug) == []


# ---- the same in the driver ------------------------------------------------------------------------------------------


DRIVER_BUGS = {
    MovesTwice: "sum of all models",
    KeepsNothing: "only when it was answered",
    KeepsForAnother: "only when it was answered|answer to another",
    AnswersTheOfferItself: "sum of all models",
    ClosesNothing: "memory for",
}


DRIVER_FIRST = {KeepsForAnother: 50}


@pytest.mark.parametrize(("bug", "symptom"), DRIVER_BUGS.items())
def test_a_bug_planted_in_the_driver_is_found(bug: type[GossipDriver], symptom: str) -> None:
    with pytest.raises((InvariantError, AssertionError), match=symptom):
        for scenario in paired_schedules(DRIVER_FIRST.get(bug, 0)):
            check(scenario, driver=bug)


def test_a_rank_whose_offers_are_refused_takes_those_of_who_refuses_them() -> None:
    """Its model is not finite, and it does not know. As the lower of two that offer to each other it refused the
    other's offers, too, and both waited forever."""
    check(schedule(72799))
