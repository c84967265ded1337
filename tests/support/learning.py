"""A learner in one process, on an environment whose every number is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from torch import nn

from pala.a2c.agent import A2CAgent
from pala.a2c.learner import Learner
from pala.a2c.update import A2C, Loss, Rollout, UpdateResult
from pala.config import A2CConfig, Config, EnvConfig, ExchangeConfig, NetworkConfig, RunConfig
from pala.envs.vector import make_envs
from pala.exchange.base import Setup
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.none import NoExchange
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.tape import AutogradTape
from pala.run.agent import Counters
from pala.run.metrics import Record
from pala.system.interrupt import Interrupt
from pala.system.seeding import derive

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
ENVS, STEPS = 2, 5
BATCH = ENVS * STEPS


class Clock(gymnasium.Env):
    """Shows [steps of the episode, a random number]; each step pays 1; truncates after `limit` steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    limit = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.array([self.steps, self.np_random.random()], np.float32)

    def step(self, action):
        self.steps += 1
        return self.look(), self.pay(), False, self.steps == self.limit, {}

    def pay(self) -> float:
        return 1.0


def configured(total_steps: int = 5 * BATCH, seed: int = 1, **a2c: object) -> Config:
    """A record of the metrics and a checkpoint after every update."""
    return Config(
        total_steps=total_steps, seed=seed, env=EnvConfig(num_envs=ENVS), network=NetworkConfig(mlp_hidden=(8,)),
        a2c=A2CConfig(rollout_steps=STEPS, **a2c), exchange=ExchangeConfig("none"),
        run=RunConfig(log_interval_s=0, checkpoint_interval_s=0),
    )  # fmt: skip


@dataclass
class Run:
    """A learner in one process without peers, and what became of it."""

    config: Config = field(default_factory=configured)
    make_env: Callable[[], gymnasium.Env] = Clock
    network: nn.Module | None = None
    exchange_class: type[NoExchange] = NoExchange
    counters: Counters = field(default_factory=Counters)
    interrupt: Interrupt = field(default_factory=Interrupt)
    records: list[Record] = field(default_factory=list)
    updates: list[tuple[Rollout, torch.Tensor, float]] = field(default_factory=list)
    saves: int = 0
    saved_s: list[float] = field(default_factory=list)  # the training time that each checkpoint has

    def __post_init__(self) -> None:
        config = self.config
        self.envs = make_envs(config.env, make_env=self.make_env)
        torch.manual_seed(int(derive(config.seed, 0, "weights")[0]))
        network = self.network or ActorCritic(self.envs.observation_space, self.envs.action_space, config.network)
        self.flat = FlatParameters(network, torch.device("cpu"))
        self.a2c = A2C(network.distribution, AutogradTape(network), self.flat, config.a2c)
        differentiate, step = self.a2c.differentiate, self.a2c.step
        rollouts = []
        self.a2c.differentiate = lambda *arguments: rollouts.append(arguments) or differentiate(*arguments)

        def noting(loss: Loss, rate: float) -> UpdateResult:
            self.updates.append((*rollouts.pop(), rate))
            return step(loss, rate)

        self.a2c.step = noting
        comm, start = (
            SimpleNamespace(rank=0, size=1, interrupt=self.interrupt, deaths=SimpleNamespace),
            ExchangeState([self.counters.local_steps]),
        )
        self.exchange = self.exchange_class(Setup(comm, self.flat.data, config, start))
        generator = torch.Generator().manual_seed(int(derive(config.seed, 0, "actions")[0]))
        agent = A2CAgent(0, config, self.envs, torch.device("cpu"), network, self.flat, self.a2c)
        agent.counters, agent.generator = self.counters, generator
        self.learner = Learner(agent, self.exchange)

    def go(self) -> Stop:
        seeds = derive(self.config.seed, 0, "environments", ENVS)
        return self.learner.run(self.envs.reset(seeds), self.records.extend, self.save)

    def save(self) -> None:
        self.saves += 1
        self.saved_s.append(self.counters.time_s)

    def of_type(self, name: str) -> list[Record]:
        return [record for record in self.records if record["type"] == name]
