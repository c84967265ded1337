"""The budget of environment steps that all ranks share, and the news of its end. Pure.

Every message carries the local steps of all ranks as far as its sender knows; they are merged by maximum, so the known
total never exceeds the true one. A rank that sees the budget met stops and tells log2 n others, who pass it on.
Overshoot: what is done while the news travels.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pala.comm.base import Communicator


class Stop(enum.IntEnum):
    """Reasons to end training. Each rank keeps its first; at the end all agree on the highest."""

    NONE = 0
    BUDGET = 1
    CALLBACK = 2  # the user's: the policy is good enough, or will never be
    ALL_LEAVE = 3  # all ranks that remain were told to leave
    SIGNAL = 4  # that asks the whole job to end

    @property
    def completes(self) -> bool:
        """Whether the run is complete: its final policy is made."""
        return self in (Stop.BUDGET, Stop.CALLBACK)


@dataclass(slots=True, init=False, eq=False)
class StepBudget:
    """One rank's knowledge of all ranks' steps, of who lives, sleeps and has left, and of the end: a value that its
    methods change in place. None of them communicates."""

    rank: int
    size: int
    num_places: int
    """Ranks that train while there are enough: all but the spares."""
    budget_steps: int
    base_steps: int
    """Steps made by an earlier run with other ranks."""
    steps_by_rank: np.ndarray
    """Steps of every rank, uint64 [size]. The array is replaced, never changed, as messages on their way hold it."""
    sum_steps: int
    stop: Stop
    """Reason why training ends on this rank."""
    present: Sequence[int]
    """Ranks whose process lives, as far as known here; sorted."""
    living: Sequence[int]
    """Present ranks that train; sorted."""
    asleep: set[int]
    """Spares that have taken no place."""
    left: set[int]
    """Ranks that have left in good order, dead since or not."""
    stop_told: bool
    """Whether this rank has told others that training ends; a death takes it back."""
    groups: Sequence[int]
    """Number of each rank's group, [size], where ranks form groups; else empty."""

    def __init__(
        self,
        rank: int,
        size: int,
        budget_steps: int,
        steps_by_rank: Iterable[int] | None = None,
        base_steps: int = 0,
        spares: int = 0,
        groups: Sequence[int] = (),
    ) -> None:
        """`steps_by_rank`: steps of every rank at the start; the last `spares` ranks sleep until one of those before is
        gone."""
        self.groups = tuple(groups)
        self.rank, self.size = rank, size
        self.num_places = size - spares
        self.budget_steps = budget_steps
        self.base_steps = base_steps
        self.steps_by_rank = np.array(np.zeros(size) if steps_by_rank is None else list(steps_by_rank), np.uint64)
        self.sum_steps = int(self.steps_by_rank.sum())
        self.stop = Stop.NONE
        # Lists only once a rank is gone: 10,000 lists of 10,000 ranks would take 4 GB.
        self.present = range(size)
        self.living = range(size - spares)
        self.asleep = set(range(size - spares, size))
        self.left = set()
        self.stop_told = False
        self._check_budget()

    @property
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here: never more than were made."""
        return self.base_steps + self.sum_steps

    def add_steps(self, steps: int) -> None:
        """Count `steps` steps of this rank."""
        self.steps_by_rank = self.steps_by_rank.copy()
        self.steps_by_rank[self.rank] += np.uint64(steps)
        self.sum_steps += steps
        self._check_budget()

    def merge(self, steps_by_rank: np.ndarray, stop: Stop) -> None:
        """Take over what a message says: the maximum of each rank's steps, uint64 [size], and the end."""
        self.steps_by_rank = np.maximum(self.steps_by_rank, steps_by_rank)
        self.sum_steps = int(np.add.reduce(self.steps_by_rank))
        for rank in [rank for rank in self.asleep if self.steps_by_rank[rank] > 0]:
            self.rank_joined(rank)
        self.stop_now(stop)
        self._check_budget()

    def agreed(self, steps_by_rank: np.ndarray, stop: Stop) -> None:
        """Take over what all ranks have agreed on: the steps, and the end, whichever reason this rank had."""
        self.merge(steps_by_rank, stop)
        if stop is not Stop.NONE:
            self.stop = stop

    def stop_now(self, reason: Stop) -> None:
        """End training on this rank, which will tell the others. A later reason changes nothing before the end."""
        if self.stop is Stop.NONE:
            self.stop = reason

    def peer_died(self, peer: int) -> None:
        """Count `peer` as dead."""
        if peer in self.present:
            self.present = [p for p in self.present if p != peer]
            self.stop_told = False  # whom the dead peer should have told must hear it from others
            self._count()

    @property
    def is_needed(self) -> bool:
        """True of a rank that sleeps and has to take a place. As many ranks train as in the beginning, the lowest
        that live. So all agree on who they are as soon as they have heard of the same deaths, in whatever order; and
        a rank that has to train still has to after every further death."""
        lowest = [rank for rank in self.present if rank not in self.left][: self.num_places]
        return self.stop is Stop.NONE and self.rank in lowest

    @property
    def leaders(self) -> Sequence[int]:
        """Ranks that gossip: of each group the lowest that lives and trains; without groups all. Sorted. Nobody is
        elected: all agree as soon as they have heard of the same deaths, in whatever order."""
        if not self.groups:
            return self.living
        first: dict[int, int] = {}
        for rank in self.living:
            first.setdefault(self.groups[rank], rank)
        return sorted(first.values())

    @property
    def lost(self) -> list[int]:
        """Other ranks that have trained and train no more."""
        training = {self.rank, *self.living}
        return [r for r in range(self.size) if r not in training and (r < self.num_places or self.steps_by_rank[r] > 0)]

    @property
    def joining(self) -> list[int]:
        """Spares that train from now on, and of which no step is known."""
        return [r for r in self.living if r >= self.num_places and not self.steps_by_rank[r]]

    def rank_joined(self, rank: int) -> None:
        """Count `rank`, a spare, among those that train."""
        self.asleep.discard(rank)
        self._count()

    def rank_left(self, rank: int) -> None:
        """Expect no more steps of `rank`, perhaps this one. It may live on, and then hears of the end."""
        self.left.add(rank)
        self._count()

    def stayed(self, ranks: Iterable[int]) -> None:
        """Take back that these ranks have left: they are there at the end."""
        self.left.difference_update(ranks)
        self._count()

    def tell_stop(self) -> tuple[int, ...]:
        """Return the peers to tell that training ends: once, when it does, and again after a death; otherwise none. A
        peer that is listed twice gets two messages."""
        if self.stop is Stop.NONE or self.stop_told:
            return ()
        self.stop_told = True
        peers = broadcast_peers(self.rank, self.present)
        # A spare that sleeps hears of the end by nothing else, nor does a rank that has left and lives: one damaged
        # message must not be all that it is sent. Of three ranks and more each is told by two.
        return 2 * peers if len(peers) == 1 and peers[0] in self.left | self.asleep else peers

    def _count(self) -> None:
        self.living = [rank for rank in self.present if rank not in self.left and rank not in self.asleep]

    def _check_budget(self) -> None:
        if self.global_steps >= self.budget_steps:
            self.stop_now(Stop.BUDGET)


