"""Measurements of Gorila on one rank: like those of A2C in `measure.py`, for one environment step.

Every `update_period_steps` steps pay for one minibatch: a pass of the target network, one of the network (two with
double DQN), and one back. Acting is not in the operations, since a random action needs no pass.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import gymnasium
import numpy as np
import torch

from pala.comm.base import Communicator
from pala.config import Config
from pala.gorila.agent import GorilaAgent, build
from pala.gorila.dqn import Transitions
from pala.gorila.networks import q_network
from pala.gorila.shard import ServedModel, Shard
from pala.gorila.worker import most_at_hand
from pala.lab.benchmark.measure import ContinuedEnvs, Trial, clock, flops_of
from pala.run.metrics import Record

_MIN_REPLAY_STEPS, _CAPACITY_STEPS = 2_000, 100_000


def with_short_replay(config: Config) -> Config:
    """Return the configuration with learning that begins soon and ranks that do not sleep. What is sampled may lie in a
    cache."""
    gorila = config.gorila
    return replace(
        config,
        run=replace(config.run, spares=0),
        gorila=replace(
            gorila,
            min_replay_steps=min(gorila.min_replay_steps, _MIN_REPLAY_STEPS),
            replay_capacity_steps=min(gorila.replay_capacity_steps, _CAPACITY_STEPS),
        ),
    )


def flops_per_step(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, config: Config
) -> tuple[int, int]:
    """Return the floating-point operations of the forward passes and of the backward pass of an observation."""
    gorila = config.gorila
    forward, backward = flops_of(q_network(observation_space, action_space, config, None), observation_space)
    passes, per_step = 3 if gorila.double_dqn else 2, gorila.minibatch_size / gorila.update_period_steps
    return round(passes * forward * per_step), round(backward * per_step)


def minibatches_at_hand(config: Config) -> int:
    """Return how many minibatches a bundled learner has at once: what a step of its environments pays for."""
    paid = config.env.num_envs // config.gorila.update_period_steps
    return max(1, min(paid, most_at_hand(config)))


def network_us(agent: GorilaAgent, config: Config, observations: np.ndarray, seconds: float) -> dict[str, float]:
    """Return microseconds a step of `forward` (the target network's pass over all minibatches that training has at
    hand), `backward` (the gradient with the network's own pass, and new weights taken) and `optimiser` (a shard of
    all parameters)."""
    gorila = config.gorila
    dqn = agent.dqn
    now = clock(agent.device)
    count = gorila.minibatch_size
    at_hand = minibatches_at_hand(config) if dqn.target_tape.joins else 1
    images = torch.from_numpy(np.resize(observations, (at_hand * count, *observations.shape[1:]))).to(agent.device)
    zeros = torch.zeros(count, device=agent.device)
    batch = Transitions(images[:count], zeros.long(), zeros, images[:count], zeros.bool())
    shard = Shard(ServedModel(agent.flat.data, torch.zeros_like(agent.flat.data), agent.flat.data), slice(None), gorila)
    sums = dict.fromkeys(("forward", "backward", "optimiser"), 0.0)
    turns = 0
    end = now() + seconds
    dqn.target_tape.begin()
    while turns < 2 or now() < end:
        begin = now()
        (values,) = dqn.target_tape.peek(images)
        sums["forward"] += now() - begin
        for next_values in values.split(count):
            times = [now()]
            dqn.tape.begin()
            dqn.differentiate(batch, next_values)
            times.append(now())
            shard.apply(agent.flat.gradient.cpu(), shard.version)
            times.append(now())
            sums["backward"] += times[1] - times[0]
            sums["optimiser"] += times[2] - times[1]
        turns += at_hand
    return {name: 1e6 * total / (turns * gorila.update_period_steps) for name, total in sums.items()}


class GorilaTrial(Trial):
    """Each run fills a replay of its own first, which does not count, and begins new games, as a replay needs."""

    def __init__(self, comm: Communicator, config: Config, envs: ContinuedEnvs) -> None:
        self._comm = comm
        self._config = with_short_replay(config)
        self._envs = envs
        self.message_bytes = 0
        self.steps_before = self._config.gorila.min_replay_steps
        self.steps_per_update = config.gorila.update_period_steps
        self._steps_per_duration = 1

    def _fresh_agent(self, config: Config) -> GorilaAgent:
        gc.collect()  # the parts of the run before, with its replay, refer to each other
        return build(self._comm, config, self._envs.real)

    def run(self, global_steps: int, seconds: float, seeds: np.ndarray) -> list[Record]:
        """Train, and return the records, from the last one before anything is learned."""
        self._envs.begin_anew(seeds)
        records = super().run(global_steps, seconds, seeds)
        learns = any(record["updates"] for record in records)  # else the budget was met before
        before = [
            record
            for record in records[:-1]
            if (not record["updates"] if learns else record.get("global_steps", 0) < self.steps_before)
        ]
        return records[max(len(before) - 1, 0) :]
