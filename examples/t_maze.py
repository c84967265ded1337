"""A task that needs a memory, by policies with and without one: `python examples/t_maze.py lstm` (or gru, none).

A T-maze (Bakker, "Reinforcement Learning with Long Short-Term Memory", 2002): the first observation says on which side
the goal is, a corridor follows, and at its end the agent turns. All junctions look alike. So a policy that sees only
the present turns to the right side in half of the episodes, whatever it does: its expected return is 0. The most is 1.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

import pala
from pala.config import A2CConfig, EnvConfig, EvaluationConfig, NetworkConfig


class TMaze(gymnasium.Env):
    """Observations: [1 at the begin if the goal is left, the same for right, 1 at the junction]. Actions: left, right,
    which count at the junction alone. Rewards, there: 1 on the right side, -1 on the other."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)
    corridor_steps = 8

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.goal = int(self.np_random.integers(2))
        self.steps = 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        seen = np.zeros(3, np.float32)
        if self.steps == 0:
            seen[self.goal] = 1.0
        seen[2] = self.steps == self.corridor_steps
        return seen

    def step(self, action: int) -> Any:
        if self.steps == self.corridor_steps:
            return self.look(), 1.0 if action == self.goal else -1.0, True, False, {}
        self.steps += 1
        return self.look(), 0.0, False, False, {}


def main(memory: str, total_steps: int) -> None:
    """Train at most so many steps, and say what the policy gets."""
    config = pala.Config(
        total_steps=total_steps,
        env=EnvConfig("TMaze"),
        a2c=A2CConfig(rollout_steps=20, learning_rate=1e-3),
        network=replace(NetworkConfig(), memory=memory),
        evaluation=EvaluationConfig(episodes=200),
    )
    result = pala.fit(config, make_env=TMaze)
    if result.leads and result.evaluation is not None:
        print(f"memory {memory}: mean return {result.evaluation.mean_return:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
