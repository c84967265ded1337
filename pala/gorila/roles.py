"""The roles of every rank, from the configuration and the number of ranks. Pure.

`bundled`: every rank acts, learns and holds replay; the first ones serve a shard too. `separate`: the ranks are shards
first, then replays, learners and actors, one role each; with a local replay, actors hold it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from pala.config import GorilaConfig
from pala.system.errors import PalaError
from pala.system.text import counted


class Roles(NamedTuple):
    """The ranks of each role, rising; a rank may have several roles, and keeps them when it is gone."""

    shards: tuple[int, ...]  # shard i is served by rank shards[i]
    replays: tuple[int, ...]
    learners: tuple[int, ...]
    actors: tuple[int, ...]
    replay_is_local: bool

    @property
    def everybody(self) -> set[int]:
        """The ranks that have a role."""
        return {*self.shards, *self.replays, *self.learners, *self.actors}

    @property
    def are_bundled(self) -> bool:
        """True if every rank that acts learns, too, and holds replay."""
        return self.learners == self.actors

    def with_spares(self, ranks: Iterable[int]) -> Roles:
        """Return the roles after those of these ranks that were spares have joined, each as a bundle."""
        new = set(ranks) - self.everybody
        if not new:
            return self
        bundles = tuple(sorted({*self.actors, *new}))
        return self._replace(replays=bundles, learners=bundles, actors=bundles)

    def replay_of(self, actor: int) -> int:
        """Return the rank that holds what this actor plays."""
        return self.replays[self.actors.index(actor) % len(self.replays)]

    def actors_of(self, replay: int) -> list[int]:
        """Return the actors whose steps this rank holds."""
        return [actor for actor in self.actors if self.replay_of(actor) == replay]

    def sampled_by(self, learner: int, living: Container[int]) -> tuple[int, ...]:
        """Return the living ranks whose replay this learner samples: all, or of a local replay its share.

        A bundle's share is its own replay. Every replay is sampled as long as a learner lives, and every learner has
        one as long as one lives: with fewer replays than learners, several learners share one.
        """
        replays = tuple(rank for rank in self.replays if rank in living)
        if not self.replay_is_local or not replays:
            return replays
        learners = [rank for rank in self.learners if rank in living]
        groups = min(len(learners), len(replays))
        return replays[learners.index(learner) % groups :: groups]

    def watched_by(self, rank: int) -> set[int]:
        """Return the other ranks that this one pings: all shards, and an actor's replay; the first shard pings all."""
        watched = self.everybody if rank == self.shards[0] else {*self.shards}
        if rank in self.actors:
            watched |= {self.replay_of(rank)}
        return watched - {rank}


def assign(config: GorilaConfig, num_ranks: int, num_spares: int = 0) -> Roles:
    """Return the roles of `num_ranks` ranks, beside which `num_spares` sleep.

    Raises PalaError if the roles cannot be shared out, or no death would leave a place to a spare. The configuration
    itself is checked already (`pala.config.checks`).
    """
    if config.roles == "separate":
        return _separate(config, num_ranks, num_spares)
    roles = _bundled(config, num_ranks)
    if num_spares and roles.everybody == set(roles.shards):
        raise PalaError(
            f"'run.spares' is {num_spares}, but every rank serves a shard, whose death ends the job; leave it out, "
            "start more ranks, or lower 'gorila.num_shards'."
        )
    return roles


def _bundled(config: GorilaConfig, num_ranks: int) -> Roles:
    if config.num_shards > num_ranks:
        raise PalaError(
            f"'gorila.num_shards' is {config.num_shards}, but a rank serves one shard and the job has "
            f"{counted(num_ranks, 'rank')}; lower it, or start more ranks."
        )
    everybody = tuple(range(num_ranks))
    return Roles(everybody[: config.num_shards], everybody, everybody, everybody, config.replay == "local")


def _separate(config: GorilaConfig, num_ranks: int, num_spares: int) -> Roles:
    if num_spares:
        raise PalaError(
            f"'run.spares' is {num_spares}, but 'gorila.roles' is 'separate', in which a spare takes no place; leave "
            "'run.spares' out, or set 'gorila.roles' to 'bundled'."
        )
    counts = (config.num_shards, config.num_replays, config.num_learners, config.num_actors)
    if sum(counts) != num_ranks:
        names = ("shard", "replay", "learner", "actor")
        asked = ", ".join(counted(count, name) for count, name in zip(counts, names, strict=True) if count)
        raise PalaError(
            f"'gorila.roles' is 'separate' with {asked}: {counted(sum(counts), 'rank')}, but the job has "
            f"{num_ranks}; start it with `mpirun -np {sum(counts)}`, or change the 'gorila.num_...' so that every rank "
            "has one role."
        )
    ranks = iter(range(num_ranks))
    shards, replays, learners, actors = (tuple(next(ranks) for _ in range(count)) for count in counts)
    is_local = config.replay == "local"
    return Roles(shards, actors if is_local else replays, learners, actors, is_local)
