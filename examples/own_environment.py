"""Train on an environment of your own: `python examples/own_environment.py`, or with `mpirun -np 4` before it.

From the command line the same environment is played by its id, since this module registers it:

    cd examples && python -m pala.train --env.id own_environment:Corridor-v0 --total-steps 20000

Its run names this module, which later programs import only if told to: `pala evaluate RUN --trust-run`.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np

import pala

LENGTH = 8


class Corridor(gymnasium.Env[np.ndarray, np.int64]):
    """Reach the right end: a reward of 1 there, and a small price for each step."""

    observation_space = gymnasium.spaces.Box(0, 1, (LENGTH,), np.float32)  # where the agent is, one-hot
    action_space = gymnasium.spaces.Discrete(2)  # left, right

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(LENGTH - 1))
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._place = max(0, self._place + (1 if action == 1 else -1))
        is_at_end = self._place == LENGTH - 1
        return self._observe(), float(is_at_end) - 0.01, is_at_end, False, {}

    def _observe(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[self._place]


def make_env() -> gymnasium.Env:
    """One fresh environment; episodes end after 100 steps at the latest."""
    return gymnasium.wrappers.TimeLimit(Corridor(), 100)


gymnasium.register("Corridor-v0", make_env)


def main(total_steps: int) -> None:
    """Train, evaluate, and say how it went."""
    config = pala.Config(total_steps=total_steps)
    result = pala.fit(config, make_env=make_env)
    if result.leads and result.evaluation is not None:
        print(f"mean return {result.evaluation.mean_return:.2f} of at most 0.99; the run is in {result.run}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
