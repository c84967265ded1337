"""The replay of one rank: what it holds of each actor, and how often it may be sampled.

A replay memory is sampled at the pace at which it is filled (after Reverb's rate limiter, Cassirer et al. 2021, arXiv
2102.04736): of the steps beyond the first `min_steps`, every `update_period_steps` pay for one minibatch. Learners that
ask for more wait, the first who asked first. Actors do not wait for them.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Sequence

import gymnasium
import numpy as np

from pala.gorila.replay import Batch, Experience, Replay
from pala.system.errors import PalaError


class ReplayStore:
    """One `Replay` for each actor that feeds this rank, sampled as if they were one."""

    def __init__(
        self,
        actors: Sequence[int],  # their ranks
        capacity_steps: int,  # of each
        num_envs: int,  # of each
        observation_space: gymnasium.Space,
        frame_stack: int,
        *,
        min_steps: int,
        update_period_steps: int,
        minibatch_size: int,
        rng: np.random.Generator,
    ) -> None:
        self._replays = {actor: Replay(capacity_steps, num_envs, observation_space, frame_stack) for actor in actors}
        self._update_period_steps, self._minibatch_size = update_period_steps, minibatch_size
        self.rng = rng
        self.waiting: deque[int] = deque()  # learners, each once
        self.steps = 0  # that have come
        self._served = 0
        self._min_steps = min_steps

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""
        return sum(map(len, self._replays.values()))

    @property
    def memory_bytes(self) -> int:
        """Bytes that the replay takes when it is full."""
        return sum(replay.memory_bytes for replay in self._replays.values())

    @property
    def owed(self) -> int:
        """Minibatches that may be sampled before more steps come."""
        return max(self.steps - self._min_steps, 0) // self._update_period_steps - self._served

    def begin(self, actor: int, frames: np.ndarray) -> None:
        """Take the frames of a reset of this actor's environments: before its first `add`."""
        self._replays[actor].begin(frames)

    def add(self, actor: int, experience: Experience) -> None:
        """Take one step of all environments of this actor."""
        self._replays[actor].add(experience)
        self.steps += len(experience.actions)

    def lose_step(self, actor: int) -> None:
        """Count a step of this actor as lost: what came before it is not joined to what follows."""
        self._replays[actor].lose_step()

    def take_figures(self) -> dict[str, int]:
        """Return the figures for the metrics, and begin to count again."""
        not_finite = sum(replay.not_finite for replay in self._replays.values())
        for replay in self._replays.values():
            replay.not_finite = 0
        return {"replay_transitions": len(self), "minibatches_owed": self.owed, "rewards_not_finite": not_finite}

    def ask(self, learner: int) -> None:
        """Put a learner that wants a minibatch at the end of the queue, unless it is there."""
        if learner not in self.waiting:
            self.waiting.append(learner)

    def forget(self, learner: int) -> None:
        """Leave a learner out that died. Of an actor that died, what it played stays and is sampled on."""
        self.waiting = deque(other for other in self.waiting if other != learner)

    def serve(self) -> list[tuple[int, Batch]]:
        """Return (learner, minibatch) for all that can be served now, in the order in which they asked."""
        if not self.waiting or self.owed <= 0 or not len(self):  # it may hold nothing but gaps, whatever was added
            return []
        learners = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.owed))]
        self._served += len(learners)
        return [(learner, self.sample()) for learner in learners]

    def sample(self) -> Batch:
        """Draw uniformly from all transitions: first how many of each replay, then which."""
        lengths = np.array([len(replay) for replay in self._replays.values()])
        counts = self.rng.multinomial(self._minibatch_size, lengths / lengths.sum())
        parts = [
            replay.sample(count, self.rng)
            for replay, count in zip(self._replays.values(), counts, strict=True)
            if count
        ]
        return parts[0] if len(parts) == 1 else Batch(*map(np.concatenate, zip(*parts, strict=True)))


_FITTING = 0.9  # of the memory that is available: networks and emulators need some


def check_memory(reserved_bytes: int, available_bytes: int, capacity_steps: int) -> None:
    """Raise PalaError if the replay of this host's ranks, `reserved_bytes` when full, leaves too little of its memory.

    `capacity_steps`: the configuration's, of all ranks.
    """
    if reserved_bytes > _FITTING * available_bytes:
        part = _FITTING * available_bytes / reserved_bytes
        fitting = int(0.99 * part * capacity_steps)  # some of the memory does not shrink with the capacity
        raise PalaError(
            f"When full, the replay of the ranks on {platform.node()} takes {reserved_bytes / 2**30:.1f} GiB, but "
            f"{available_bytes / 2**30:.1f} GiB of memory are available, and a tenth must stay free: lower "
            f"'gorila.replay_capacity_steps' from {capacity_steps:,} to about {fitting:,}, or use more hosts."
        )
