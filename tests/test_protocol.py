"""The gossip protocol, in lockstep against its mixing matrix and on thousands of simulated schedules.

`check` plays one schedule on the virtual cluster and checks, after every event and at the end, what must hold in any.
The tests vary the schedules, and plant bugs to see that `check` finds them.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.exchange.budget import Stop
from pala.exchange.gossip import topology as graph
from pala.exchange.gossip.protocol import GossipProtocol, Mix
from pala.simulate.check import try_all
from pala.simulate.schedules import MIXINGS, NETWORKS, STALENESS, TOPOLOGIES, InvariantError, check, schedule
from pala.simulate.virtual_cluster import Scenario, VirtualCluster

SIZES = [1, 2, 3, 5, 8, 13]
reproducible = settings(derandomize=True, deadline=None, max_examples=60)


def protocol(rank: int = 0, size: int = 3, **changes) -> GossipProtocol:
    settings_ = {"topology": "ring", "mixing": "uniform", "max_staleness": 1, "budget_steps": 10**9, "seed": 0}
    return GossipProtocol(rank, size, **settings_ | changes)


# ---- lockstep --------------------------------------------------------------------------------------------------------


def lockstep(ranks: list[GossipProtocol]) -> np.ndarray:
    """Everyone finishes an update, sends, receives and mixes. Returns W with x <- W x, built from what was mixed."""
    n = len(ranks)
    for p in ranks:
        p.update_finished(1)
    models = []
    for p in ranks:
        peers = p.sendable()
        weight = p.sent(peers) if peers else 1.0
        models += [(p.rank, peer, weight) for peer in peers]
    W = np.diag([p.weight if p.push_sum else 1.0 for p in ranks])
    for sender, receiver, weight in models:
        W[receiver, sender] += ranks[receiver].model_received(sender, weight)
    for p in ranks:
        assert not p.must_wait
        own, total = W[p.rank, p.rank], W[p.rank].sum()
        mix = p.take()
        assert mix is None if n == 1 else mix.fraction == pytest.approx(1 - own / total)
        W[p.rank] /= total
        for sender in mix.senders if mix else ():
            ranks[sender].credit_returned(p.rank)
    return W


def cluster_of(n: int, topology: str, mixing: str, seed: int = 1) -> list[GossipProtocol]:
    return [protocol(i, n, topology=topology, mixing=mixing, max_staleness=0, seed=seed) for i in range(n)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("n", SIZES)
def test_in_lockstep_the_mixing_matrix_is_the_topologys_and_keeps_the_mean(topology: str, mixing: str, n: int) -> None:
    ranks = cluster_of(n, topology, mixing)
    for round_ in range(12):
        expected = np.eye(n)
        for rank in range(n):
            for peer in graph.out_peers(topology, rank, range(n), round_, seed=1):
                expected[peer, rank] += 1
        expected /= expected.sum(axis=1, keepdims=True)
        W = lockstep(ranks)
        np.testing.assert_allclose(W, expected, atol=1e-12)
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        assert all(p.weight == pytest.approx(1) for p in ranks)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_in_lockstep_the_spread_shrinks_as_the_theory_says(mixing: str) -> None:
    def spread_after(rounds: int, n: int, topology: str, seed: int = 1) -> float:
        """Variance, as a fraction of what it was."""
        x, ranks = np.random.default_rng(seed).normal(size=n), cluster_of(n, topology, mixing, seed)
        start = x.var()
        for _ in range(rounds):
            x = lockstep(ranks) @ x
        return x.var() / start

    assert spread_after(1, 8, "complete") < 1e-24
    assert spread_after(3, 8, "exponential") < 1e-24
    assert spread_after(40, 8, "ring") <= np.cos(np.pi / 8) ** 80
    after_four = [spread_after(4, 5, "random", seed) for seed in range(400)]
    expected = (0.5 * (1 - 1 / 4)) ** 4
    assert np.mean(after_four) == pytest.approx(expected, abs=4 * np.std(after_four) / 20)


# ---- the state machine, step by step ---------------------------------------------------------------------------------


def test_a_held_lock_holds_a_model_back_until_the_credit_returns() -> None:
    p = protocol()
    p.update_finished(1)
    assert p.sendable() == (1,)
    p.sent((1,))
    assert p.sendable() == ()
    p.update_finished(1)
    assert p.sendable() == () and p.must_wait
    p.credit_returned(1)
    assert p.sendable() == (1,), "a waiting rank must pay its debt as soon as the lock is free"


def test_waits_after_max_staleness_updates_and_goes_on_after_a_mix() -> None:
    p = protocol(max_staleness=2)
    for staleness in (1, 2):
        p.update_finished(1)
        assert p.staleness == staleness and not p.must_wait and p.take() is None
    p.update_finished(1)
    assert p.must_wait
    p.model_received(2, 1.0)
    assert not p.must_wait
    assert p.take() == Mix(0.5, (2,))
    assert p.staleness == 0 and not p.can_mix


def test_with_staleness_zero_models_are_neither_dropped_nor_merged() -> None:
    p = protocol(size=4, topology="exponential", max_staleness=0)
    p.update_finished(1)
    p.sent(p.sendable())  # to rank 1, which is slow
    p.model_received(2, 1.0)
    p.model_received(3, 1.0)
    assert p.take() == Mix(2 / 3, (2, 3))
    p.update_finished(1)  # two models were mixed: two are owed, to the peers of the next two rounds
    assert p.sendable() == (2,)
    p.sent((2,))
    p.credit_returned(1)
    assert p.sendable() == (1,)
    p.model_received(3, 1.0)
    p.take()
    p.update_finished(1)
    assert p.sendable() == (1,), "the debt to rank 1 stays"


def test_one_rank_owes_nothing_and_never_waits() -> None:
    p = protocol(size=1, max_staleness=0)
    for _ in range(5):
        p.update_finished(7)
        assert not p.must_wait and p.sendable() == () and p.take() is None and p.tell_stop() == ()
    assert p.global_steps == 35


def test_an_unhealthy_rank_waits_for_any_model_and_takes_it_whole() -> None:
    p = protocol(size=4, topology="complete", max_staleness=10, mixing="push_sum")
    p.update_finished(1, healthy=False)
    assert p.must_wait and p.take() is None and p.sendable() == ()
    p.model_received(2, 0.25)
    assert not p.must_wait and not p.can_mix
    assert p.take() == Mix(1.0, (2,)) and p.weight == 1.25


def test_an_unhealthy_rank_gives_parts_back_until_a_whole_model_comes() -> None:
    p = protocol(size=4, topology="complete", max_staleness=10)
    p.update_finished(1, healthy=False)
    assert p.drop_parts() == ()
    p.model_received(2, 1.0, whole=False)
    p.model_received(1, 1.0, whole=False)
    assert p.must_wait and p.take() is None
    assert p.drop_parts() == (2, 1) and p.drop_parts() == ()
    p.model_received(2, 1.0, whole=False)
    p.model_received(3, 1.0, whole=True)
    assert not p.must_wait and p.drop_parts() == ()
    assert p.take() == Mix(1.0, (2, 3))
    assert p.must_wait, "the whole model is used up"


def test_whole_models_are_sent_in_turn_and_to_who_asks() -> None:
    ranks = [protocol(rank, 4, max_staleness=0, whole_every=8) for rank in range(4)]
    whole = []
    for p in ranks:
        whole.append([])
        for _ in range(24):
            p.update_finished(1)
            whole[-1].append(p.whole_is_due(p.sendable()))
            p.sent(p.sendable())
            p.lock.release((p.rank + 1) % 4)
    assert [[i for i, due in enumerate(row) if due] for row in whole] == [
        [0, 8, 16],
        [6, 14, 22],
        [4, 12, 20],
        [2, 10, 18],
    ]
    p = protocol(0, 3, topology="complete", whole_every=100)
    p.update_finished(1)
    p.sent(p.sendable())
    p.credit_returned(1)
    p.credit_returned(2, wants_whole=True)
    p.update_finished(1)
    assert not p.whole_is_due((1,)) and p.whole_is_due((1, 2))
    p.sent((1,))
    assert p.whole_is_due((2,)), "it went to another"
    p.sent((2,))
    assert not p.whole_is_due((1, 2))


def test_a_refused_model_counts_in_its_round_and_leaves_its_weight() -> None:
    p = protocol(size=3, topology="complete", max_staleness=0, mixing="push_sum")
    p.update_finished(1)
    p.model_refused(0.25)
    assert p.must_wait and p.weight == 1.25 and p.take() is None
    p.model_received(2, 0.5)
    assert not p.must_wait
    assert p.take() == Mix(0.5 / 1.75, (2,))


def test_a_rank_that_waits_long_sends_once_more_to_whom_it_may() -> None:
    p = protocol(size=3, topology="complete", max_staleness=0)
    p.clock(0.0)
    p.clock(3.0)
    assert p.sendable() == (), "it does not wait"
    p.update_finished(1)
    p.sent(p.sendable())
    p.clock(3.1)
    p.clock(5.2)
    p.credit_returned(2)
    assert p.sendable() == (), "its model was still on the way to both"
    p.clock(6.0)
    assert p.sendable() == (), "too soon"
    p.clock(7.3)
    assert p.sendable() == (2,)


def waiting_rank(**changes) -> GossipProtocol:
    """Rank 0 of a ring of 4, updates of one second, which has sent to rank 1 and waits for rank 3 from 3 s on."""
    p = protocol(size=4, max_staleness=0, **changes)
    p.clock(0.0)
    p.take()
    p.clock(1.0)
    p.update_finished(1)
    p.sent(p.sendable())
    p.model_received(3, 1.0)
    p.take()
    p.credit_returned(1)
    p.clock(2.0)
    p.update_finished(1)
    p.sent(p.sendable())
    p.clock(3.0)
    return p


def test_patience_ends_a_wait_until_the_next_model() -> None:
    p = waiting_rank()
    for tenth in range(30, 81):
        p.clock(tenth / 10)
        assert p.must_wait
    p.clock(8.1)
    assert not p.must_wait and p.waits_given_up == 1 and p.take() is None
    p.clock(9.0)
    p.update_finished(1)
    assert not p.must_wait, "it waits no more for a peer that does not answer"
    p.model_received(3, 1.0)
    assert p.take() == Mix(0.5, (3,))
    p.clock(10.0)
    p.update_finished(1)
    assert p.must_wait


def test_a_peer_that_keeps_a_model_for_long_is_left_out_until_it_gives_the_credit_back() -> None:
    p = waiting_rank()
    assert p.silent == set()
    for second in (4.0, 5.0, 6.0, 7.0, 8.0, 9.0):
        p.clock(second)
    assert p.silent == {1} and len(p.living) == 4 and p.take() is None
    p.clock(10.0)
    p.update_finished(1)
    assert p.sendable() == (2,), "the ring closes behind the silent one"
    p.credit_returned(1)
    assert p.silent == set()


def test_a_rank_that_was_away_takes_only_what_was_sent_after_its_return() -> None:
    p = protocol(size=3, topology="complete", max_staleness=3, mixing="push_sum")
    p.clock(0.0)
    p.take()
    p.clock(1.0)
    p.update_finished(1)
    p.model_received(1, 0.5)  # while it was away, or before
    p.clock(60.0)
    p.update_finished(1)
    assert not p.has_model and p.must_wait and p.sendable() == ()
    assert p.drop_parts() == (1,) and p.weight == 1.5
    assert p.is_stale(2, took_s=0.0) and not p.is_stale(2, took_s=0.0)
    assert not p.is_stale(1, took_s=0.0), "its stale one has been given back"
    assert p.is_stale(1, took_s=20.0), "but this one was on its way for too long"
    assert not all(p.is_stale(1, took_s=20.0) for _ in range(3)), "unless it is always so, on a slow link"
    p.model_received(1, 0.5, whole=False)
    assert p.must_wait and p.drop_parts() == (1,)
    p.model_received(2, 0.25)
    assert p.take() == Mix(1.0, (2,)) and p.has_model
    p.clock(61.0)
    p.update_finished(1)
    assert p.sendable() == (1, 2)


def test_a_returning_rank_that_nobody_answers_goes_on_with_its_own_model() -> None:
    """As when a whole job is suspended, and all return."""
    p = protocol(size=2, max_staleness=3)
    p.clock(0.0)
    p.take()
    p.clock(1.0)
    p.update_finished(1)
    p.clock(60.0)
    p.update_finished(1)
    while p.must_wait:
        p.clock(p._now_s + 0.5)
        assert p._now_s < 200
    assert p._now_s > 60 + 5 and p.has_model and p.waits_given_up == 1


def test_a_rank_whose_model_is_not_finite_never_gives_up() -> None:
    p = waiting_rank()
    p.update_finished(1, healthy=False)
    for second in range(4, 1000):
        p.clock(second)
        assert p.must_wait


def test_patience_grows_with_the_length_of_updates() -> None:
    p = protocol(size=2, max_staleness=10)
    for update in range(20):
        p.clock(30.0 * update)
        p.update_finished(1)
        assert p.has_model and not p.must_wait
        p.model_received(1, 1.0)
        p.take()
    assert p.patience_s == pytest.approx(150)
    for update in range(100):
        p.clock(600.0 + 0.1 * update)
        p.update_finished(1)
        p.take()
    assert p.patience_s == 5.0


def test_a_death_ends_debts_and_locks_and_closes_the_ring() -> None:
    p = protocol(size=4, max_staleness=0)
    p.update_finished(1)
    p.peer_died(1)
    assert p.sendable() == ()
    p.clock(0.0)
    p.clock(2.1)
    assert p.sendable() == (2,)
    p.peer_died(2)
    p.peer_died(3)
    assert not p.must_wait
    p.healthy = False
    assert not p.must_wait


def test_the_end_is_told_once_and_again_after_a_death() -> None:
    p = protocol(size=8, budget_steps=10)
    p.update_finished(9)
    assert p.stop is Stop.NONE and p.tell_stop() == ()
    p.update_finished(1)
    assert p.stop is Stop.BUDGET and p.tell_stop() == (1, 2, 4) and p.tell_stop() == ()
    p.peer_died(2)
    assert p.tell_stop() == (1, 3, 5)
    assert p.sendable() == () and not p.must_wait


def test_news_is_merged_by_maximum_and_a_resumed_run_counts_on() -> None:
    p = protocol(size=3, base_steps=100, local_steps=[1, 2, 3], round_=5, weight=0.5, budget_steps=125)
    assert p.global_steps == 106 and p.round == 5 and p.weight == 0.5
    p.news(np.array([0, 9, 2], np.uint64), Stop.NONE)
    assert p.local_steps.tolist() == [1, 9, 3]
    p.news(np.array([0, 0, 12], np.uint64), Stop.NONE)
    assert p.stop is Stop.NONE and p.global_steps == 122
    p.update_finished(3)
    assert p.stop is Stop.BUDGET
    stopped = protocol()
    stopped.news(np.zeros(3, np.uint64), Stop.SIGNAL)
    stopped.stop_now(Stop.BUDGET)
    assert stopped.stop is Stop.SIGNAL, "the first reason stays"
    assert protocol(budget_steps=6, local_steps=[1, 2, 3]).stop is Stop.BUDGET


# ---- simulated schedules ---------------------------------------------------------------------------------------------


ORDINARY = NETWORKS["ordinary"]


@st.composite
def scenarios(draw, updates: int = 20, speeds: bool = True, **fixed) -> Scenario:
    """Any cluster on any kind of schedule."""
    size = draw(st.sampled_from(fixed.pop("sizes", SIZES)))
    steps = draw(st.sampled_from([1, 80]))
    slowness = draw(st.sampled_from([(), (10.0,), (1.0, 5.0), (1.0, 1.2, 0.8)])) if speeds else ()
    choices = {
        "topology": draw(st.sampled_from(TOPOLOGIES)),
        "mixing": draw(st.sampled_from(MIXINGS)),
        "max_staleness": draw(st.sampled_from(STALENESS)),
        "seed": draw(st.integers(0, 2**32)),
        "steps_per_update": steps,
        "budget_steps": size * updates * steps + draw(st.integers(0, steps)),
        "slowness": (slowness + (1.0,) * size)[:size] if len(slowness) == 1 else (slowness * size)[:size],
    }
    return Scenario(size, **NETWORKS[draw(st.sampled_from(list(NETWORKS)))] | choices | fixed)


@settings(reproducible, max_examples=200)
@given(scenarios(again_s=1e6))
def test_any_schedule_ends_without_help_from_sending_again(scenario: Scenario) -> None:
    check(scenario)


@reproducible
@given(scenarios())
def test_pure_mixing_keeps_the_push_sum_mean_and_stays_in_the_hull(scenario: Scenario) -> None:
    models = np.random.default_rng(scenario.seed).normal(size=(scenario.size, 2))

    def observe(cluster: VirtualCluster) -> None:
        if scenario.mixing == "push_sum":
            assert abs(cluster.weighted_sum - models.sum(axis=0)).max() < 1e-9

    cluster = check(scenario, models=models, observe=observe)
    for rank in cluster.ranks:
        assert (models.min(axis=0) - 1e-12 <= rank.model).all() and (rank.model <= models.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("max_staleness", STALENESS)
def test_pure_mixing_ends_in_agreement(topology: str, mixing: str, max_staleness: int) -> None:
    """60 updates a rank. The ring of 8 contracts with cos(pi/8): 0.924^60 = 0.009 at best, in lockstep."""
    for n, largest in ((2, 1e-9), (5, 0.05 if topology == "ring" else 1e-4), (8, 0.3 if topology == "ring" else 1e-3)):
        schedule = Scenario(n, topology, mixing, max_staleness, budget_steps=60 * n, seed=n, update_s=(0.5, 1.5))
        cluster = check(schedule)
        models = np.concatenate([rank.model for rank in cluster.ranks])
        assert models.std() < largest * np.arange(n).std()


@settings(reproducible, max_examples=100)
@given(scenarios())
def test_the_overshoot_of_the_budget_is_bounded(scenario: Scenario) -> None:
    """Two bounds, with B steps an update and n ranks; the budget is met, in truth, at time T.

    By what a rank does not know. If rank i lacks u_i steps of the budget at T, its own next ceil(u_i/B) updates show it
    that the budget is met, whatever it hears meanwhile: it makes no more than max(1, ceil(u_i/B)) after T (the one: an
    update that is under way is finished).

    By time. Let the first rank know at T + D. The news takes at most H = ceil(log2 n) hops of at most L seconds. A rank
    begins no update after T + D + H L; with c_i seconds for its fastest update it begins at most
    1 + floor((D + H L)/c_i) after T and finishes one that was under way. With the update that met the budget:

        overshoot < B (1 + sum over ranks of (2 + floor((D + H L)/c_i)))
    """
    cluster, steps, n = check(scenario), scenario.steps_per_update, scenario.size
    for rank, unseen in zip(cluster.ranks, cluster.unseen_steps, strict=True):
        assert rank.updates_after_budget <= max(1, math.ceil(unseen / steps))
    news_s = cluster.budget_known_s - cluster.budget_met_s + (n - 1).bit_length() * scenario.control_s[1]
    fastest_s = [scenario.update_s[0] * factor for factor in scenario.slowness or (1.0,) * n]
    bound = steps * (1 + sum(2 + math.floor(news_s / fastest) for fastest in fastest_s))
    assert 0 <= cluster.overshoot_steps < bound


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [2, 5, 13])
def test_among_ranks_of_like_speed_somebody_soon_knows_the_budget(topology: str, n: int) -> None:
    """The D of the bound above: as many exchanges as the counters need to reach somebody from everybody."""
    exchanges = {"complete": 1, "ring": n - 1}.get(topology, (n - 1).bit_length() + 1)
    for seed in range(15):
        scenario = Scenario(n, topology, max_staleness=seed % 4, budget_steps=20 * n, seed=seed, **ORDINARY)
        cluster = check(scenario)
        an_exchange_s = scenario.update_s[1] + scenario.model_s[1] + scenario.control_s[1]
        assert cluster.budget_known_s - cluster.budget_met_s <= exchanges * an_exchange_s
        assert cluster.overshoot_steps <= 4 * n


@settings(reproducible, max_examples=100)
@given(scenarios(updates=12, sizes=SIZES[1:]), st.data())
def test_when_ranks_die_the_living_meet_the_budget(scenario: Scenario, data: st.DataObject) -> None:
    ranks = st.integers(0, scenario.size - 1)
    dead = data.draw(st.lists(ranks, unique=True, min_size=1, max_size=scenario.size - 1))
    together = data.draw(st.booleans())  # as when a host goes
    times = [data.draw(st.floats(0, 15))] * len(dead) if together else [data.draw(st.floats(0, 15)) for _ in dead]
    loss = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    deaths = dict(zip(dead, times, strict=True))
    cluster = check(dataclasses.replace(scenario, deaths=deaths, death_loss=loss))
    assert {rank.number for rank in cluster.living} >= set(range(scenario.size)) - set(dead)


@settings(reproducible, max_examples=50)
@given(scenarios(updates=30, sizes=SIZES[1:], speeds=False, pause_probability=0.0, **ORDINARY), st.data())
def test_poison_is_never_mixed_and_a_poisoned_rank_heals(scenario: Scenario, data: st.DataObject) -> None:
    sick = data.draw(st.lists(st.integers(1, scenario.size - 1), unique=True, min_size=1))
    begins = [data.draw(st.floats(0, 10)) for _ in sick]
    length = data.draw(st.sampled_from([1.5, 5.0]))
    whole_every = data.draw(st.sampled_from([1, 5, 1000]))
    poison = {rank: (begin, begin + length) for rank, begin in zip(sick, begins, strict=True)}

    def observe(cluster: VirtualCluster) -> None:
        for rank in cluster.ranks:
            assert rank.number in poison or math.isfinite(rank.model[0]), "poison was mixed"
            assert math.isfinite(rank.inbox[0]), "poison is in the inbox"

    cluster = check(dataclasses.replace(scenario, poison=poison, whole_every=whole_every), observe=observe)
    assert all(math.isfinite(rank.model[0]) for rank in cluster.ranks), "a rank did not heal"


def test_poison_is_refused() -> None:
    for topology in TOPOLOGIES:
        cluster = check(Scenario(5, topology, mixing="push_sum", budget_steps=200, poison={2: (3.0, 9.0)}))
        assert cluster.models_refused > 0


@reproducible
@given(scenarios(sizes=[1]))
def test_one_rank_alone_never_waits(scenario: Scenario) -> None:
    cluster = check(scenario)
    assert cluster.models_sent == cluster.mixes == 0 and cluster.overshoot_steps < scenario.steps_per_update
    alone = dataclasses.replace(scenario, max_staleness=10**6)
    assert check(alone).now == cluster.now


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_the_complete_graph_with_staleness_zero_is_exact_without_a_barrier(n: int, seed: int) -> None:
    """Every mix is the exact average of the round's models, though nobody waits for a barrier.

    A rank that mixed round r has everyone's model of r. It cannot have a model of r + 1 from i among them: i sends that
    only after its own mix of r, for which it needs this rank's model of r, and only when the lock is free, that is,
    after this rank has taken in i's model of r. (A credit must not be overtaken by its sender's next model, which comes
    an update later: control_s is shorter than update_s.)
    """
    gradients = np.random.default_rng(seed).normal(size=(n, 200))
    exact, rounds = [np.arange(n, dtype=float).mean()], [0] * n
    for step in gradients.T:
        exact.append(exact[-1] + step.mean())

    def learn(rank: int, model: np.ndarray) -> None:
        if rounds[rank] > 0:
            # Before round 0 the models differ; from then on every rank must hold the exact mean.
            assert model[0] == pytest.approx(exact[rounds[rank]], abs=1e-9)
        model += gradients[rank, rounds[rank]]
        rounds[rank] += 1

    scenario = Scenario(
        n, "complete", "uniform", max_staleness=0, budget_steps=30 * n, seed=seed,
        update_s=(0.1, 2.0), model_s=(0.01, 3.0), control_s=(0.001, 0.09), pause_probability=0.05, pause_s=(2, 5),
    )  # fmt: skip
    check(scenario, learn=learn)
    assert min(rounds) >= 30


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_signal_at_one_rank_ends_all(topology: str) -> None:
    for seed in range(10):
        scenario = Scenario(8, topology, max_staleness=seed % 3, budget_steps=10**6, seed=seed)
        cluster = VirtualCluster(scenario)
        cluster.run(until_s=10)
        cluster.ranks[5].protocol.stop_now(Stop.SIGNAL)
        cluster.run(until_s=10 + 3 * scenario.control_s[1] + 3 * scenario.update_s[1])
        assert not cluster.stuck
        assert all(rank.protocol.stop is Stop.SIGNAL for rank in cluster.ranks)


def test_a_scenario_replays_from_its_seed() -> None:
    def trace(seed: int) -> tuple:
        scenario = Scenario(
            5, "random", "push_sum", 1, 200, seed=seed, pause_probability=0.1, deaths={2: 9.0}, poison={3: (4.0, 6.0)}
        )
        cluster = check(scenario)
        models = [rank.model.tolist() for rank in cluster.ranks]
        return cluster.now, cluster.models_sent, cluster.models_refused, models, [r.staleness for r in cluster.ranks]

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def pace(topology: str, type_: type[GossipProtocol] = GossipProtocol) -> float:
    """Updates a second and rank of eight ranks with `max_staleness` 0. Unhindered, a rank makes one in 1.2 seconds."""
    scenario = Scenario(
        8, topology, max_staleness=0, budget_steps=10**9, update_s=(0.9, 1.1), pause_probability=0.2, pause_s=(0, 2),
        model_s=(0.01, 0.05), control_s=(0.001, 0.01), seed=1,
    )  # fmt: skip
    cluster = VirtualCluster(scenario, protocol=type_)
    cluster.run(until_s=100)
    before = cluster.global_steps
    cluster.run(until_s=300)
    return (cluster.global_steps - before) / 200 / 8


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_staleness_zero_keeps_its_pace(topology: str) -> None:
    assert pace(topology) > 0.4


@pytest.mark.parametrize("schedules", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_schedules_drawn_at_random_hold(schedules: int) -> None:
    tried = try_all(range(schedules))
    assert tried.failure is None, tried.failure
    assert tried.schedules == schedules and set(tried.faults) >= {"no faults", "deaths", "stops", "NaN"}


def test_a_failure_says_how_to_see_it_again() -> None:
    failure = try_all(range(200), protocol=KeepsTheWeightItSends).failure
    assert failure is not None
    match = re.search(r"Again: python -m pala.simulate check --first (\d+) --schedules 1$", failure)
    assert match is not None
    with pytest.raises(InvariantError) as error:
        check(schedule(int(match[1])), KeepsTheWeightItSends)
    assert str(error.value) in failure


# ---- planted bugs: the checks above must find them -------------------------------------------------------------------


class LosesCredits(GossipProtocol):
    def credit_returned(self, peer, wants_whole=False):
        if self.round % 5 != 4:
            super().credit_returned(peer)


class CountsReceivedWeightTwice(GossipProtocol):
    def take(self, *arguments, **options):
        received = sum(self._inbox.values())
        mix = super().take(*arguments, **options)
        self.weight += received if mix and self.push_sum else 0.0
        return mix


class KeepsTheWeightItSends(GossipProtocol):
    def sent(self, peers):
        weight = self.weight
        share = super().sent(peers)
        self.weight = weight
        return share


class LosesTheWeightOfTheRefused(GossipProtocol):
    def model_refused(self, weight):
        super().model_refused(0.0)


class PaysNoDebtsWhileItWaits(GossipProtocol):
    def update_finished(self, steps, healthy=True):
        super().update_finished(steps, healthy)
        self.just_finished = True

    def sendable(self):
        peers = super().sendable() if self.just_finished else ()
        self.just_finished = False
        return peers


class IgnoresTheLock(GossipProtocol):
    def sendable(self):
        for peer in self._owed:
            self.lock.release(peer)
        return super().sendable()


class WaitsOneUpdateTooLate(GossipProtocol):
    @property
    def must_wait(self):
        return super().must_wait and self.staleness > self.max_staleness + 1


class AddsUpWhatItHears(GossipProtocol):
    def news(self, local_steps, stop):
        local_steps = local_steps.copy()
        local_steps[self.rank] += self.local_steps[self.rank]
        super().news(local_steps, stop)


class TellsNobodyOfTheEnd(GossipProtocol):
    def tell_stop(self):
        return ()


class TellsTheEndOnlyOnce(GossipProtocol):
    def peer_died(self, peer):
        told = self._stop_told
        super().peer_died(peer)
        self._stop_told = told


class ForgetsTheDead(GossipProtocol):
    def peer_died(self, peer):
        pass


class NeverSendsOnceMore(GossipProtocol):
    def clock(self, now_s):
        self._again_s = math.inf
        super().clock(now_s)


class HealsOnlyWithAFullRound(GossipProtocol):
    def take(self, everything=False):
        return super().take(everything) if self.has_model or self.can_mix or everything else None

    @property
    def must_wait(self):
        return super().must_wait or (not self.has_model and self.stop is Stop.NONE and not self.can_mix)


class WaitsForTheStopped(GossipProtocol):
    @property
    def must_wait(self):
        self._gave_up = False
        return super().must_wait


class KeepsItsStaleModel(GossipProtocol):
    def clock(self, now_s):
        super().clock(now_s)
        self._returning = False
        self._stale.clear()


class TakesWhatWasSentLongAgo(GossipProtocol):
    def is_stale(self, sender, took_s):
        super().is_stale(sender, took_s)
        return False


class TakesWhoWaitsForAnAnswerForSilent(GossipProtocol):
    def _in_touch(self):
        return [peer for peer in self.living if peer not in self.silent]


class TakesTheDeadsWeightForLost(GossipProtocol):
    def peer_died(self, peer):
        super().peer_died(peer)
        self._inbox.pop(peer, None)


class CountsTheDeadsStepsTwice(GossipProtocol):
    def peer_died(self, peer):
        if peer in self.living:
            self.base_steps += int(self.local_steps[peer])
        super().peer_died(peer)


class HealsFromParts(GossipProtocol):
    def model_received(self, sender, weight, whole=True):
        return super().model_received(sender, weight)


class KeepsPartsWhileItMustHeal(GossipProtocol):
    def drop_parts(self):
        return ()


class ForgetsWhoAsked(GossipProtocol):
    def credit_returned(self, peer, wants_whole=False):
        super().credit_returned(peer)


BUGS = {
    LosesCredits: "deadlock",
    CountsReceivedWeightTwice: "push-sum weight",
    KeepsTheWeightItSends: "push-sum weight",
    LosesTheWeightOfTheRefused: "push-sum weight",
    PaysNoDebtsWhileItWaits: "deadlock",
    IgnoresTheLock: "process lock|sent twice on one credit",
    WaitsOneUpdateTooLate: "staleness",
    AddsUpWhatItHears: "known steps",
    TellsNobodyOfTheEnd: "deadlock",
    ForgetsTheDead: "deadlock",
    NeverSendsOnceMore: "deadlock",
    CountsTheDeadsStepsTwice: "known steps",
    HealsOnlyWithAFullRound: "deadlock",
    HealsFromParts: "healed by a part",
    KeepsPartsWhileItMustHeal: "deadlock|stale",
    WaitsForTheStopped: "deadlock|waited",
    KeepsItsStaleModel: "stale",
    TakesWhatWasSentLongAgo: "stale",
    TakesTheDeadsWeightForLost: "push-sum weight",
}


@pytest.mark.parametrize(("bug", "symptom"), BUGS.items())
def test_a_planted_bug_is_found(bug: type[GossipProtocol], symptom: str) -> None:
    with pytest.raises((InvariantError, AssertionError), match=symptom):
        for number in range(1000):
            check(schedule(number), bug)


@pytest.mark.parametrize(
    ("bug", "symptom", "special"),
    [
        (TellsTheEndOnlyOnce, "deadlock", {"deaths": dict.fromkeys(range(1, 7), 10.5), "death_loss": 1.0}),
        pytest.param(
            ForgetsWhoAsked, "deadlock", {"poison": {0: (2.0, 9.0), 2: (2.0, 9.0)}, "whole_every": 10**9},
            marks=pytest.mark.slow,
        ),
        (TakesWhoWaitsForAnAnswerForSilent, "staleness",
         {"size": 2, "cut_s": (10.3, 70.0), "cut_at": 1, "patience_s": 20.0, "budget_steps": 400}),
    ],
)  # fmt: skip
def test_a_planted_bug_that_needs_bad_luck_is_found(bug: type[GossipProtocol], symptom: str, special: dict) -> None:
    """The schedules above do not find these, or not soon: the deaths must come just when the news of the end does;
    nobody may send a whole model by himself; models must be on their way both ways when the only link is cut."""
    with pytest.raises(InvariantError, match=symptom):
        for seed in range(400):
            network = list(NETWORKS.values())[seed % 5]
            fixed = {"size": 8, "topology": TOPOLOGIES[seed % 4], "max_staleness": STALENESS[seed // 4 % 3]}
            check(Scenario(**{"budget_steps": 80, "seed": seed} | fixed | network | special), bug)


def test_a_wrong_fraction_is_found_in_lockstep() -> None:
    class ForgetsItself(GossipProtocol):
        def take(self, *arguments, **options):
            return super().take(*arguments, **options)._replace(fraction=1.0)

    with pytest.raises(AssertionError):
        lockstep([ForgetsItself(i, 3, topology="ring", mixing="uniform", max_staleness=0, budget_steps=9, seed=0)
                  for i in range(3)])  # fmt: skip


def test_dropping_debts_and_merging_models_costs_the_pace() -> None:
    """What the protocol did before: with fewer and fewer models about, the ranks come to take turns."""

    class DropsAndMerges(GossipProtocol):
        def update_finished(self, steps, healthy=True):
            self._owed.clear()
            self._rounds_due = 1
            super().update_finished(steps, healthy)

    assert pace("random", DropsAndMerges) < 0.25
