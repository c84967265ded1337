"""PPO in one file, alone or with gossip between ranks.

    python examples/gossip_ppo.py                                  # CartPole on one rank
    mpirun -np 4 python examples/gossip_ppo.py                     # on four: the same script
    mpirun -np 4 python examples/gossip_ppo.py --atari Breakout    # a game of Atari, 10 million steps

Every rank plays environments of its own and makes PPO's updates on its own; after each it sends its model to a peer and
averages in what a peer sent. Steps are of all environments of all ranks. Nothing but `pala.Gossip` is pala's.

Measured on CartPole, the mean return after 50,000 steps of all ranks with seeds from 1: 500, 500, 500 on one rank,
268, 190, 199 on two, 499, 161, 111 on four, each of which makes a quarter of the updates. The medians of the whole
command's time on 2 cores: 14.0, 10.0 and 14.1 s (results/library/).

Sources, named where they are used:
    PPO    Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347
    GAE    Schulman et al. 2016, High-Dimensional Continuous Control Using GAE, arXiv:1506.02438
    37     Huang et al. 2022, The 37 Implementation Details of PPO, ICLR blog track; numbered as its core details are
    ALE    Machado et al. 2018, Revisiting the Arcade Learning Environment, arXiv:1709.06009
    Zoo    rl-baselines3-zoo, hyperparams/ppo.yml, whose settings are used

Shapes: T steps of a rollout, N environments, B = T x N samples.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

import pala

SAME_STEP = AutoresetMode.SAME_STEP  # an episode's first observation comes in the step that ended the one before


@dataclass(frozen=True)
class Settings:
    """PPO's settings of a task."""

    num_envs: int  # of each rank
    rollout_steps: int  # T
    minibatch: int  # samples of an optimiser step
    epochs: int  # passes over a rollout
    learning_rate: float  # falls to 0 over the budget (37: 4)
    clip: float  # of the policy's ratio (PPO, equation 7); falls to 0 as the rate does (Zoo)
    discount: float
    gae_lambda: float
    entropy_coefficient: float
    value_coefficient: float = 0.5
    max_grad_norm: float = 0.5  # (37: 11)


CARTPOLE = Settings(8, 32, 256, 20, 1e-3, 0.2, discount=0.98, gae_lambda=0.8, entropy_coefficient=0.0)
ATARI = Settings(8, 128, 256, 4, 2.5e-4, 0.1, discount=0.99, gae_lambda=0.95, entropy_coefficient=0.01)


