"""Gorila's members without anything else: who takes whose place, whatever dies, is late or is lost."""

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
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.gorila.places import Places, check_spares
from pala.gorila.roles import assign
from pala.system.errors import PalaError
from test_fuzz import fuzz

PATIENCE_S = 60.0
LOCAL = GorilaConfig(roles="separate", num_shards=1, num_learners=2, num_actors=2)  # shard, 2 learners, 2 actors
REMOTE = GorilaConfig(roles="separate", num_shards=1, num_learners=1, num_actors=2, replay="global", num_replays=1)
JOBS = [(GorilaConfig(num_shards=2), 4), (LOCAL, 5), (REMOTE, 5)]  # and how many ranks have a place


class Company:
    """All ranks of a job. What they tell one another, and the news of deaths, lies here until it is delivered."""

    def __init__(self, config: GorilaConfig, num_places: int, num_spares: int) -> None:
        size = num_places + num_spares
        self.roles, self.num_places, self.now_s = assign(config, num_places, num_spares), num_places, 0.0
        self.alive, self.truth = set(range(size)), list(range(num_places))  # by place: who has taken it last
        self.under_way: dict[tuple[int, int], deque[tuple[Kind, int, Bytes]]] = {}
        self.unheard = {rank: list[int]() for rank in range(size)}
        self.members = [
            Members(
                StepBudget(rank, size, 10**9, spares=num_spares), Places(self.roles, size), PATIENCE_S,
                tell=partial(self.tell, rank),
            )
            for rank in range(size)
        ]  # fmt: skip
        self.spares = range(num_places, size)

    def tell(self, source: int, peer: int, kind: Kind, number: int) -> Bytes:
        packet = Bytes(np.empty(0, np.uint8))
        packet.pending = 1
        self.under_way.setdefault((source, peer), deque()).append((kind, number, packet))
        return packet

    def deliver(self, pair: tuple[int, int], lost: bool = False) -> None:
        source, peer = pair
        kind, number, packet = self.under_way[pair].popleft()
        if not self.under_way[pair]:
            del self.under_way[pair]
        packet.pending = 0
        if lost or peer not in self.alive or source in self.members[peer].places.gone:
            return
        member = self.members[peer]
        refusal = member.hear(Message(kind, source, number, 1.0, Stop.NONE, np.zeros(len(self.members), np.uint64)))
        assert refusal is None, (pair, kind, refusal)
        self.check(peer)

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

    def wake(self, spare: int) -> None:
        """It joins, if it has been told to."""
        member = self.members[spare]
        if spare in self.alive and member.order is not None and (member.order, spare) not in member.places.replaced:
            self.truth[member.order] = spare
            member.join()

    def look(self, seconds: float) -> None:
        self.now_s += seconds
        for rank in sorted(self.alive):
            self.members[rank].look(self.now_s)

    def silence(self, rank: int) -> None:
        """It takes no messages in, until the first shard notices."""
        for _ in range(6):
            for pair in sorted(self.under_way):
                while pair[1] != rank and pair in self.under_way:
                    self.deliver(pair)
            self.look(PATIENCE_S / 4)
            if rank in self.members[0].watch.silent:
                return

    def check(self, rank: int) -> None:
        """That training ends here only if it must."""
        fault = self.members[rank].fault
        if fault and "served shard" not in fault:
            free = self.alive.intersection(self.spares).difference(self.truth)
            assert not free, fault
            living = [place for place, holder in enumerate(self.truth) if holder in self.alive]
            needed = (self.roles.learners, self.roles.actors, self.roles.replays)
            assert any(set(places).isdisjoint(living) for places in needed), fault

    def settle(self) -> None:
        """All news arrives, all spares wake up, and what was lost is said again."""
        for _ in range(30):
            for rank in sorted(self.alive):
                while self.unheard[rank]:
                    self.hear_of_death(rank)
            while self.under_way:
                self.deliver(min(self.under_way))
            for spare in self.spares:
                self.wake(spare)
            self.look(PATIENCE_S / 4)


