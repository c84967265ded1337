"""Environments that processes of their own make: this module loads neither torch nor PALA."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import gymnasium
import numpy as np


class Sparkle(gymnasium.Env[np.ndarray, np.int64]):
    """Five steps of reward 1; can draw itself in an odd size."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - gymnasium's own way

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._left = 5
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return np.zeros(2, np.float32), 1.0, self._left == 0, False, {}

    def render(self) -> Any:
        return np.full((101, 55, 3), 40 * self._left, np.uint8)


class Told(Sparkle):
    """Says at an episode's end, of five steps, how it went."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._number = getattr(self, "_number", 0) + 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"is_success": self._number % 2 == 0, "unseen": None}


class Deadly(gymnasium.Wrapper):
    """Its process dies in the fifth step, if it is this worker's."""

    def __init__(self, worker: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps, self.worker = 0, worker

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 5 and multiprocessing.current_process().name.endswith(f"-{self.worker}"):
            os._exit(3)
        return super().step(action)


class Locked(gymnasium.Wrapper):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.lock = threading.Lock()
