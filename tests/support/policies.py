"""A completed run with a policy, and a game that every process can make."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from pala.config import Config, EnvConfig, EvaluationConfig, NetworkConfig, to_table
from pala.envs.vector import make_envs
from pala.networks.network import ActorCritic, FlatParameters
from pala.run import checkpoint, run_folder

CARTPOLE = Config(
    env=EnvConfig(id="CartPole-v1"),
    network=NetworkConfig(mlp_hidden=(8,)),
    evaluation=EvaluationConfig(episodes=3, num_envs=2),
)


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


def network_of(config: Config) -> ActorCritic:
    envs = make_envs(replace(config.env, num_envs=1))
    try:
        return ActorCritic(envs.observation_space, envs.action_space, config.network)
    finally:
        envs.close()


def make_run(path: Path, config: Config, network: ActorCritic | None = None) -> Path:
    """A completed run with the policy of `network`, or without one a run that is not completed."""
    path.mkdir()
    record = run_folder.RunRecord.begin(path, config, {"ranks": 2})
    if network is not None:
        record.end("completed")
        signature = FlatParameters(copy.deepcopy(network), torch.device("cpu")).signature
        header = {"config": to_table(config), "global_steps": 1234, "signature": signature}
        checkpoint.save_policy(path / "policy.safetensors", dict(network.state_dict()), header)
    return path
