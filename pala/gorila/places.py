"""Which rank has which place, and what training cannot go on without. Pure.

A *place* is what one of the ranks that train from the beginning has to do, and has its number. When such a rank is
gone, the first shard, without which there is no job, gives its place to a spare: spares are taken in order, the lowest
first, and nobody is elected. The spare tells all others; whoever has not heard of the death yet waits for that news.
Shards have no successors: nobody else has their part of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import NamedTuple

from pala.gorila.roles import Roles
from pala.system.errors import PalaError


class Places:
    """What one rank knows of them. Every method is a pure transition."""

    def __init__(self, roles: Roles, size: int) -> None:
        """`roles`: of the places; `size`: ranks of the job, of which those that have no place are spares."""
        self.first_roles = roles  # the places that have each role
        self.roles = roles  # the ranks that have each role now
        self.size, self.num_places = size, len(roles.everybody)
        self._holders = list(range(self.num_places))
        self._heirs: dict[int, int] = {}  # place -> spare that has it when its holder is known to be gone
        self.spares = list(range(self.num_places, size))  # that are there and have no place; rising
        self.gone: list[int] = []  # ranks that have died or left, in the order in which that was heard
        self.orders: dict[int, int] = {}  # of the first shard: spare -> the place that it has been told to take

    def place_of(self, rank: int) -> int | None:
        """The place that this rank has, or has taken from one that is not yet known to be gone."""
        if rank in self._holders:
            return self._holders.index(rank)
        return next((place for place, heir in self._heirs.items() if heir == rank), None)

    def may_be(self, rank: int, roles: Collection[str]) -> bool:
        """Whether this rank has one of these roles, or soon will."""
        place = self.place_of(rank)
        return any(place in getattr(self.first_roles, role) for role in roles)

    @property
    def replaced(self) -> list[tuple[int, int]]:
        """(place, rank) of all spares that have one."""
        return [(place, rank) for place, rank in enumerate(self._holders) if rank >= self.num_places]

    def lose(self, rank: int) -> None:
        """`rank` has died or left."""
        if rank in self.gone:
            return
        self.gone.append(rank)
        self.orders.pop(rank, None)
        self.spares = [spare for spare in self.spares if spare != rank]
        self._heirs = {place: heir for place, heir in self._heirs.items() if heir != rank}
        place = self.place_of(rank)
        if place is not None and place in self._heirs:
            self._settle(place, self._heirs.pop(place))

    def can_be_taken(self, place: int) -> bool:
        """Whether there is such a place, and a spare can do what is to be done there."""
        return 0 <= place < self.num_places and place not in self.first_roles.shards

    def take(self, place: int, rank: int, certain: bool = False) -> str:
        """`rank` says that it has this place. `certain`: its holder is gone, though perhaps not heard of. Returns why
        that cannot be, or nothing."""
        if not self.can_be_taken(place):
            return f"place {place} is none that a spare can take"
        if not self.num_places <= rank < self.size:
            return f"rank {rank} is no spare"
        if self.place_of(rank) not in (None, place) or self.orders.get(rank, place) != place:
            return f"rank {rank} has another place than {place}"
        if rank in self.gone or self._holders[place] == rank:  # old news
            return ""
        self.orders.pop(rank, None)
        self.spares = [spare for spare in self.spares if spare != rank]
        if certain or self._holders[place] in self.gone:
            self._heirs.pop(place, None)
            self._settle(place, rank)
        else:
            self._heirs[place] = rank
        return ""

    def give(self, unfit: Container[int]) -> list[tuple[int, int]]:
        """What the first shard orders: (spare, place) for places that nobody has or is told to take, as long as there
        are spares that are not `unfit`."""
        orders: list[tuple[int, int]] = []
        free = [spare for spare in self.spares if spare not in self.orders and spare not in unfit]
        vacant = [self._holders.index(rank) for rank in self.gone if rank in self._holders]
        for place in vacant:
            if free and self.can_be_taken(place) and place not in self.orders.values():
                orders.append((free.pop(0), place))
                self.orders |= [orders[-1]]
        return orders

    def will_be_taken(self, rank: int, silent: Collection[int]) -> bool:
        """Whether a spare that answers can take the place of `rank`. One that is told to and does not answer keeps the
        place: it may come back, and two would have it."""
        if rank not in self.gone or rank not in self._holders:
            return False
        place = self._holders.index(rank)
        told = [spare for spare, its_place in self.orders.items() if its_place == place]
        return not set(told or self.spares).issubset(silent)

    def _settle(self, place: int, rank: int) -> None:
        self._holders[place] = rank
        self.roles = self.first_roles.held_by(self._holders)


class Missing(NamedTuple):
    """What training cannot go on without."""

    ranks: list[int]  # that had it
    what: str


def lost_by_deaths(places: Places, living: Collection[int], is_over: bool) -> Missing | None:
    """What nobody has any more, and no spare can take. When training `is_over`, only shards are needed."""
    roles = places.roles
    for index, rank in enumerate(roles.shards):
        if rank in places.gone:
            spares = ", of which no spare has a copy" if places.size > places.num_places else ""
            return Missing([rank], f"served shard {index} of the parameters{spares}")
    if is_over or places.spares:  # also one whose news of a place may have been refused
        return None
    only_replay = [rank for rank in roles.replays if rank not in roles.actors]
    if dead := [rank for rank in places.gone if rank in only_replay]:
        return Missing(dead[-1:], "held the replay of other ranks")
    for ranks, who in ((roles.learners, "learner"), (roles.actors, "actor")):
        if set(ranks).isdisjoint(living):
            return Missing([rank for rank in places.gone if rank in ranks][-1:], f"was the last {who}")
    return None


def lost_by_silence(places: Places, living: Collection[int], silent: Collection[int]) -> Missing | None:
    """What nobody has who answers, and no spare who answers can take: training needs all shards, and somebody of each
    other role. A spare takes the place of the dead, not of the silent."""
    roles = places.roles
    for index, rank in enumerate(roles.shards):
        if rank in silent:
            return Missing([rank], f"serves shard {index}")
    answering = set(living) - set(silent)
    for ranks, verb in ((roles.replays, "holds replay"), (roles.learners, "learns"), (roles.actors, "acts")):
        if not answering.isdisjoint(ranks) or any(places.will_be_taken(rank, silent) for rank in ranks):
            continue
        if quiet := [rank for rank in ranks if rank in silent]:
            return Missing(quiet, f"{verb}, as no other rank does that answers")
        if waiting := [rank for rank in places.spares if rank in silent]:
            return Missing(waiting, f"is the spare for a rank that {verb}, as no other rank does")
    return None


def check_spares(roles: Roles, num_spares: int) -> None:
    """Raise PalaError for spares that no death would leave a place to."""
    if num_spares and roles.everybody == set(roles.shards):
        raise PalaError(
            f"'run.spares' is {num_spares}, but every rank serves a shard, whose death ends the job; leave it out, "
            "start more ranks, or lower 'gorila.num_shards'."
        )
