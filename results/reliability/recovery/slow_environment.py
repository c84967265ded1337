"""CartPole whose steps take 5 ms of sleep, so that ranks do not wait for each other's cores."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class Slow(CartPoleEnv):
    """Sleeps in each step."""

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        return super().step(action)


gymnasium.register("SlowCartPole-v0", entry_point=Slow, max_episode_steps=500)
