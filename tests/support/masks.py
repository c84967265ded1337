"""Environments that mask actions: this module loads neither torch nor PALA."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

CHOICES = (3, 2, 4)


class Fickle(gymnasium.Env[np.ndarray, Any]):
    """Allows other actions at each step, by chance, and raises if another one is taken.

    Episodes of 7 steps, the half of them cut; after the last step no action is allowed. `how`: "info", "method" or
    "tuple" (of a mask for each choice).
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    most_steps = 7

    def __init__(self, how: str = "info", sizes: tuple[int, ...] = (5,)) -> None:
        self._how, self._sizes = how, sizes
        self.action_space = gymnasium.spaces.MultiDiscrete(sizes)
        if len(sizes) == 1:
            self.action_space = gymnasium.spaces.Discrete(sizes[0])
        if how == "method":
            self.action_masks = self._mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._look()

    def step(self, action: Any) -> Any:
        for choice, allowed in zip(np.atleast_1d(action), self._allowed, strict=True):
            assert allowed[choice], f"{action} of {self._allowed}"
        self._steps += 1
        ended = self._steps == self.most_steps
        observation, info = self._look(ended)
        is_cut = ended and self.np_random.random() < 0.5
        return observation, float(np.sum(action)), ended and not is_cut, is_cut, info

    def _look(self, ended: bool = False) -> tuple[np.ndarray, dict[str, Any]]:
        self._allowed = [self.np_random.random(size) < 0.4 for size in self._sizes]
        for allowed in self._allowed:
            allowed[self.np_random.integers(len(allowed))] = True
            allowed &= not ended
        info = {} if self._how == "method" else {"action_mask": self._mask()}
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), info

    def _mask(self) -> Any:
        masks = tuple(allowed.astype(np.int8) for allowed in self._allowed)
        return masks if self._how == "tuple" else np.concatenate(masks)


class Unmasked(gymnasium.Wrapper):
    """Leaves the masks of an `info` out: all, or from the `first` step on."""

    def __init__(self, env: gymnasium.Env, first: int = -1) -> None:
        super().__init__(env)
        self._first, self._steps = first, 0

    def reset(self, **arguments: Any) -> Any:
        observation, info = self.env.reset(**arguments)
        return observation, self._left(info)

    def step(self, action: Any) -> Any:
        self._steps += 1
        *outcome, info = self.env.step(action)
        return *outcome, self._left(info)

    def _left(self, info: dict[str, Any]) -> dict[str, Any]:
        return {} if self._steps >= self._first else info
