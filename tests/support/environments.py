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

    _ended = 0  # episodes

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"is_success": self._ended % 2 == 1, "unseen": None}
        self._ended += terminated or truncated
        return observation, reward, terminated, truncated, info


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


class Placed(Sparkle):
    """Shows where the options of each reset place it; where it `breaks`, action 1 fails."""

    def __init__(self, render_mode: str | None = None, breaks: bool = False) -> None:
        super().__init__(render_mode)
        self._breaks = breaks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        assert options is not None
        shown = np.array(options["place"], np.float32)
        options["place"].clear()  # what an episode does to its options is not seen by the next
        return shown, {}

    def step(self, action: Any) -> Any:
        if self._breaks and action == 1:
            raise RuntimeError("on purpose")
        return super().step(action)


class Both(gymnasium.Env[Any, Any]):
    """A picture whose left or right half is bright and a number of either sign; the right action is told by the two
    together. A third action is masked. Episodes of four steps, half of them cut."""

    observation_space = gymnasium.spaces.Dict(
        {"number": gymnasium.spaces.Box(-1, 1, (1,)), "picture": gymnasium.spaces.Box(0, 255, (8, 8, 1), np.uint8)}
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._look()

    def step(self, action: Any) -> Any:
        assert action != 2, "it is masked"
        reward, self._steps = float(action == self._right), self._steps + 1
        ended, is_cut = self._steps == 4, bool(self.np_random.integers(2))
        observation, info = self._look()
        return observation, reward, ended and not is_cut, ended and is_cut, info

    def _look(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        side, sign = self.np_random.integers(2, size=2)
        self._right = side ^ sign
        picture = np.zeros((8, 8, 1), np.uint8)
        picture[:, 4 * side : 4 * side + 4] = 255
        observation = {"number": np.array([2 * sign - 1], np.float32), "picture": picture}
        return observation, {"action_mask": np.array([1, 1, 0], np.int8)}