class ExchangeState(NamedTuple):
    """The part of an exchange that a checkpoint keeps."""

    steps_by_rank: list[int]  # of every rank, as far as known
    base_steps: int = 0  # steps made before the run's number of ranks changed
    round: int = 0
    weight: float = 1.0
    lost: Sequence[int] = ()  # other ranks that have trained and train no more: dead, or told to leave

    @property
    def global_steps(self) -> int:
        """Steps of all ranks, as far as known."""
        return self.base_steps + sum(self.steps_by_rank)


class StartState(NamedTuple):
    """State at the start of training, as a spare that sleeps has to know it."""

    num_parameters: int
    signature: int  # of the network's layout
    start: ExchangeState  # of every rank, those that sleep too


def budget_of(
    comm: Communicator, start: ExchangeState, total_steps: int, spares: int, groups: Sequence[int] = ()
) -> StepBudget:
    """Return what a rank of a job knows when it begins to train or to sleep."""
    return StepBudget(comm.rank, comm.size, total_steps, start.steps_by_rank, start.base_steps, spares, groups)


def broadcast_peers(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks to tell a piece of news so that, passed on once by everyone, it reaches all in log2 n hops."""
    n, place = len(ranks), ranks.index(rank)
    return tuple(ranks[(place + (1 << k)) % n] for k in range((n - 1).bit_length()))
