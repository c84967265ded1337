"""The gossip protocol and its driver on thousands of simulated schedules.

`check` plays one schedule on the virtual cluster and checks, after every event and at the end, what must hold in any.
The tests vary the schedules, and plant bugs, in the protocol and in the driver, to see that `check` finds them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.check import Tried, try_in_batches
from explorer.faulty_cluster import FaultyCluster, Schedule
from explorer.planted import (
    AcceptsPoison,
    AddsNothing,
    AddsUpWhatItHears,
    AsksNobody,
    DropsAndMerges,
    FillsASnapshotOnItsWay,
    ForgetsTheDead,
    ForgetsWhoAsked,
    HasNoSpareSnapshots,
    HealsFromParts,
    HealsOnlyWithAFullRound,
    IgnoresTheLock,
    KeepsItsStaleModel,
    KeepsTheWeightItSends,
    LeavesThePlacesOfSparesEmpty,
    LosesCredits,
    Stumbles,
    TakesEveryDeathForItsTurn,
    TakesWhoWaitsForAnAnswerForSilent,
    TellsTheEndOnlyOnce,
    WaitsForTheStopped,
    WaitsOneUpdateTooLate,
)
from explorer.schedules import (
    MIXINGS,
    NETWORKS,
    STALENESS,
    TOGETHER,
    InvariantError,
    MakeProtocol,
    check,
    pushed,
    schedule,
)
from pala.config import catalogue
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.protocol import GossipProtocol
from support import REPOSITORY
from support.helpers import slow_among, slow_but_for, wait_for
from support.mpi import assert_all_end, processes_in

pytestmark = pytest.mark.often(
    "test_poison_is_refused",
    "test_a_bug_planted_in_the_driver_is_found",
    "test_what_the_dead_have_sent_comes_before_a_rank_that_was_away_has_mixed",
    "test_a_scenario_replays_from_its_seed",
    "test_who_left_as_training_ends_trains_no_more",
    "test_one_rank_alone_never_waits",
    "test_stopped_peers_that_hold_all_snapshots_hold_up_nobody",
)

SIZES = [1, 2, 3, 5, 8, 13]
reproducible = settings(derandomize=True, deadline=None, max_examples=30)


# ---- simulated schedules ---------------------------------------------------------------------------------------------


ORDINARY = NETWORKS["ordinary"]
ALL_MIXINGS = (*MIXINGS, "paired")
TOPOLOGIES = list(catalogue.TOPOLOGIES)
TOPOLOGIES_OF = {mixing: [t for t in TOPOLOGIES if (mixing, t) != ("paired", "complete")] for mixing in ALL_MIXINGS}
TOPOLOGIES_AND_MIXINGS = [(topology, mixing) for mixing in ALL_MIXINGS for topology in TOPOLOGIES_OF[mixing]]


@st.composite
def scenarios(draw, updates: int = 20, speeds: bool = True, mixings=ALL_MIXINGS, **fixed) -> Schedule:
    """Any cluster on any kind of schedule."""
    mixing = draw(st.sampled_from(mixings))
    size = draw(st.sampled_from(fixed.pop("sizes", SIZES)))
    steps = draw(st.sampled_from([1, 80]))
    slowness = draw(st.sampled_from([(), (10.0,), (1.0, 5.0), (1.0, 1.2, 0.8)])) if speeds else ()
    choices = {
        "topology": draw(st.sampled_from(TOPOLOGIES_OF[mixing])),
        "mixing": mixing,
        "max_staleness": draw(st.sampled_from(STALENESS)),
        "seed": draw(st.integers(0, 2**32)),
        "steps_per_update": steps,
        "budget_steps": size * updates * steps + draw(st.integers(0, steps)),
        "slowness": (slowness + (1.0,) * size)[:size] if len(slowness) == 1 else (slowness * size)[:size],
    }
    return Schedule(size, **NETWORKS[draw(st.sampled_from(list(NETWORKS)))] | choices | fixed)


@settings(reproducible, max_examples=80)
@given(scenarios(again_s=1e6))
def test_any_schedule_ends_without_help_from_sending_again(scenario: Schedule) -> None:
    check(scenario)


def weighted_sum(cluster: FaultyCluster) -> np.ndarray:
    """Sum of push-sum weight times model, of the living, in their inboxes and on the way."""
    held = [rank.state.weight * rank.model + rank.models.inbox for rank in cluster.living]
    sent = (on_its_way.data for on_its_way in cluster.on_their_way.values())
    return np.sum(held + [s.message.weight * s.model for s in sent if s.model is not None], axis=0)


@reproducible
@given(scenarios(mixings=MIXINGS))
def test_pure_mixing_keeps_the_push_sum_mean_and_stays_in_the_hull(scenario: Schedule) -> None:
    models = np.random.default_rng(scenario.seed).normal(size=(scenario.size, 2))

    def observe(cluster: FaultyCluster) -> None:
        if scenario.mixing == "push_sum":
            assert abs(weighted_sum(cluster) - models.sum(axis=0)).max() < 1e-9

    cluster = check(scenario, models=models, observe=observe)
    for rank in cluster.ranks:
        assert (models.min(axis=0) - 1e-12 <= rank.model).all() and (rank.model <= models.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize(("topology", "mixing"), TOPOLOGIES_AND_MIXINGS)
@pytest.mark.parametrize("max_staleness", slow_but_for(STALENESS, STALENESS[0]))
def test_pure_mixing_ends_in_agreement(topology: str, mixing: str, max_staleness: int) -> None:
    """60 updates a rank. The ring of 8 contracts with cos(pi/8): 0.924^60 = 0.009 at best, in lockstep."""
    for n, largest in ((2, 1e-9), (5, 0.05 if topology == "ring" else 1e-4), (8, 0.3 if topology == "ring" else 1e-3)):
        schedule = Schedule(n, topology, mixing, max_staleness, budget_steps=60 * n, seed=n, update_s=(0.5, 1.5))
        cluster = check(schedule)
        models = np.concatenate([rank.model for rank in cluster.ranks])
        assert models.std() < largest * np.arange(n).std()


@settings(reproducible, max_examples=50)
@given(scenarios())
def test_the_overshoot_of_the_budget_is_bounded(scenario: Schedule) -> None:
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
    assert 0 <= cluster.global_steps - scenario.budget_steps < bound


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", slow_but_for([2, 5, 13], 2, 5))
def test_among_ranks_of_like_speed_somebody_soon_knows_the_budget(topology: str, n: int) -> None:
    """The D of the bound above: as many exchanges as the counters need to reach somebody from everybody."""
    exchanges = {"complete": 1, "ring": n - 1}.get(topology, (n - 1).bit_length() + 1)
    for seed in range(5):
        scenario = Schedule(n, topology, max_staleness=seed % 4, budget_steps=20 * n, seed=seed, **ORDINARY)
        cluster = check(scenario)
        an_exchange_s = scenario.update_s[1] + scenario.model_s[1] + scenario.control_s[1]
        assert cluster.budget_known_s - cluster.budget_met_s <= exchanges * an_exchange_s
        assert cluster.global_steps - scenario.budget_steps <= 4 * n


@settings(reproducible, max_examples=50)
@given(scenarios(updates=12, sizes=SIZES[1:]), st.data())
def test_when_ranks_die_the_living_meet_the_budget(scenario: Schedule, data: st.DataObject) -> None:
    ranks = st.integers(0, scenario.size - 1)
    dead = data.draw(st.lists(ranks, unique=True, min_size=1, max_size=scenario.size - 1))
    together = data.draw(st.booleans())  # as when a host goes
    times = [data.draw(st.floats(0, 15))] * len(dead) if together else [data.draw(st.floats(0, 15)) for _ in dead]
    loss = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    deaths = dict(zip(dead, times, strict=True))
    check(dataclasses.replace(scenario, deaths=deaths, death_loss=loss))


@settings(reproducible, max_examples=80)
@given(scenarios(updates=25, sizes=SIZES[2:]), st.data())
def test_spares_take_the_places_of_ranks_that_die(scenario: Schedule, data: st.DataObject) -> None:
    """In quick succession, together, before and after spares have a model, spares too; and of ranks that leave."""
    spares = data.draw(st.integers(1, min(4, scenario.size - 2)))
    survivor = data.draw(st.integers(0, scenario.size - spares - 1))
    others = st.integers(0, scenario.size - 1).filter(lambda rank: rank != survivor)
    dead = data.draw(st.lists(others, unique=True, min_size=1, max_size=scenario.size - 1))
    deaths = {rank: data.draw(st.floats(0, 15)) for rank in dead}
    wake_up_s = data.draw(st.sampled_from([(0.0, 0.0), (0.0, 6.0)]))
    loss = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    leaves = {rank: deaths.pop(rank) for rank in dead if rank < scenario.size - spares and data.draw(st.booleans())}
    faults = {"deaths": deaths, "leaves": leaves, "death_loss": loss}
    check(dataclasses.replace(scenario, spares=spares, wake_up_s=wake_up_s, **faults))


@settings(reproducible, max_examples=50)
@given(scenarios(updates=30, sizes=SIZES[1:], speeds=False, pause_probability=0.0, **ORDINARY), st.data())
def test_poison_is_never_mixed_and_a_poisoned_rank_heals(scenario: Schedule, data: st.DataObject) -> None:
    sick = data.draw(st.lists(st.integers(1, scenario.size - 1), unique=True, min_size=1))
    begins = [data.draw(st.floats(0, 10)) for _ in sick]
    length = data.draw(st.sampled_from([1.5, 5.0]))
    whole_every = data.draw(st.sampled_from([1, 5, 1000]))
    poison = {rank: (begin, begin + length) for rank, begin in zip(sick, begins, strict=True)}

    def observe(cluster: FaultyCluster) -> None:
        for rank in cluster.ranks:
            assert rank.number in poison or math.isfinite(rank.model[0]), "poison was mixed"
            assert math.isfinite(rank.models.inbox[0]), "poison is in the inbox"

    cluster = check(dataclasses.replace(scenario, poison=poison, whole_every=whole_every), observe=observe)
    assert all(math.isfinite(rank.model[0]) for rank in cluster.ranks), "a rank did not heal"


def models_refused(cluster: FaultyCluster) -> int:
    return sum(rank.state.counts["models_refused"] for rank in cluster.ranks)


@pytest.mark.parametrize("mixing", ["push_sum", "paired"])
def test_poison_is_refused(mixing: str) -> None:
    for topology in TOPOLOGIES_OF[mixing]:
        cluster = check(Schedule(5, topology, mixing=mixing, budget_steps=200, poison={2: (3.0, 9.0)}))
        assert models_refused(cluster) > 0


@reproducible
@given(scenarios(sizes=[1]))
def test_one_rank_alone_never_waits(scenario: Schedule) -> None:
    cluster = check(scenario)
    assert cluster.models_sent == cluster.ranks[0].driver.num_mixes == 0
    assert cluster.global_steps - scenario.budget_steps < scenario.steps_per_update
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

    scenario = Schedule(
        n, "complete", "uniform", max_staleness=0, budget_steps=30 * n, seed=seed,
        update_s=(0.1, 2.0), model_s=(0.01, 3.0), control_s=(0.001, 0.09), pause_probability=0.05, pause_s=(2, 5),
        again_s=1e6, send_buffers=n,  # what is sent once more, or waits for memory, would count in another round
    )  # fmt: skip
    check(scenario, learn=learn)
    assert min(rounds) >= 30


@pytest.mark.parametrize(("topology", "mixing"), TOPOLOGIES_AND_MIXINGS)
def test_a_signal_at_one_rank_ends_all(topology: str, mixing: str) -> None:
    for seed in range(10):
        scenario = Schedule(8, topology, mixing, max_staleness=seed % 3, budget_steps=10**6, seed=seed)
        cluster = FaultyCluster(scenario)
        cluster.run(until_s=10)
        cluster.ranks[5].driver.end(Stop.SIGNAL)
        cluster.run(until_s=10 + 3 * scenario.control_s[1] + 3 * scenario.update_s[1])
        assert not cluster.stuck
        assert all(rank.state.budget.stop is Stop.SIGNAL for rank in cluster.ranks)


def test_the_end_of_training_is_not_that_of_the_last_timer() -> None:
    cluster = check(Schedule(size=2, max_staleness=0, budget_steps=20, again_s=1000.0))
    assert cluster.budget_met_s <= cluster.ended_s < 40 and cluster.now > 1000


@pytest.mark.parametrize("mixing", ["push_sum", "paired"])
def test_a_scenario_replays_from_its_seed(mixing: str) -> None:
    def trace(seed: int) -> tuple:
        scenario = Schedule(
            5, "random", mixing, 1, 200, seed=seed, pause_probability=0.1, deaths={2: 9.0}, poison={3: (4.0, 6.0)}
        )
        cluster = check(scenario)
        models = [rank.model.tolist() for rank in cluster.ranks]
        return cluster.now, cluster.num_events, cluster.models_sent, models_refused(cluster), models

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def pace(topology: str, make: MakeProtocol = make_protocol, mixing: str = "uniform") -> float:
    """Updates a second and rank of eight ranks with `max_staleness` 0. Unhindered, a rank makes one in 1.2 seconds."""
    scenario = Schedule(
        8, topology, mixing, max_staleness=0, budget_steps=10**9, update_s=(0.9, 1.1), pause_probability=0.2,
        pause_s=(0, 2), model_s=(0.01, 0.05), control_s=(0.001, 0.01), seed=1,
    )  # fmt: skip
    cluster = FaultyCluster(scenario, protocol=make)
    cluster.run(until_s=60)
    before = cluster.global_steps
    cluster.run(until_s=180)
    return (cluster.global_steps - before) / 120 / 8


@pytest.mark.parametrize(("topology", "mixing"), TOPOLOGIES_AND_MIXINGS)
def test_staleness_zero_keeps_its_pace(topology: str, mixing: str) -> None:
    assert pace(topology, mixing=mixing) > 0.4


def try_all(numbers: range, protocol: MakeProtocol = make_protocol) -> Tried:
    """What came of these schedules, up to the first failure."""
    *_, tried = try_in_batches(numbers, protocol=protocol)
    return tried


@pytest.mark.parametrize("schedules", [50, pytest.param(3000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("first", "met"),
    [(0, {"no faults", "deaths", "stops", "NaN"}), (TOGETHER, {"deaths and leaves and spares and NaN"})],
)
def test_schedules_drawn_at_random_hold(first: int, met: set[str], schedules: int) -> None:
    tried = try_all(range(first, first + schedules))
    assert tried.failure is None, tried.failure
    found = {*tried.faults} | {kind for kinds in tried.faults for kind in kinds.split(" and ")}
    assert tried.schedules == schedules and found >= met


def test_from_a_million_on_ranks_leave_join_die_and_hold_nan_in_each_schedule() -> None:
    for number in range(TOGETHER, TOGETHER + 200):
        drawn = schedule(number)
        assert drawn.leaves and drawn.spares and drawn.deaths and drawn.poison, number
        assert not drawn.leaves.keys() & drawn.deaths.keys()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("check --first 200 --schedules 60 --processes 1", "60 schedules held"),
        ("explore --mixings uniform --staleness 1 --faults stop nan patience refused", "wait forever"),
    ],
)
def test_what_is_compiled_does_what_its_source_does(command: str, expected: str) -> None:
    programs = [[str(Path(__file__).parent / "compiled.sh")], [sys.executable, str(REPOSITORY / "tests" / "explorer")]]
    said = [
        subprocess.run([*program, *command.split()], text=True, stdout=subprocess.PIPE).stdout for program in programs
    ]
    compiled, interpreted = (re.sub(r"[\d,]+ a minute|yes, \d+|\| ranks.*", "", text, flags=re.DOTALL) for text in said)
    assert compiled == interpreted and expected in compiled


@pytest.mark.parametrize("number", [7478, 7479])
def test_a_lone_rank_whose_patience_had_ended_waits_for_a_spare_that_joins(number: int) -> None:
    """It continued beside the spare without a mix, as it had done while its only peer was stopped."""
    check(schedule(number))


def test_a_rank_that_was_away_with_all_others_may_mix_a_model_as_old_as_its_own() -> None:
    """All are stopped for 500 s, this one first; it waits for a fresh model in vain, and what comes then is old."""
    cluster = check(schedule(324_448))
    assert cluster.ranks[1].state.counts["waits_given_up"] == 1


def test_what_the_dead_have_sent_comes_before_a_rank_that_was_away_has_mixed() -> None:
    """It came 7 s later, as if its sender, dead for long, had been stopped until then."""
    check(schedule(420_533))


def test_a_spare_that_was_told_to_leave_in_its_sleep_is_replaced() -> None:
    """It goes after its first update, long after it was told; the check once expected the next spare before that."""
    cluster = check(dataclasses.replace(schedule(142_370), poison={}))
    assert cluster.last_gone_s > max(cluster.schedule.leaves.values()) + 10
    assert [rank.number for rank in cluster.living if rank.asleep] == [3]


@pytest.mark.parametrize("number", [1_776_777, 1_890_103, 1_981_269])
def test_who_waits_to_heal_gets_a_model_in_step_on_a_ring(number: int) -> None:
    """Its sender was offered a model first at each update, and in step one exchange an update is enough."""
    check(schedule(number))


def test_who_left_as_training_ends_trains_no_more() -> None:
    """It counted as one that trains, beside the spare in its place."""
    check(schedule(1_000_152))


def test_who_leaves_hears_of_the_death_of_who_assured_it() -> None:
    """Its news cannot arrive there. It went with the last usable model, as if the news had come."""
    check(schedule(1_017_975))


def test_without_a_usable_model_training_ends() -> None:
    """The last rank that has one is killed; or a rank whose own is NaN is alone, when two others leave together."""
    assert check(schedule(1_019_162)).models_lost
    cluster = check(schedule(1_051_447))
    assert not cluster.models_lost and 2 in cluster.dead
    assert [rank.state.budget.stop for rank in cluster.living] == [Stop.ALL_LEAVE]


@pytest.mark.parametrize("number", [1_027_237, 1_039_718])
def test_the_job_ends_where_the_usable_models_leave_in_the_same_moment(number: int) -> None:
    """Who has one counts on another that leaves; each that trains on holds NaN. The last to leave finds that out."""
    cluster = check(schedule(number))
    assert {rank.state.budget.stop for rank in cluster.living} == {Stop.ALL_LEAVE}
    assert [rank.number for rank in cluster.living if rank.state.has_left and rank.state.has_model]


def test_a_rank_that_finds_out_late_that_its_model_is_nan_may_be_without_one_at_the_end() -> None:
    """It had waited in step for a slow rank, which answered another peer each time, and patience has no end here."""
    cluster = check(schedule(1_137_403))
    without = [rank for rank in cluster.living if not rank.state.has_model]
    assert [rank.number for rank in without] == [3] and without[0].wait_began_s > 0.9 * cluster.budget_known_s


def test_questions_of_a_rank_that_leaves_leave_no_credit_out() -> None:
    """Eight of them were on the way to a peer, so the reply to its offer was not sent, and its process lock stayed."""
    check(schedule(1_045_975))


def test_a_failure_says_how_to_see_it_again() -> None:
    failure = try_all(range(0, 200, 2), protocol=KeepsTheWeightItSends).failure
    assert failure is not None
    match = re.search(r"Again: python tests/explorer check --first (\d+) --schedules 1$", failure)
    assert match is not None
    with pytest.raises(InvariantError) as error:
        check(schedule(int(match[1])), KeepsTheWeightItSends)
    assert str(error.value) in failure


def test_a_failure_of_any_kind_names_its_schedule() -> None:
    failure = try_all(range(0, 2, 2), protocol=Stumbles).failure
    assert failure is not None and "KeyError: 'offer'" in failure and "--first 0 --schedules 1" in failure


# ---- planted bugs: the checks above must find them -------------------------------------------------------------------


# Of each symptom one or two; `test_explore.py` finds the others.
BUGS = {
    LosesCredits: "deadlock",
    KeepsTheWeightItSends: "push-sum weight",
    IgnoresTheLock: "process lock|push-sum weight",
    WaitsOneUpdateTooLate: "staleness",
    AddsUpWhatItHears: "known steps",
    ForgetsTheDead: "places: ranks",
    HealsOnlyWithAFullRound: "deadlock|stale",
    HealsFromParts: "healed by a part",
    WaitsForTheStopped: "deadlock|waited",
    KeepsItsStaleModel: "stale",
    TakesEveryDeathForItsTurn: "places: ranks",
    LeavesThePlacesOfSparesEmpty: "places: ranks",
    AsksNobody: "places: nobody",
}


# The schedule to begin with, where those before it take long and do not find the bug, or only after long.
FIRST = {
    ForgetsTheDead: 9,
    HealsOnlyWithAFullRound: 6,
    HealsFromParts: 16,
    TakesEveryDeathForItsTurn: 42,
    LeavesThePlacesOfSparesEmpty: 9,
    AsksNobody: 42,
}


@pytest.mark.parametrize(("bug", "symptom"), BUGS.items())
def test_a_planted_bug_is_found(bug: type[GossipProtocol], symptom: str) -> None:
    with pytest.raises((InvariantError, AssertionError), match=symptom):
        for number in range(FIRST.get(bug, 0), 1000):
            check(pushed(number), bug)


@pytest.mark.parametrize(
    ("bug", "symptom", "first", "special"),
    [
        (TellsTheEndOnlyOnce, "deadlock", 28, {"deaths": dict.fromkeys(range(1, 7), 10.5), "death_loss": 1.0}),
        (ForgetsWhoAsked, "deadlock", 3, {"poison": {0: (2.0, 9.0), 2: (2.0, 9.0)}, "whole_every": 10**9}),
        (
            TakesWhoWaitsForAnAnswerForSilent, "staleness", 60,
            {"size": 2, "cut_s": (10.3, 70.0), "cut_at": 1, "patience_s": 20.0, "budget_steps": 400},
        ),
    ],
)  # fmt: skip
def test_a_planted_bug_that_needs_bad_luck_is_found(
    bug: type[GossipProtocol], symptom: str, first: int, special: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedules above do not find these, or not soon: the deaths must come just when the news of the end does;
    nobody may send a whole model by himself; models must be on their way both ways when the only link is cut.

    `first`: the seed to begin with, as above."""
    monkeypatch.setattr("explorer.schedules.END_S", 2000.0)  # long after any of these ends without the bug
    with pytest.raises(InvariantError, match=symptom):
        for seed in range(first, 400):
            network = list(NETWORKS.values())[seed % 5]
            fixed = {"size": 8, "topology": TOPOLOGIES[seed % 4], "max_staleness": STALENESS[seed // 4 % 3]}
            check(Schedule(**{"budget_steps": 80, "seed": seed} | fixed | network | special), bug)


def test_dropping_debts_and_merging_models_costs_the_pace() -> None:
    """What the protocol did before: with fewer and fewer models about, the ranks come to take turns."""
    assert pace("random", DropsAndMerges) < 0.3


# ---- the same in the driver ------------------------------------------------------------------------------------------


DRIVER_BUGS = {
    AcceptsPoison: "poison|deadlock|nan",
    AddsNothing: "push-sum weight|zero|nan",
    FillsASnapshotOnItsWay: "wrote over a message",
}


DRIVER_FIRST = {AcceptsPoison: 66}


@pytest.mark.filterwarnings("ignore:.*divide:RuntimeWarning")
@pytest.mark.parametrize(("bug", "symptom"), DRIVER_BUGS.items())
def test_a_bug_planted_in_the_driver_is_found(bug: type[GossipDriver], symptom: str) -> None:
    with pytest.raises((InvariantError, AssertionError, ArithmeticError), match=symptom):
        for number in range(DRIVER_FIRST.get(bug, 0), 1000):
            check(pushed(number), driver=bug)


def mixes_beside_stopped_peers(driver: type[GossipDriver]) -> int:
    """Mixes of two ranks while the other two are stopped, in 150 updates or so after their patience has ended."""
    stops = {2: (5.0, 1e4), 3: (5.0, 1e4)}
    scenario = Schedule(4, budget_steps=10**9, stops=stops, patience_s=20.0, seed=3)
    cluster, mixes = FaultyCluster(scenario, driver=driver), []
    for until_s in (50.0, 200.0):
        cluster.run(until_s=until_s)
        mixes.append(sum(rank.driver.num_mixes for rank in cluster.ranks[:2]))
    return mixes[1] - mixes[0]


def test_stopped_peers_that_hold_all_snapshots_hold_up_nobody() -> None:
    assert mixes_beside_stopped_peers(GossipDriver) > 150
    assert mixes_beside_stopped_peers(HasNoSpareSnapshots) == 0


@pytest.mark.parametrize(
    ("number", "draw_s"), slow_among([(signal.SIGTERM, 0.0), (signal.SIGKILL, 5.0)], signal.SIGKILL)
)
def test_its_processes_end_with_it(number: signal.Signals, draw_s: float, tmp_path: Path) -> None:
    explorer = str(REPOSITORY / "tests" / "explorer")
    command = [sys.executable, explorer, "check", "--schedules", "1000000", "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as check:
        try:
            wait_for(lambda: len(processes_in(tmp_path)) >= 4, what="two workers")  # and multiprocessing's own tracker
            time.sleep(draw_s)  # they begin, or try schedules
            check.send_signal(number)
            assert check.wait(60) == -number
        finally:
            check.kill()
    assert_all_end(tmp_path, "its workers")
