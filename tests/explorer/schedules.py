"""Any schedule from a seed, and what must hold in every one: the gossip protocol put to the test on a virtual cluster.

A schedule draws everything from its number: ranks, topology, mixing, speeds, delays, and faults (ranks that die, that
are stopped and continue, whose model becomes NaN). So a failure replays from that number alone.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from explorer.faulty_cluster import FaultyCluster, FaultyRank, Schedule
from pala.config.catalogue import RULES, TOPOLOGIES
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import Rules

MIXINGS = tuple(name for name, rule in RULES.items() if not rule.by_pairs)
STALENESS = (0, 1, 3, 10)
SIZES = (2, 3, 4, 5, 8, 13, 32, 64)
_SIZE_WEIGHTS = (8, 8, 8, 8, 6, 4, 1, 1)
NETWORKS: dict[str, dict[str, Any]] = {
    "ordinary": {"update_s": (0.8, 1.2)},
    "in step": {"update_s": (1.0, 1.0), "model_s": (0.1, 0.1), "control_s": (0.1, 0.1), "wake_s": (0.0, 0.0)},
    "uneven": {"update_s": (0.1, 3.0), "model_s": (0.001, 5.0), "control_s": (0.001, 5.0), "wake_s": (0.0, 1.0)},
    "slow network": {"update_s": (0.1, 0.2), "model_s": (1.0, 3.0), "control_s": (0.5, 3.0)},
    "pauses": {"update_s": (0.8, 1.2), "pause_probability": 0.05, "pause_s": (5.0, 30.0), "send_buffers": 1},
}
_PATIENCE_S = 20.0
END_S = 1e5
TOGETHER = 1_000_000
"""The first number of the schedules in each of which ranks leave, spares join, ranks die, and models are NaN."""
MakeProtocol = Callable[[Rules], GossipProtocol]


class InvariantError(Exception):
    """Something did not hold that must hold in every schedule."""


def schedule(number: int) -> Schedule:
    """Return the schedule of this number. Every second one is of a paired exchange. From number `TOGETHER` on, each has
    four faults at once."""
    scenario = pushed(number // 2, number >= TOGETHER)
    if number % 2 == 0:
        return scenario
    topology = "random" if TOPOLOGIES[scenario.topology].to_all else scenario.topology
    return dataclasses.replace(scenario, mixing="paired", topology=topology)


def pushed(number: int, together: bool = False) -> Schedule:
    """Return a schedule of a rule by which models go one way. `together`: with all faults of `TOGETHER`."""
    draw = random.Random(number)
    size = max(4 * together, draw.choices(SIZES, _SIZE_WEIGHTS)[0])
    steps = draw.choice((1, 80))
    slowness = draw.choice(((1.0,), (1.0,), (1.0, 5.0), (1.0, 1.2, 0.8), (10.0,) + (1.0,) * (size - 1)))
    fault = draw.choice(("none", "deaths", "stops", "poison", "deaths and stops", "cut"))
    fault = "deaths" if together else fault
    # A rank's updates; far more after a fault that others outlive, to see that all come together again.
    updates = 150 if fault in ("cut", "deaths and stops") and size <= 8 else draw.choice((12, 20))
    options: dict[str, Any] = NETWORKS[draw.choice(list(NETWORKS))] | {
        "topology": draw.choice(list(TOPOLOGIES)), "mixing": draw.choice(MIXINGS),
        "max_staleness": draw.choice(STALENESS),
        "budget_steps": size * updates * steps + draw.randint(0, steps), "steps_per_update": steps,
        "slowness": (slowness * size)[:size], "seed": draw.randrange(2**32),
    }  # fmt: skip
    some = draw.sample(range(size), draw.randint(3 if together else 1, size - 1))
    end_s = updates * options["update_s"][1]  # about
    if "deaths" in fault:
        latest_s = end_s if together else 1.5 * end_s
        one_s = draw.uniform(0, latest_s) if draw.random() < 0.5 else None  # as when a host goes
        times_s = {rank: draw.uniform(0, latest_s) for rank in some}
        options["deaths"] = times_s if one_s is None else dict.fromkeys(some, one_s)
        options["death_loss"] = draw.choice((0.0, 0.5, 1.0))
    if "stops" in fault:
        update_s = options["update_s"][1] * max(options["slowness"])  # no rank knows its own pace before two updates
        begins = {rank: draw.uniform(2, 15) * update_s for rank in range(size) if draw.random() < 0.5}
        long_s = 60.0 if updates == 150 else 500.0
        options["stops"] = {rank: (begin, begin + draw.choice((5.0, long_s))) for rank, begin in begins.items()}
        options["patience_s"] = _PATIENCE_S  # elsewhere none: a rank that waited would then end every deadlock
    if fault == "cut":
        begin_s = draw.uniform(0, 0.3 * end_s)
        options["cut_s"], options["cut_at"] = (begin_s, begin_s + draw.choice((5.0, 60.0))), draw.randrange(1, size)
        options["patience_s"] = _PATIENCE_S
    if fault == "poison":
        begins = {rank: draw.uniform(0, 10) for rank in some}
        length_s = draw.choice((1.5, 5.0))
        options["poison"] = {rank: (begin, begin + length_s) for rank, begin in begins.items()}
        options["whole_every"] = draw.choice((1, 5, 1000))
    if options.get("deaths") and size > 2 and (draw.random() < 0.5 or together):
        options["spares"] = draw.randint(1, min(4, size - 2))
        options["deaths"].pop(draw.randrange(size - options["spares"]), None)  # with all models there would be nothing
        options["wake_up_s"] = draw.choice(((0.0, 0.1), (1.0, 5.0)))
    if fault == "deaths" and (draw.random() < 0.5 or together):
        options["leaves"] = {rank: options["deaths"].pop(rank) for rank in list(options["deaths"])[::2]}
    if options.get("leaves") and (draw.random() < 0.5 or together):
        options["poison"] = _poison_beside_leaves(draw, options, size - options.get("spares", 0))
    return Schedule(size, **options)


def _poison_beside_leaves(
    draw: random.Random, options: dict[str, Any], trainers: int
) -> dict[int, tuple[float, float]]:
    """Return when models become NaN before ranks are told to leave; one keeps its own: the first
    that is to leave, if it trains."""
    leaving = min(options["leaves"], key=options["leaves"].__getitem__)
    safe = leaving if leaving < trainers else draw.choice([r for r in range(trainers) if r not in options["deaths"]])
    others = [rank for rank in range(trainers) if rank != safe]
    told_s = min(options["leaves"].values())  # what becomes NaN later, when all are assured, nobody can know
    return {
        rank: (max(0.0, told_s - draw.choice((1.5, 5.0))), told_s)
        for rank in draw.sample(others, draw.choice((1, len(others))))
    }


def check(
    scenario: Schedule, protocol: MakeProtocol = make_protocol, driver: type[GossipDriver] = GossipDriver,
    observe: Callable[[FaultyCluster], None] | None = None, **options: Any,
) -> FaultyCluster:  # fmt: skip
    """Play a scenario to its end. Raises InvariantError if one of these does not hold.

    - Known steps are never more than were made.
    - Under push-sum, the weights of the living, in their inboxes and on the way, with what the dead took, are n.
    - Under a paired exchange, the sum of all models, with the moves that are owed, does not change but by heals and
      deaths; no rank moves by an answer to a model that it has given up; models do not drift apart; a rank has one open
      offer, but for those to peers that have stopped, and keeps no more than two copies of its model a peer.
    - Process lock: no model is sent to a peer that has not taken in the last one.
    - A rank that has no model of use takes a whole one for its own; NaN is never mixed.
    - Staleness: at the end of an update a rank has made at most max_staleness + 1 updates since its last mix, while it
      has a living peer, or its patience has ended since then; some time after the last fault that is no excuse, if
      patience is long for the speed of ranks and network.
    - Nobody waits much longer than its patience, and no model is mixed that is much older than it, and than its own.
    - Who leaves leaves a model of use with a rank that stays.
    - As many ranks train as in the beginning, while there are spares and soon after a death, and never more.
    - Every living rank ends, and knows that the budget is met; a rank that lacked u steps of it when it was met, with B
      steps an update, makes no more than max(1, ceil(u / B)) updates after that.

    `observe` is called after each event, to check more.
    """
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if observe is not None:
            observe(cluster)
        if looks % max(8, scenario.size) == 0:  # what is lost stays lost
            _check_weights(cluster)
            _check_sum(cluster)
        if looks % 10 == 0:
            _check_known_steps(cluster)

    cluster = FaultyCluster(scenario, protocol=protocol, driver=driver, **options)
    cluster.observe = look
    faults_end_s = max(0.0, *scenario.deaths.values(), *(end for _, end in scenario.stops.values()), scenario.cut_s[1])
    slowest_s = _slowest_exchange_s(scenario)
    if 4 * slowest_s < scenario.patience_s < END_S and not scenario.pause_probability:  # else it may end by itself
        cluster.all_well_from_s = faults_end_s + 4 * _longest_patience_s(scenario) + 2 * scenario.again_s
    cluster.run(until_s=END_S)
    _check_weights(cluster)
    _check_sum(cluster)
    _check_known_steps(cluster)
    _check_end(scenario, cluster)
    return cluster


def _check_known_steps(cluster: FaultyCluster) -> None:
    known = max((rank.state.budget.global_steps for rank in cluster.living), default=0)
    _demand(known <= cluster.global_steps, f"known steps that nobody made: {known}")


def _check_weights(cluster: FaultyCluster) -> None:
    scenario = cluster.schedule
    if scenario.mixing != "push_sum":
        return
    weight, whole = cluster.total_weight + cluster.lost_weight, scenario.size - scenario.spares
    _demand(abs(weight - whole) < 1e-9, f"push-sum weight: {weight} of {whole}")


def _check_sum(cluster: FaultyCluster) -> None:
    scenario = cluster.schedule
    if scenario.mixing != "paired":
        return
    size, models = scenario.size, np.concatenate([rank.model for rank in cluster.ranks])
    if not scenario.poison:
        drift = float(cluster.sum_of_models[0]) - size * (size - 1) / 2
        _demand(abs(drift) < 1e-6, f"paired: the sum of all models has changed by {drift}")
    apart = float(np.fmax.reduce(models) - np.fmin.reduce(models))
    most = max(len(rank.driver.snapshots) for rank in cluster.ranks)
    _demand(most <= max(scenario.send_buffers, 2 * size), f"paired: there is memory for {most} snapshots")
    _demand(apart <= 2 * size, f"paired: the models of {size} ranks are {apart} apart")


def _check_end(scenario: Schedule, cluster: FaultyCluster) -> None:
    for violation in cluster.violations:
        raise InvariantError(violation)
    if cluster.models_lost:  # nothing is left to continue with
        return
    _demand(not cluster.stuck, f"deadlock: ranks {cluster.stuck} wait forever")
    longest_s = 2 * _longest_patience_s(scenario) + 1.01 * scenario.again_s
    for rank in cluster.living:
        p = rank.state
        _demand(
            p.budget.global_steps >= scenario.budget_steps or p.budget.stop is Stop.ALL_LEAVE,
            f"budget: rank {p.rank} ended at {p.budget.global_steps} steps",
        )
        finite = bool(np.isfinite(rank.model).all())
        _demand(finite or rank.number in scenario.poison, f"poison was mixed by rank {p.rank}")
        if scenario.patience_s < END_S:
            has_excuse = rank.number in scenario.stops or rank.number >= scenario.size - scenario.spares
            _demand(has_excuse or rank.longest_wait_s < longest_s, f"rank {p.rank} waited {rank.longest_wait_s} s")
            _demand(
                rank.models.oldest_mixed_s < 2 * longest_s,
                f"stale: rank {p.rank} mixed a model {rank.models.oldest_mixed_s} s old",
            )
    _check_places(scenario, cluster)
    for rank, unseen in zip(cluster.ranks, cluster.unseen_steps, strict=False):
        most = max(1, math.ceil(unseen / scenario.steps_per_update))
        _demand(
            rank.updates_after_budget <= most,
            f"budget: rank {rank.number} continued {rank.updates_after_budget} updates",
        )


def _check_places(scenario: Schedule, cluster: FaultyCluster) -> None:
    """No more ranks train than in the beginning, and, if training continued for long enough after the last death, not
    fewer while there are spares."""
    if scenario.spares == 0:
        return
    places = scenario.size - scenario.spares
    staying = [rank for rank in cluster.living if not rank.state.has_left]  # who has left may end with the job
    training = [rank.number for rank in staying if not rank.asleep]
    _demand(len(training) <= places, f"places: ranks {training} train, in {places} places")
    told_s = max([*scenario.deaths.values(), *scenario.leaves.values()], default=0.0)
    gone_s = max(told_s, cluster.last_gone_s) + _slowest_exchange_s(scenario)
    ready_s = gone_s + scenario.death_notice_s[1] + scenario.control_s[1] + scenario.wake_up_s[1]
    if cluster.budget_known_s > ready_s:
        expected = min(places, len(staying))
        _demand(len(training) == expected, f"places: ranks {training} train, not {expected}")
        slowest_s = 3 * _slowest_exchange_s(scenario) + 4 * scenario.again_s
        if scenario.patience_s > END_S:
            asked_by_s = cluster.budget_known_s - slowest_s  # a rank may find late that its model is NaN
            waiting = [rank for rank in training if max(ready_s, cluster.ranks[rank].wait_began_s) < asked_by_s]
            without = [rank for rank in waiting if not cluster.ranks[rank].state.has_model]
            senders = [rank for rank in training if _can_send_a_model(cluster.ranks[rank])]
            _demand(not without or not senders, f"places: nobody has sent a model to ranks {without}")


def _can_send_a_model(rank: FaultyRank) -> bool:
    """Return whether a rank that trains has a model of use. Where none has, one that has left ends the job."""
    return rank.state.has_model and not rank.state.has_left and bool(np.isfinite(rank.model).all())


def _slowest_exchange_s(scenario: Schedule) -> float:
    update_s = scenario.update_s[1] + (scenario.pause_s[1] if scenario.pause_probability else 0.0)
    return update_s * max(scenario.slowness, default=1.0) + scenario.model_s[1] + scenario.control_s[1]


def _longest_patience_s(scenario: Schedule) -> float:
    pause_s = scenario.pause_s[1] if scenario.pause_probability else 0.0
    return max(scenario.patience_s, 5 * (scenario.update_s[1] * max(scenario.slowness, default=1.0) + pause_s))


def _demand(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantError(sentence)