WEIGHTS = {"kill": 4, "hear": 20, "wake": 8, "deliver": 50, "lose": 10, "look": 8}


def play(company: Company, rng: random.Random) -> None:
    """A hundred things that happen in any order."""
    for what in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=100):
        rank = rng.randrange(len(company.members))
        if what == "kill" and rng.random() < (0.02 if rank in company.roles.shards else 0.5):
            company.kill(rank)
        elif what == "hear":
            company.hear_of_death(rank, rng.randrange(9))
        elif what == "wake":
            company.wake(rng.choice(company.spares))
        elif what == "look":
            company.look(rng.uniform(0.1, 15))
        elif what in ("deliver", "lose") and company.under_way:
            company.deliver(rng.choice(sorted(company.under_way)), lost=what == "lose")


def test_all_agree_on_who_has_which_place_whatever_dies_is_late_or_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "judge_silence", lambda member: None)  # nobody is stopped: messages are late
    joined = 0

    @fuzz(150)
    @given(st.sampled_from(JOBS), st.integers(1, 3), st.integers(0, 2**32))
    def check(job: tuple[GorilaConfig, int], num_spares: int, seed: int) -> None:
        nonlocal joined
        company = Company(*job, num_spares)
        play(company, random.Random(seed))
        company.settle()
        alive = sorted(company.alive)
        places = [company.members[rank].places for rank in alive]
        if any(rank not in company.alive for rank in company.roles.shards):
            assert all("served shard" in company.members[rank].fault for rank in alive)
            return
        if any(company.members[rank].fault for rank in alive):
            return  # as `Company.check` found right
        # Which of the dead had a place last not everybody knows.
        living = [rank if rank in company.alive else None for rank in company.truth]
        for of_rank in places:
            assert [rank if rank in company.alive else None for rank in of_rank._holders] == living
        assert all(of_rank.spares == places[0].spares for of_rank in places)
        vacant = [holder for holder in company.truth if holder not in company.alive]
        assert not (vacant and places[0].spares), "a place is vacant and a spare asleep"
        assert all(set(company.members[rank].budget.living) == {*company.truth} & {*alive} for rank in alive)
        joined += any(holder in company.spares for holder in company.truth)

    check()
    assert joined > 20


def test_spares_are_taken_in_order_and_places_in_the_order_of_deaths() -> None:
    company = Company(LOCAL, 5, 3)
    for dead in (6, 3, 1):
        company.kill(dead)
        company.hear_of_death(0)
    company.settle()
    assert company.truth == [0, 7, 2, 5, 4]
    assert company.members[0].places.roles.learners == (7, 2) and company.members[0].places.roles.actors == (5, 4)


def test_a_spare_is_told_of_a_death_by_the_first_shard_before_it_hears_of_it() -> None:
    company = Company(LOCAL, 5, 1)
    company.kill(1)
    company.hear_of_death(0)
    company.deliver((0, 5))
    company.wake(5)
    assert company.members[5].places.roles.learners == (5, 2)
    company.deliver((5, 4))  # who has not heard of the death either, and takes its messages already
    places = company.members[4].places
    assert places.roles.learners == (1, 2) and places.may_be(5, ["learners"]) and not places.spares
    company.hear_of_death(4)
    assert places.roles.learners == (5, 2)


@pytest.mark.parametrize(
    ("dead", "says"),
    [
        ([2, 1], "Rank 1 has died, which was the last learner;"),
        ([0], "Rank 0 has died, which served shard 0 of the parameters, of which no spare has a copy;"),
    ],
)
def test_what_no_spare_can_replace_ends_training_and_the_reason_is_right(dead: list[int], says: str) -> None:
    """Also for a spare that has joined: it has heard of all deaths while it slept."""
    company = Company(LOCAL, 5, 1)
    company.kill(4)
    company.settle()
    assert company.truth == [0, 1, 2, 3, 5]
    for rank in dead:
        company.kill(rank)
    for rank in company.alive:
        company.hear_of_death(rank)
        company.hear_of_death(rank)
        assert company.members[rank].fault.startswith(says)


