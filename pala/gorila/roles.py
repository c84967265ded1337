"""Who does what: the roles of every rank, from the configuration and the number of ranks. Pure.

`bundled`: every rank acts, learns and holds replay; the first ones serve a shard too. `separate`: the ranks are shards
first, then replays, learners and actors, one role each; with a local replay, actors hold it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from pala.config import GorilaConfig
from pala.system.errors import PalaError
from pala.system.text import counted


class Roles(NamedTuple):
    """The ranks of each role, rising when training begins; a rank may have several roles."""

    shards: tuple[int, ...]  # shard i is served by rank shards[i]
    replays: tuple[int, ...]
    learners: tuple[int, ...]
    actors: tuple[int, ...]
    replay_is_local: bool

    @property
    def everybody(self) -> set[int]:
        """The ranks that have a role."""
        return {*self.shards, *self.replays, *self.learners, *self.actors}

    def held_by(self, holders: Sequence[int]) -> Roles:
        """The same roles when rank `holders[i]` has those of rank i."""
        ranks = (self.shards, self.replays, self.learners, self.actors)
        shards, replays, learners, actors = (tuple(holders[rank] for rank in of_role) for of_role in ranks)
        return Roles(shards, replays, learners, actors, self.replay_is_local)

    def replay_of(self, actor: int) -> int:
        """The rank that holds what this actor plays."""
        return self.replays[self.actors.index(actor) % len(self.replays)]

    def sampled_by(self, learner: int, living: Container[int]) -> tuple[int, ...]:
        """The ranks whose replay this learner samples, of those who live: all, or of a local replay its share (bundled:
        its own). So every replay is sampled as long as a learner lives, and every learner has one as long as one lives.

        With fewer replays than learners, several learners share one.
        """
        replays = tuple(rank for rank in self.replays if rank in living)
        if not self.replay_is_local or not replays:
            return replays
        learners = [rank for rank in self.learners if rank in living]
        groups = min(len(learners), len(replays))
        return replays[learners.index(learner) % groups :: groups]

    def watched_by(self, rank: int) -> set[int]:
        """The other ranks of which this one looks whether they answer: all shards, and an actor's replay; the first
        shard looks at everybody."""
        watched = self.everybody if rank == self.shards[0] else {*self.shards}
        if rank in self.actors:
            watched |= {self.replay_of(rank)}
        return watched - {rank}


def assign(config: GorilaConfig, num_ranks: int, num_spares: int = 0) -> Roles:
    """The roles of a job of so many ranks, beside which there are so many spares. Raises PalaError if they cannot be
    shared out; the configuration itself is checked already (`config_checks.check`)."""
    local = config.replay == "local"
    if config.roles == "bundled":
        if config.num_shards > num_ranks:
            raise PalaError(
                f"'gorila.num_shards' is {config.num_shards}, but a rank serves one shard and the job has "
                f"{counted(num_ranks, 'rank')}; lower it, or start more ranks."
            )
        everybody = tuple(range(num_ranks))
        return Roles(everybody[: config.num_shards], everybody, everybody, everybody, local)
    counts = (config.num_shards, config.num_replays, config.num_learners, config.num_actors)
    if sum(counts) != num_ranks:
        names = ("shard", "replay", "learner", "actor")
        asked = ", ".join(counted(count, name) for count, name in zip(counts, names, strict=True) if count)
        beside = f" beside {counted(num_spares, 'spare')}" if num_spares else ""
        raise PalaError(
            f"'gorila.roles' is 'separate' with {asked}: {counted(sum(counts), 'rank')}, but the job has {num_ranks}"
            f"{beside}; start it with `mpirun -np {sum(counts) + num_spares}`, or change the 'gorila.num_...' "
            "so that every rank has one role."
        )
    ranks = iter(range(num_ranks))
    shards, replays, learners, actors = (tuple(next(ranks) for _ in range(count)) for count in counts)
    return Roles(shards, actors if local else replays, learners, actors, local)
