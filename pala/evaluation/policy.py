"""The policy of a run, and how it acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pala.config import Config
from pala.envs import Envs
from pala.exchange.kinds import kind_of
from pala.gorila.dqn import epsilon_greedy
from pala.gorila.networks import QNetwork
from pala.gorila.shard import assemble
from pala.networks.network import ActorCritic, FlatParameters, Network
from pala.run import checkpoint, run_folder
from pala.system.errors import PalaError

Actor = Callable[[np.ndarray], np.ndarray]  # observations [B, *obs] -> actions [B] or [B, A]


@dataclass(frozen=True)
class Policy:
    """A network with the parameters of a run."""

    network: Network
    global_steps: int  # of training, over all ranks
    source: str  # "final", or of which checkpoints
    environment: str | None = None  # what the run calls an environment made in Python
    epsilon: float = 0.0  # of a Q-network

    def actor(self, greedy: bool, seed: int) -> Actor:
        """A function from observations to actions, with a random stream of its own: sampled from the policy or, if
        `greedy`, the most probable; of a Q-network the best, but with probability `epsilon` any, unless `greedy`."""
        generator = torch.Generator().manual_seed(seed)
        network, distribution = self.network, self.network.distribution

        def choose(observations: torch.Tensor) -> torch.Tensor:
            if isinstance(network, QNetwork):
                return epsilon_greedy(network(observations), 0.0 if greedy else self.epsilon, generator)
            policy_output, _ = network(observations)
            return distribution.sample(policy_output, generator, greedy)

        def act(observations: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                actions = choose(torch.from_numpy(np.ascontiguousarray(observations)))
                env_actions: np.ndarray = distribution.to_env(actions).numpy()
                return env_actions

        return act


def load_policy(run: Path, config: Config, envs: Envs) -> Policy:
    """A completed run's final policy, or what its ranks' newest checkpoints hold. Raises PalaError."""
    spaces = envs.observation_space, envs.action_space
    network: Network
    if config.algorithm == "gorila":
        network = QNetwork(*spaces, config.network)
    else:
        network = ActorCritic(*spaces, config.network, config.env)
    flat = FlatParameters(network, torch.device("cpu"))
    file = run / "policy.safetensors"
    if file.exists() and run_folder.read(run)["completed"]:  # a resumed run still has its earlier policy
        named, header = checkpoint.load_policy(file, network.state_dict())
        network.load_state_dict(named)
        policy = Policy(network, header["global_steps"], "final", header.get("environment"), config.evaluation.epsilon)
    else:
        steps, source = _load_checkpoints(run, config, flat)
        policy = Policy(network, steps, source, epsilon=config.evaluation.epsilon)
    if not flat.data.isfinite().all():
        raise PalaError(f"The policy of run '{run}' ({policy.source}) has parameters that are not finite numbers.")
    return policy


def _load_checkpoints(run: Path, config: Config, flat: FlatParameters) -> tuple[int, str]:
    """Into `flat`: the weighted mean of the ranks' parameters, of independent learners rank 0's; of Gorila the shards
    put together. Returns (global steps, words for it)."""
    states = checkpoint.load_all(checkpoint.newest_segment(run), flat.signature, len(flat.data))
    ranks = f"{len(states)} rank{'s' if len(states) > 1 else ''}"
    steps = checkpoint.joint_counters(states)["base_steps"]
    if config.algorithm == "gorila":
        flat.data.copy_(assemble(states, len(flat.data)).parameters)
        return steps, f"checkpoints of {ranks}"
    independent = kind_of(config.exchange).policy == "first"
    flat.data.copy_(checkpoint.average(states, independent).tensors["parameters"])
    return steps, f"checkpoint of rank 0 of {ranks}" if independent else f"mean of checkpoints of {ranks}"
