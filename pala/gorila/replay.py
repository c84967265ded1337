"""Replay: a bounded memory of the transitions that one rank's environments made.

A frame is stored once, though `frame_stack` observations hold it, and each environment has a ring of its own. Row r
of a ring has the newest frame of an observation and what was done there; row r + 1 has that of the observation after.
So a transition is one row, and the two stacks are cut out of the ring when it is sampled:

    row             5     6     7     8     9           8 is the last observation before a time limit: no transition
    frame           f5    f6    f7    f8    f9          9 is the first of the next episode, a row without a past
    frames before   3     3     3     3     0           those of the same episode, as far as a stack goes
    transition      yes   yes   yes   no    no yet

A row from which no step was made is a *gap*, which is never sampled but takes a row of the capacity: the last
observation at a time limit, and the last before new games began.
"""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import numpy as np

from pala.envs.vector import Step
from pala.system.errors import PalaError


class Experience(NamedTuple):
    """The part of one step of B environments that a replay memory adds: of observations the newest frame, since the
    others came before."""

    actions: np.ndarray  # [B] int64, from 0
    rewards: np.ndarray  # [B] float32
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool, never together with terminated
    first: np.ndarray  # [B] bool: `frames` has the first of a new episode; so where truncated
    frames: np.ndarray  # [B, *frame], after the step (after the reset where an episode ended)
    final_frames: np.ndarray  # [truncated.sum(), *frame], the last ones of the truncated episodes


class Batch(NamedTuple):
    """N transitions.

    A time limit does not terminate: the value of the next observation, there the last of the cut episode, stands for
    the rest of the return.
    """

    observations: np.ndarray  # [N, *obs]
    actions: np.ndarray  # [N] int64
    rewards: np.ndarray  # [N] float32, as the environments gave them (clipped or not)
    next_observations: np.ndarray  # [N, *obs]; where a game is over, the first of the next game: not to be used
    terminated: np.ndarray  # [N] bool: the return ends here (a game over, or a lost life) and is not bootstrapped


def experience_of(actions: np.ndarray, step: Step, frame_stack: int) -> Experience:
    """Return the experience of one step of `actions` [B]. Frames are views of the step's.

    Where an environment failed, the reward is NaN, which no replay takes for a transition. Raises PalaError if there is
    more in an episode's first observation than one frame.
    """
    first, rewards, terminated = step.began, step.rewards, step.terminated
    if step.failed.any():
        rewards = np.where(step.failed, np.float32(np.nan), rewards)
        terminated = terminated | step.failed
    _check_first(step.observations[first], frame_stack)
    frames, final_frames = (_newest(stacks, frame_stack) for stacks in (step.observations, step.final_observations))
    return Experience(actions, rewards, terminated, step.truncated, first, frames, final_frames)


def reset_frames(observations: np.ndarray, frame_stack: int) -> np.ndarray:
    """Return the frames [B, *frame] of a reset's observations [B, *obs]: views.

    Raises PalaError if there is more in an episode's first observation than one frame.
    """
    _check_first(observations, frame_stack)
    return _newest(observations, frame_stack)


def frame_shape(observation_space: gymnasium.Space, frame_stack: int) -> tuple[int, ...]:
    """Return the shape of one frame: with a stack of 1 that of the observation."""
    shape = observation_space.shape or ()
    assert frame_stack == 1 or shape[0] == frame_stack
    return shape if frame_stack == 1 else shape[1:]


def _newest(observations: np.ndarray, frame_stack: int) -> np.ndarray:
    return observations if frame_stack == 1 else observations[:, -1]


def _check_first(observations: np.ndarray, frame_stack: int) -> None:
    if frame_stack > 1 and observations[:, :-1].any():
        raise PalaError(
            f"An episode's first observation is not {frame_stack - 1} frames of zeros and one other; the replay "
            "memory cannot store the frames of this environment once: use a frame stack of 1 for it."
        )