def test_the_last_of_a_role_is_waited_for_while_a_spare_wakes_up() -> None:
    """Ranks: shard, replay, learner, 2 actors, 2 spares. The first spare dies as it wakes up, with the second all is
    well; then none is left."""
    company = Company(REMOTE, 5, 2)
    for dead in (2, 5):
        company.kill(dead)
        for rank in company.alive:
            company.hear_of_death(rank)
        assert not any(company.members[rank].fault for rank in company.alive)
    company.settle()
    assert company.truth == [0, 1, 6, 3, 4]
    company.kill(6)
    for rank in company.alive:
        company.hear_of_death(rank)
        assert company.members[rank].fault.startswith("Rank 6 has died, which was the last learner;")


def test_a_spare_does_for_one_loss_and_not_for_two() -> None:
    company = Company(REMOTE, 5, 1)
    for dead in (2, 1):  # learner and replay
        company.kill(dead)
        for rank in company.alive:
            company.hear_of_death(rank)
    assert not any(company.members[rank].fault for rank in company.alive)
    company.settle()
    assert company.truth == [0, 1, 5, 3, 4]
    for rank in company.alive:
        assert company.members[rank].fault.startswith("Rank 1 has died, which held the replay of other ranks;")


@pytest.mark.parametrize("dead", [2, 3])
def test_a_spare_that_is_stopped_when_it_has_been_told_to_take_a_place_ends_training_if_nobody_else_has_the_role(
    dead: int,
) -> None:
    """Though another spare sleeps: the first may come back, and one place cannot have two."""
    company = Company(REMOTE, 5, 2)
    company.kill(dead)
    company.hear_of_death(0)
    first = company.members[0]
    company.silence(5)
    assert first.places.orders == {5: dead} and first.watch.silent == {5}
    assert first.fault.startswith("Rank 5 has not answered for 60 s ('gorila.patience_s'), which is the spare") == (
        dead == 2
    )


def test_who_leaves_is_replaced_and_who_is_needed_stays() -> None:
    company = Company(LOCAL, 5, 1)
    whys = [member.why_stay() for member in company.members[:5]]
    assert whys == ["it serves a shard", "", "", "", ""]
    company.members[1].leave()
    company.settle()
    assert company.truth == [0, 5, 2, 3, 4] and list(company.members[0].budget.living) == [0, 2, 3, 4, 5]
    company.members[2].leave()
    company.settle()
    assert company.members[5].why_stay() == "no other rank can do what it does" and not company.members[3].why_stay()
    assert not any(member.fault for member in company.members)


@pytest.mark.parametrize(
    ("num_spares", "silent", "dead", "stays"),
    [(0, 3, None, False), (0, 2, None, True), (1, 2, None, False), (1, 5, None, False), (1, 5, 2, True)],
)
def test_a_rank_that_does_not_answer_does_nothing_for_one_that_would_leave(
    num_spares: int, silent: int, dead: int | None, stays: bool
) -> None:
    """Ranks 1 and 2 learn, 3 and 4 act, 5 is the spare. Without 1 the first shard may find that nobody learns."""
    company = Company(LOCAL, 5, num_spares)
    company.silence(silent)
    first = company.members[0]
    if dead is not None:
        first.peer_died(dead)
    assert first.watch.silent == {silent} and not first.fault
    assert bool(first.why_stay(1)) == stays


