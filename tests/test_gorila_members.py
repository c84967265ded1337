"""Gorila's members without anything else: who takes part, whatever dies, is late or is lost."""

from __future__ import annotations

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pala.comm.base import Bytes
from pala.config import GorilaConfig
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.wire import Message
from pala.gorila.members import Members
from pala.gorila.messages import Kind
from pala.gorila.roles import assign
from pala.system.errors import PalaError
from support.fuzzing import fuzz

PATIENCE_S = 60.0
BUNDLED, TWO_SHARDS = GorilaConfig(), GorilaConfig(num_shards=2)
LOCAL = GorilaConfig(roles="separate", num_shards=1, num_learners=2, num_actors=2)  # shard, 2 learners, 2 actors
REMOTE = GorilaConfig(roles="separate", num_shards=1, num_learners=1, num_actors=2, replay="global", num_replays=1)
JOBS = [(TWO_SHARDS, 4, 1), (BUNDLED, 4, 2), (TWO_SHARDS, 4, 3), (LOCAL, 5, 0), (REMOTE, 5, 0)]  # ranks, and spares


class Company:
    """All ranks of a job. What they tell one another, and the news of deaths, lies here until it is delivered."""

    def __init__(self, config: GorilaConfig, num_trainers: int, num_spares: int) -> None:
        size = num_trainers + num_spares
        self.roles, self.num_trainers, self.now_s = assign(config, num_trainers, num_spares), num_trainers, 0.0
        self.alive, self.awake = set(range(size)), set(range(num_trainers))
        self.under_way: dict[tuple[int, int], deque[tuple[Message, Bytes]]] = {}
        self.unheard = {rank: list[int]() for rank in range(size)}
        self.members = [
            Members(StepBudget(rank, size, 10**9, spares=num_spares), self.roles, PATIENCE_S, partial(self.tell, rank))
            for rank in range(size)
        ]

    def tell(self, source: int, peer: int, kind: Kind) -> Bytes:
        packet = Bytes(np.empty(0, np.uint8))
        packet.pending = 1
        message = Message(kind, source, 0, 1.0, Stop.NONE, self.members[source].budget.steps_by_rank)
        self.under_way.setdefault((source, peer), deque()).append((message, packet))
        return packet

    def deliver(self, pair: tuple[int, int], lost: bool = False) -> None:
        source, peer = pair
        message, packet = self.under_way[pair].popleft()
        if not self.under_way[pair]:
            del self.under_way[pair]
        packet.pending = 0
        if lost or peer not in self.alive or source in self.members[peer].gone:
            return
        self.members[peer].hear(message)
        self.check(peer)

    def deliver_all(self) -> None:
        while self.under_way:
            self.deliver(min(self.under_way))

    def kill(self, rank: int) -> None:
        if rank in self.alive:
            self.alive.discard(rank)
            for peer in self.alive:
                self.unheard[peer].append(rank)

    def hear_of_death(self, rank: int, which: int = 0) -> None:
        if rank in self.alive and self.unheard[rank]:
            news = self.unheard[rank]
            self.members[rank].peer_died(news.pop(which % len(news)))
            self.check(rank)

    def wake(self, rank: int) -> None:
        """Join, if this is a spare that is needed: it asks the shards for a model."""
        member = self.members[rank]
        if rank in self.alive - self.awake and member.budget.is_needed:
            self.awake.add(rank)
            member.join()
            for shard in self.roles.shards:
                self.tell(rank, shard, Kind.FETCH)

    def step(self, rank: int) -> None:
        if rank in self.awake & self.alive:
            self.members[rank].budget.add_steps(1)

    def look(self, seconds: float) -> None:
        self.now_s += seconds
        for rank in sorted(self.alive):
            self.members[rank].look(self.now_s)

    def silence(self, rank: int) -> None:
        """Let this rank take no messages in, until the first shard notices."""
        for _ in range(6):
            for pair in sorted(self.under_way):
                while pair[1] != rank and pair in self.under_way:
                    self.deliver(pair)
            self.look(PATIENCE_S / 4)
            if rank in self.members[0].watch.silent:
                return

    def check(self, rank: int) -> None:
        """Assert that training ends here only if it must."""
        fault = self.members[rank].fault
        if fault and "served shard" not in fault:
            assert self.roles.actors != self.roles.learners, fault  # of bundles the shards act and learn
            needed = (self.roles.learners, self.roles.actors, self.roles.replays)
            assert any(set(ranks).isdisjoint(self.alive) for ranks in needed), fault

    def settle(self) -> None:
        """Deliver all news, wake the spares that are needed, and let every rank play and look."""
        for _ in range(30):
            for rank in sorted(self.alive):
                while self.unheard[rank]:
                    self.hear_of_death(rank)
            self.deliver_all()
            for rank in sorted(self.alive):
                self.wake(rank)
                self.step(rank)
            self.look(PATIENCE_S / 4)


WEIGHTS = {"kill": 4, "hear": 20, "wake": 8, "step": 8, "deliver": 50, "lose": 10, "look": 8}