def make_envs(atari: str | None, num_envs: int) -> VectorEnv:
    """CartPole, or a game of Atari with DeepMind's preprocessing: 84 x 84, 4 frames a step, the last 4 (37: Atari)."""
    if atari is None:
        return gymnasium.make_vec("CartPole-v1", num_envs, "sync", vector_kwargs={"autoreset_mode": SAME_STEP})
    import ale_py

    gymnasium.register_envs(ale_py)
    # A lost life does not end an episode (ALE, on episodes' ends). Rewards are clipped later: returns are the game's.
    return gymnasium.make_vec(f"ALE/{atari}-v5", num_envs, reward_clipping=False, autoreset_mode=SAME_STEP)


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, biases of zero (37: 2)."""
    nn.init.orthogonal_(module.get_parameter("weight"), gain)
    nn.init.zeros_(module.get_parameter("bias"))
    return module


class Agent(nn.Module):
    """A policy and a value: with one convolutional trunk for images (37: Atari), else two networks (37: 13)."""

    def __init__(self, observations: gymnasium.Space, num_actions: int) -> None:
        super().__init__()
        self.is_image = len(observations.shape) == 3
        if self.is_image:
            self.trunk = nn.Sequential(
                *(layer(nn.Conv2d(observations.shape[0], 32, 8, stride=4)), nn.ReLU()),
                *(layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(), layer(nn.Conv2d(64, 64, 3)), nn.ReLU()),
                *(nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
            )
            self.policy = layer(nn.Linear(512, num_actions), gain=0.01)
            self.value = layer(nn.Linear(512, 1), gain=1.0)
        else:
            self.trunk = nn.Identity()
            self.policy = self._two_layers(observations.shape[0], num_actions, gain=0.01)
            self.value = self._two_layers(observations.shape[0], 1, gain=1.0)

    @staticmethod
    def _two_layers(inputs: int, outputs: int, gain: float) -> nn.Module:
        hidden = [layer(nn.Linear(inputs, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh()]
        return nn.Sequential(*hidden, layer(nn.Linear(64, outputs), gain))

    def forward(self, observations: Tensor) -> tuple[Categorical, Tensor]:
        """The policy and the value [B] of observations [B, ...]."""
        features = self.trunk(observations / 255 if self.is_image else observations)
        return Categorical(logits=self.policy(features)), self.value(features).squeeze(-1)


@dataclass
class Rollout:
    """T steps of N environments, all but the observations [T, N] in float32."""

    observations: Tensor  # [T, N, ...]
    actions: Tensor  # int64
    log_probs: Tensor
    values: Tensor
    rewards: Tensor  # clipped for Atari; a truncated episode's last one has its future's value on it
    ends: Tensor  # 1 where an episode ended by this step

    @classmethod
    def empty(cls, steps: int, envs: VectorEnv) -> Rollout:
        """Make room for a rollout."""
        space, shape = envs.single_observation_space, (steps, envs.num_envs)
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        observations = torch.zeros(*shape, *space.shape, dtype=dtype)
        return cls(observations, torch.zeros(shape, dtype=torch.int64), *(torch.zeros(shape) for _ in range(4)))

    def advantages(self, last_value: Tensor, discount: float, gae_lambda: float) -> Tensor:
        """Generalised advantage estimates [T, N] (GAE, equation 16), cut where an episode ended."""
        advantages, advantage, next_value = torch.zeros_like(self.values), torch.zeros_like(last_value), last_value
        for step in reversed(range(len(self.values))):
            goes_on = 1 - self.ends[step]
            delta = self.rewards[step] + discount * goes_on * next_value - self.values[step]
            advantage = delta + discount * gae_lambda * goes_on * advantage
            advantages[step], next_value = advantage, self.values[step]
        return advantages


class Player:
    """Plays the environments of a rank on and on, and keeps the unclipped returns of whole episodes."""

    def __init__(self, envs: VectorEnv, agent: Agent, seed: int) -> None:
        self.envs, self.agent = envs, agent
        self.returns: list[list[float]] = [[] for _ in range(envs.num_envs)]  # of each environment's whole episodes
        self._observations, _ = envs.reset(seed=seed)
        self._running = np.zeros(envs.num_envs)  # return of each episode that is under way

    @torch.no_grad()
    def play(self, rollout: Rollout, discount: float) -> Tensor:
        """Fill a rollout; return the value [N] of what comes after it."""
        for step in range(len(rollout.values)):
            observations = torch.as_tensor(self._observations)
            policy, values = self.agent(observations)
            actions = policy.sample()
            rollout.observations[step], rollout.actions[step] = observations, actions
            rollout.values[step], rollout.log_probs[step] = values, policy.log_prob(actions)
            self._observations, rewards, terminated, truncated, info = self.envs.step(actions.numpy())
            self._count(rewards, terminated | truncated)
            rewards = np.sign(rewards) if self.agent.is_image else rewards  # (37: Atari)
            rollout.rewards[step] = torch.as_tensor(rewards)
            rollout.ends[step] = torch.as_tensor(terminated | truncated)
            cut = truncated & ~terminated
            if cut.any():  # what would have come is worth the value of the last observation
                last = torch.as_tensor(np.stack(list(info["final_obs"][cut])))
                rollout.rewards[step][torch.as_tensor(cut)] += discount * self.agent(last)[1]
        return self.agent(torch.as_tensor(self._observations))[1]

    def _count(self, rewards: np.ndarray, ends: np.ndarray) -> None:
        self._running += rewards
        for env in np.flatnonzero(ends):
            self.returns[env].append(float(self._running[env]))
            self._running[env] = 0


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Tensor,
    settings: Settings,
    left: float,
) -> None:
    """Make PPO's epochs over a rollout; `left`: part of the budget that is left."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * left
    clip = settings.clip * left
    observations = rollout.observations.flatten(0, 1)
    actions, log_probs = rollout.actions.flatten(), rollout.log_probs.flatten()
    returns, advantages = (rollout.values + advantages).flatten(), advantages.flatten()
    for _ in range(settings.epochs):
        for part in torch.randperm(len(actions)).split(settings.minibatch):
            policy, values = agent(observations[part])
            normal = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)  # (37: 7)
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            gain = torch.min(ratio * normal, ratio.clamp(1 - clip, 1 + clip) * normal)  # (PPO, equation 7)
            value_loss = (values - returns[part]).square().mean()  # not clipped: it was of no use (37: 9)
            loss = -gain.mean() + settings.value_coefficient * value_loss
            loss = loss - settings.entropy_coefficient * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
            optimizer.step()


def evaluate(agent: Agent, envs: VectorEnv, seed: int) -> float:
    """Mean return of the first episode of each environment, by sampled actions."""
    player, rollout = Player(envs, agent, seed), Rollout.empty(100, envs)
    while not all(player.returns):
        player.play(rollout, discount=1.0)
    return float(np.mean([returns[0] for returns in player.returns]))


def main(atari: str | None, total_steps: int, seed: int) -> int:
    """Train, evaluate, and return the script's exit status."""
    torch.set_num_threads(1)  # of each rank
    torch.manual_seed(seed)
    settings = CARTPOLE if atari is None else ATARI
    envs = make_envs(atari, settings.num_envs)
    agent = Agent(envs.single_observation_space, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), settings.learning_rate, eps=1e-5)  # (37: 3)
    rollout = Rollout.empty(settings.rollout_steps, envs)
    with pala.Gossip(agent, total_steps=total_steps) as gossip:
        torch.manual_seed(100 * seed + gossip.rank)  # each rank plays on its own
        player = Player(envs, agent, 1000 * (100 * seed + gossip.rank))
        while gossip.goes_on:
            last_value = player.play(rollout, settings.discount)
            advantages = rollout.advantages(last_value, settings.discount, settings.gae_lambda)
            left = max(0.0, 1 - gossip.global_steps / total_steps)
            update(agent, optimizer, rollout, advantages, settings, left)
            gossip.after_update(steps=rollout.rewards.numel())

    if gossip.rank == min(gossip.living):
        score = evaluate(agent, make_envs(atari, 20), 10_000 + seed)
        print(f"mean return {score:.1f} after {gossip.global_steps:,} steps of {gossip.size} ranks")
    return 0 if gossip.signal is None else 128 + gossip.signal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atari", metavar="GAME", help="as Breakout; by default CartPole is played")
    parser.add_argument("--total-steps", type=int, help="of all ranks together; 100,000, of Atari 10 million")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    budget = options.total_steps or (100_000 if options.atari is None else 10_000_000)
    sys.exit(main(options.atari, budget, options.seed))