class Replay:
    """The newest `capacity` transitions of `num_envs` environments, sampled uniformly.

    `capacity` is of all environments together; each has an equal share (rounded down), of which a gap takes one.
    `frame_stack` frames make an observation, the oldest first, and those before an episode's first are zeros, as
    ale-py's vector environment gives them; with 1 an observation is stored as it is. All memory is reserved at once,
    but a page of it is taken only when it is first written. Raises PalaError.
    """

    def __init__(self, capacity: int, num_envs: int, observation_space: gymnasium.Space, frame_stack: int) -> None:
        shape, dtype = observation_space.shape or (), observation_space.dtype
        frame = frame_shape(observation_space, frame_stack)
        self._rows = capacity // num_envs
        if self._rows == 0:
            raise PalaError(
                f"A replay memory of {capacity} transitions is too small for {num_envs} environments: "
                "each needs at least one."
            )
        self._stack = frame_stack
        self._observation_shape = shape
        self._envs = np.arange(num_envs)
        self._heads = np.full(num_envs, -1)  # the newest observation's row, not wrapped around
        self._begun = False
        self._missing = np.zeros(num_envs, np.int64)  # rows to come that are no transitions, after a step was lost
        self.not_finite = 0  # transitions that were left out for their rewards; whoever reads it may set it to 0
        # The oldest transition's stack begins `frame_stack` - 1 rows before it; the newest observation has a row too.
        self._ring_rows = self._rows + frame_stack
        ring = (num_envs, self._ring_rows)
        try:
            self._frames = np.zeros((*ring, *frame), dtype)
            # Of the same episode, at most `frame_stack` - 1.
            self._past_frames = np.zeros(ring, np.min_scalar_type(frame_stack))
            self._is_transition = np.zeros(ring, bool)
            self._actions = np.zeros(ring, np.int64)
            self._rewards = np.zeros(ring, np.float32)
            self._terminated = np.zeros(ring, bool)
        except (MemoryError, ValueError):
            raise PalaError(
                f"The system does not grant the memory for {capacity:,} transitions of {dtype} {list(shape)}: "
                "lower 'gorila.replay_capacity_steps'."
            ) from None

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""
        return int(np.count_nonzero(self._is_transition))

    @property
    def memory_bytes(self) -> int:
        """Bytes that the memory takes when it is full."""
        return self._heads.nbytes + sum(ring.nbytes for ring in self._rings())

    def begin(self, frames: np.ndarray) -> None:
        """Take the frames [B, *frame] of a reset of all environments: before the first `add`."""
        self._advance(self._envs)  # what was the newest row becomes a gap
        self._place(self._envs, frames, np.ones(len(self._envs), bool))
        self._missing[:] = 0
        self._begun = True

    def add(self, experience: Experience) -> None:
        """Take the transitions of one step; everything is copied. One whose reward is not finite is left out."""
        assert self._begun, "`begin` takes the first frames"
        row, finite = (self._envs, self._heads % self._ring_rows), np.isfinite(experience.rewards)
        self._actions[row] = experience.actions
        self._rewards[row] = np.where(finite, experience.rewards, 0)
        self._terminated[row] = experience.terminated
        self._is_transition[row] = finite & (self._missing == 0)
        self._missing = np.where(experience.first, 0, np.maximum(self._missing - 1, 0))
        self.not_finite += int(np.count_nonzero(~finite))
        self._advance(self._envs)
        cut = np.flatnonzero(experience.truncated)
        if cut.size:
            self._place(cut, experience.final_frames, np.zeros(cut.size, bool))
            self._advance(cut)
        self._place(self._envs, experience.frames, experience.first)

    def lose_step(self) -> None:
        """Count a step of all environments as lost.

        What follows must not be joined to what was before, nor be seen through a stack that lacks a frame.
        """
        self._missing[:] = self._stack

    def sample(self, count: int, rng: np.random.Generator) -> Batch:
        """Draw `count` transitions uniformly, each from all, so one can come twice. Raises ValueError if empty."""
        if not self._is_transition.any():
            raise ValueError("The replay memory is empty: nothing can be sampled yet.")
        envs, rows = self._draw(count, rng)
        return Batch(
            observations=self._observations(envs, rows),
            actions=self._actions[envs, rows],
            rewards=self._rewards[envs, rows],
            next_observations=self._observations(envs, rows + 1),
            terminated=self._terminated[envs, rows],
        )

    def _advance(self, envs: np.ndarray) -> None:
        """Begin a row in the rings of `envs`; the oldest transition goes."""
        self._heads[envs] += 1
        self._is_transition[envs, (self._heads[envs] - self._rows - 1) % self._ring_rows] = False

    def _place(self, envs: np.ndarray, frames: np.ndarray, first: np.ndarray) -> None:
        """Store `frames` [N, *frame] in the newest rows; `first` [N]: of their episodes."""
        rows = self._heads[envs] % self._ring_rows
        self._frames[envs, rows] = frames
        past = self._past_frames[envs, rows - 1] + 1  # row -1 is the last of the ring, as it should be
        self._past_frames[envs, rows] = np.where(first, 0, np.minimum(past, self._stack - 1))

    def _draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw (environments, rows) of `count` transitions: uniformly over all rows, and again where there is a gap."""
        ends = np.cumsum(np.minimum(self._heads, self._rows))  # the rings' newest rows in one line
        drawn = rng.integers(ends[-1], size=count)
        while True:
            envs = np.searchsorted(ends, drawn, side="right")
            rows = (self._heads[envs] - ends[envs] + drawn) % self._ring_rows
            gaps = ~self._is_transition[envs, rows]
            if not gaps.any():
                return envs, rows
            drawn[gaps] = rng.integers(ends[-1], size=np.count_nonzero(gaps))

    def _observations(self, envs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the observations [N, *obs] whose newest frames are in `rows` [N]."""
        ages = np.arange(self._stack - 1, -1, -1)
        past = self._past_frames[envs, rows % self._ring_rows]
        stacks = self._frames[envs[:, None], (rows[:, None] - ages) % self._ring_rows]
        stacks[ages > past[:, None]] = 0
        return stacks.reshape(len(rows), *self._observation_shape)

    def _rings(self) -> list[np.ndarray]:
        return [self._frames, self._past_frames, self._is_transition, self._actions, self._rewards, self._terminated]