def play(company: Company, rng: random.Random) -> None:
    """A hundred things that happen in any order."""
    for what in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=100):
        rank = rng.randrange(len(company.members))
        if what == "kill" and rng.random() < (0.02 if rank in company.roles.shards else 0.5):
            company.kill(rank)
        elif what == "hear":
            company.hear_of_death(rank, rng.randrange(9))
        elif what == "wake":
            company.wake(rank)
        elif what == "step":
            company.step(rank)
        elif what == "look":
            company.look(rng.uniform(0.1, 15))
        elif what in ("deliver", "lose") and company.under_way:
            company.deliver(rng.choice(sorted(company.under_way)), lost=what == "lose")


def test_all_agree_on_who_trains_whatever_dies_is_late_or_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "judge_silence", lambda member: None)  # nobody is stopped: messages are late
    joined = 0

    @fuzz(150)
    @given(st.sampled_from(JOBS), st.integers(0, 2**32))
    def check(job: tuple[GorilaConfig, int, int], seed: int) -> None:
        nonlocal joined
        company = Company(*job)
        play(company, random.Random(seed))
        company.settle()
        alive = sorted(company.alive)
        if any(rank not in company.alive for rank in company.roles.shards):
            assert all("served shard" in company.members[rank].fault for rank in alive)
            return
        if any(company.members[rank].fault for rank in alive):
            return  # as `Company.check` found right
        training = sorted(company.awake & company.alive)
        assert training[: company.num_trainers] == alive[: company.num_trainers], "a spare sleeps though it is needed"
        for rank in training:
            member = company.members[rank]
            assert list(member.budget.living) == training and member.roles.everybody.issuperset(training)
            assert member.roles.shards == company.roles.shards
            assert {actor for actor in member.roles.actors if actor in alive} <= {*training}
        joined += len(company.awake) > company.num_trainers

    check()
    assert joined > 20


def test_spares_are_taken_in_order() -> None:
    company = Company(BUNDLED, 5, 3)
    for dead in (6, 3, 1):
        company.kill(dead)
    company.settle()
    assert company.awake == {0, 1, 2, 3, 4, 5, 7}
    assert company.members[0].roles.learners == company.members[4].roles.actors == (0, 1, 2, 3, 4, 5, 7)
    assert list(company.members[4].budget.living) == [0, 2, 4, 5, 7]


def test_a_spare_takes_part_for_a_rank_that_has_not_heard_of_the_death() -> None:
    company = Company(BUNDLED, 5, 1)
    company.kill(1)
    company.hear_of_death(5)
    company.wake(5)
    company.deliver((5, 0))  # a question to the shard
    company.step(5)
    company.tell(0, 4, Kind.PING)
    company.deliver((0, 4))
    member = company.members[4]
    assert 5 not in member.roles.learners  # the shard has heard of no step of it
    company.tell(5, 4, Kind.PING)
    company.deliver((5, 4))
    assert member.roles.learners == (0, 1, 2, 3, 4, 5) and 1 in member.budget.living
    company.hear_of_death(4)
    assert list(member.budget.living) == [0, 2, 3, 4, 5] == list(company.members[5].budget.living)


@pytest.mark.parametrize(
    ("job", "dead", "says"),
    [
        ((LOCAL, 5, 0), [2, 1], "Rank 1 has died, which was the last learner;"),
        ((LOCAL, 5, 0), [0], "Rank 0 has died, which served shard 0 of the parameters; "),
        ((REMOTE, 5, 0), [1], "Rank 1 has died, which held the replay of other ranks;"),
        (
            (BUNDLED, 4, 1),
            [0],
            "Rank 0 has died, which served shard 0 of the parameters, of which no spare has a copy;",
        ),
    ],
)
def test_what_no_other_rank_has_ends_training_and_the_reason_is_right(
    job: tuple[GorilaConfig, int, int], dead: list[int], says: str
) -> None:
    """Also for a spare that sleeps."""
    company = Company(*job)
    for rank in dead:
        company.kill(rank)
    for rank in company.alive:
        for _ in dead:
            company.hear_of_death(rank)
        assert company.members[rank].fault.startswith(says)


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_a_bundle_that_leaves_is_replaced() -> None:
    company = Company(TWO_SHARDS, 4, 1)
    assert [member.why_stay for member in company.members[:4]] == ["it serves a shard"] * 2 + [""] * 2
    company.members[2].leave()
    company.settle()
    assert 4 in company.awake and list(company.members[0].budget.living) == [0, 1, 3, 4]
    assert not any(member.fault for member in company.members)


def test_with_separate_roles_all_stay() -> None:
    assert all(member.why_stay for member in Company(LOCAL, 5, 0).members)


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (TWO_SHARDS, 2, "every rank serves a shard, whose death ends the job"),
        (LOCAL, 5, "'gorila.roles' is 'separate', in which a spare takes no place"),
    ],
)
def test_spares_that_no_death_leaves_a_place_to_are_a_mistake(config: GorilaConfig, ranks: int, words: str) -> None:
    with pytest.raises(PalaError, match=words):
        assign(config, ranks, num_spares=1)
    assert assign(config, ranks).everybody == set(range(ranks))


def test_spares_beside_a_rank_without_a_shard_are_none() -> None:
    assert assign(TWO_SHARDS, 3, num_spares=1).learners == (0, 1, 2)
