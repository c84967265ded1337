"""A planted game for replay memories, and what tells its transitions apart."""

from __future__ import annotations

from collections import deque

import numpy as np
from gymnasium.spaces import Box

from pala.envs.vector import Episode, Step
from pala.gorila.replay import Batch

Row = tuple  # what tells a transition from all others; an empty one is a gap


def told(batch: Batch) -> list[Row]:
    observations, actions, rewards, next_observations, terminated = batch
    return [
        (observations[i].tobytes(), actions[i], rewards[i], next_observations[i].tobytes(), bool(terminated[i]))
        for i in range(len(actions))
    ]


FRAMES, VECTORS = (np.uint8, (2, 2)), (np.float32, (3,))


class Game:
    """Environments whose every frame is new: each step ends as it is told to ('on', 'life', 'over', 'limit' or
    'fail')."""

    def __init__(self, num_envs: int, frame_stack: int, kind: tuple) -> None:
        self.dtype, self.shape = kind
        self.num_frames = 0
        self.stacks = [deque[np.ndarray](maxlen=frame_stack) for _ in range(num_envs)]
        self.space = Box(0, 255, self.shape if frame_stack == 1 else (frame_stack, *self.shape), self.dtype)

    def _frame(self) -> np.ndarray:
        self.num_frames += 1
        if self.dtype == np.uint8:
            return np.array([self.num_frames], "<i4").view(np.uint8).reshape(self.shape)
        return np.full(self.shape, self.num_frames, self.dtype)

    def _observation(self, env: int) -> np.ndarray:
        return np.stack(self.stacks[env]).reshape(self.space.shape)

    def _first(self, env: int) -> None:
        self.stacks[env].extend([np.zeros(self.shape, self.dtype)] * (self.stacks[env].maxlen - 1) + [self._frame()])

    def reset(self) -> np.ndarray:
        for env in range(len(self.stacks)):
            self._first(env)
        return np.stack([self._observation(env) for env in range(len(self.stacks))])

    def step(self, ends: list[str]) -> Step:
        final = []
        for env, end in enumerate(ends):
            self.stacks[env].append(self._frame())
            if end == "limit":
                final.append(self._observation(env))
            if end in ("over", "limit", "fail"):
                self._first(env)
        return Step(
            np.stack([self._observation(env) for env in range(len(ends))]),
            np.arange(len(ends), dtype=np.float32) + self.num_frames,
            np.array([end in ("life", "over") for end in ends]),
            np.array([end == "limit" for end in ends]),
            np.array(final, self.dtype).reshape(-1, *self.space.shape),
            [Episode(0.0, 0, env) for env, end in enumerate(ends) if end in ("over", "limit")],
            np.array([end == "fail" for end in ends]),
        )