@pytest.mark.parametrize(("num_spares", "asking", "may"), [(0, (1, 2), [1]), (1, (1, 2, 3, 4), [1, 2, 3])])
def test_of_those_who_ask_to_leave_at_the_same_time_the_last_of_a_role_must_stay(
    num_spares: int, asking: tuple[int, ...], may: list[int]
) -> None:
    """A spare does for one of them. Who may go stays that until it has gone."""
    company = Company(LOCAL, 5, num_spares)
    assert not any(company.members[rank].why_stay() for rank in asking)
    for rank in asking:
        company.members[rank].ask_to_leave()
    while company.under_way:
        company.deliver(min(company.under_way))
    assert [rank for rank in asking if company.members[rank].may_leave] == may
    for rank in may:
        company.members[rank].leave()
        company.alive.discard(rank)
    company.settle()
    assert not any(company.members[rank].fault for rank in company.alive)


def test_messages_that_cannot_be_are_refused() -> None:
    company = Company(LOCAL, 5, 2)
    counters = np.zeros(7, np.uint64)

    def number(place: int, rank: int) -> int:
        return 1 + place * 7 + rank

    for kind, sender, receiver, round_ in (
        (Kind.GO, 1, 5, number(2, 5)), (Kind.GO, 0, 5, number(2, 6)), (Kind.GO, 0, 2, number(2, 2)),
        (Kind.GO, 0, 5, 0), (Kind.JOIN, 5, 2, number(0, 5)), (Kind.JOIN, 5, 2, number(1, 6)),
        (Kind.JOIN, 3, 2, number(1, 3)), (Kind.JOIN, 5, 2, number(9, 5)), (Kind.PLACE, 1, 2, number(3, 5)),
        (Kind.PLACE, 0, 2, number(3, 4)), (Kind.LEAVE, 0, 2, number(0, 0)), (Kind.LEAVE, 3, 2, number(4, 3)),
        (Kind.LEAVE, 3, 2, 0), (Kind.ASK_LEAVE, 3, 0, number(4, 3)), (Kind.ASK_LEAVE, 3, 2, number(3, 3)),
        (Kind.MAY_LEAVE, 1, 2, number(2, 2)), (Kind.MUST_STAY, 0, 2, number(3, 3)),
    ):  # fmt: skip
        member = company.members[receiver]
        assert member.hear(Message(kind, sender, round_, 1.0, Stop.NONE, counters)) is not None, (kind, round_)
        assert member.places.roles == company.roles and not member.places.gone and member.order is None


def test_any_messages_are_taken_or_refused_and_no_rank_has_two_places() -> None:
    """Whoever sends them, and whatever numbers they hold."""
    numbers = st.integers(0, 80) | st.integers(0, 2**64 - 1)
    messages = st.tuples(st.sampled_from(ABOUT_MEMBERS), st.integers(0, 6), st.integers(0, 6), numbers)

    @fuzz(300)
    @given(st.lists(st.one_of(messages, st.tuples(st.just("kill"), st.integers(1, 6))), max_size=20))
    def check(script: list[tuple]) -> None:
        company, counters = Company(LOCAL, 5, 2), np.zeros(7, np.uint64)
        for kind, *values in script:
            if kind == "kill":
                company.kill(values[0])
                for dead in company.unheard[0]:  # without `company.check`: what a rank says of itself is believed
                    company.members[0].peer_died(dead)
                company.unheard[0].clear()
                continue
            sender, receiver, number = values
            member = company.members[receiver]
            if sender == receiver or sender in member.places.gone:
                continue
            member.hear(Message(kind, sender, number, 1.0, Stop.NONE, counters))
            roles, places = member.places.roles, member.places
            assert len(roles.everybody) == 5 and roles.shards == (0,)
            assert member.order is None or places.can_be_taken(member.order)
            assert set(places.spares).isdisjoint(roles.everybody)

    check()


def test_spares_that_no_death_leaves_a_place_to_are_a_mistake() -> None:
    with pytest.raises(PalaError, match="every rank serves a shard, whose death ends the job"):
        check_spares(assign(GorilaConfig(num_shards=2), 2), 1)
    check_spares(assign(GorilaConfig(num_shards=2), 3), 1)
