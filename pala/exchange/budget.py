"""The budget of environment steps that all ranks share, and the news of its end. Pure.

Every message carries the local steps of all ranks as far as its sender knows; they are merged by maximum, so the known
total never exceeds the true one. A rank that sees the budget met stops and tells log2 n others, who pass it on.
Overshoot: what is done while the news travels.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pala.comm.base import Communicator
    from pala.config import Config


class Stop(enum.IntEnum):
    """Why training ends. Of several reasons the highest counts."""

    NONE = 0
    BUDGET = 1
    CALLBACK = 2  # of the user's: the policy is good enough, or will never be
    ALL_LEAVE = 3  # nobody is left who was not told to leave
    SIGNAL = 4  # that asks the whole job to end

    @property
    def completes(self) -> bool:
        """Whether the run is complete: its final policy is made."""
        return self in (Stop.BUDGET, Stop.CALLBACK)


class StepBudget:
    """What one rank knows of everybody's steps, of who lives and of the end. Every method is a pure transition."""

    def __init__(
        self, rank: int, size: int, budget_steps: int, local_steps: Iterable[int] | None = None, base_steps: int = 0,
        spares: int = 0,
    ) -> None:  # fmt: skip
        """`local_steps`: of every rank at the start; `base_steps`: made by an earlier run with other ranks; the last
        `spares` ranks sleep until one of those before is gone."""
        self.rank, self.size, self._num_places = rank, size, size - spares
        self.budget_steps, self.base_steps = budget_steps, base_steps
        # uint64 [size]; replaced, never changed, as messages on their way hold it
        self.local_steps = np.array(np.zeros(size) if local_steps is None else list(local_steps), np.uint64)
        self._sum = int(self.local_steps.sum())
        self.stop = Stop.NONE  # why training ends here
        # Lists only once a rank is gone: 10,000 lists of 10,000 ranks would take 4 GB.
        self.present: Sequence[int] = range(size)  # ranks whose process lives, as far as known here; sorted
        self.living: Sequence[int] = range(size - spares)  # those of them that train
        self._asleep = set(range(size - spares, size))  # spares that have taken no place
        self.left: set[int] = set()  # ranks that have left in good order, dead since or not
        self._stop_told = False
        self._check_budget()

    @property
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here: never more than were made."""
        return self.base_steps + self._sum

    def add_steps(self, steps: int) -> None:
        """This rank made so many."""
        self.local_steps = self.local_steps.copy()
        self.local_steps[self.rank] += np.uint64(steps)
        self._sum += steps
        self._check_budget()

    def news(self, local_steps: np.ndarray, stop: Stop) -> None:
        """What a message says of everyone's steps and of the end. uint64 [size]."""
        self.local_steps = np.maximum(self.local_steps, local_steps)
        self._sum = int(np.add.reduce(self.local_steps))
        for rank in [rank for rank in self._asleep if self.local_steps[rank] > 0]:
            self.rank_joined(rank)
        self.stop_now(stop)
        self._check_budget()

    def stop_now(self, reason: Stop) -> None:
        """This rank ends training, and will tell the others."""
        if self.stop is Stop.NONE:
            self.stop = reason

    def peer_died(self, peer: int) -> None:
        """`peer` is gone."""
        if peer in self.present:
            self.present = [p for p in self.present if p != peer]
            self._stop_told = False  # whom the dead peer should have told must hear it from others
            self._count()

    @property
    def is_needed(self) -> bool:
        """True of a rank that sleeps and has to take a place. As many ranks train as in the beginning, the lowest
        that live. So all agree on who they are as soon as they have heard of the same deaths, in whatever order; and
        with every further death one who had to train still has to."""
        lowest = [rank for rank in self.present if rank not in self.left][: self._num_places]
        return self.stop is Stop.NONE and self.rank in lowest

    @property
    def lost(self) -> list[int]:
        """Other ranks that have trained and train no more."""
        training = {self.rank, *self.living}
        return [r for r in range(self.size) if r not in training and (r < self._num_places or self.local_steps[r] > 0)]

    @property
    def joining(self) -> list[int]:
        """Spares that train from now on, and of which no step is known."""
        return [r for r in self.living if r >= self._num_places and not self.local_steps[r]]

    def rank_joined(self, rank: int) -> None:
        """`rank`, a spare, trains from now on."""
        self._asleep.discard(rank)
        self._count()

    def rank_left(self, rank: int) -> None:
        """`rank`, perhaps this one, makes no more steps. It may live on, and then hears of the end."""
        self.left.add(rank)
        self._count()

    def stayed(self, ranks: Iterable[int]) -> None:
        """These ranks are there at the end: what they may have said of leaving did not come true."""
        self.left.difference_update(ranks)
        self._count()

    def tell_stop(self) -> tuple[int, ...]:
        """Peers to tell that training ends: once, when it does, and anew after a death; otherwise none. A peer that is
        listed twice gets two messages."""
        if self.stop is Stop.NONE or self._stop_told:
            return ()
        self._stop_told = True
        peers = broadcast_peers(self.rank, self.present)
        # A spare that sleeps hears of the end by nothing else, nor does a rank that has left and lives: one damaged
        # message must not be all that it is sent. Of three ranks and more each is told by two.
        return 2 * peers if len(peers) == 1 and peers[0] in self.left | self._asleep else peers

    def _count(self) -> None:
        self.living = [rank for rank in self.present if rank not in self.left and rank not in self._asleep]

    def _check_budget(self) -> None:
        if self.global_steps >= self.budget_steps:
            self.stop_now(Stop.BUDGET)


class ExchangeState(NamedTuple):
    """What a checkpoint keeps of an exchange."""

    local_steps: list[int]  # of every rank, as far as known
    base_steps: int = 0  # steps made before the run's number of ranks changed
    round: int = 0
    weight: float = 1.0
    lost: Sequence[int] = ()  # other ranks that have trained and train no more: dead, or told to leave

    @property
    def global_steps(self) -> int:
        """Made by all ranks, as far as known."""
        return self.base_steps + sum(self.local_steps)


def budget_of(comm: Communicator, config: Config, start: ExchangeState) -> StepBudget:
    """What a rank of a job knows when it begins, or begins to sleep."""
    return StepBudget(
        comm.rank, comm.size, config.total_steps, start.local_steps, start.base_steps, config.run.spares
    )  # fmt: skip


def broadcast_peers(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Whom to tell a piece of news so that, passed on once by everyone, it reaches all in log2 n hops."""
    n, place = len(ranks), ranks.index(rank)
    return tuple(ranks[(place + (1 << k)) % n] for k in range((n - 1).bit_length()))
