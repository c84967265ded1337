"""A completed run with a policy, and a game that every process can make."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from pala.config import Config, EnvConfig, EvaluationConfig, NetworkConfig, to_table
from pala.envs.vector import make_envs
from pala.networks.network import ActorCritic, FlatParameters
from pala.run import checkpoint, run_folder

CARTPOLE = Config(
    env=EnvConfig(id="CartPole-v1"),
    network=NetworkConfig(mlp_hidden=(8,), background=0.0),
    evaluation=EvaluationConfig(episodes=3, num_envs=2),
)


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
