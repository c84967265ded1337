"""Gorila's loop on images: what acts and learns are the newest parameters, whichever rank's shard they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from pala.comm.base import Bytes
from pala.config import Config, EnvConfig, GorilaConfig, NetworkConfig
from pala.envs.vector import make_envs
from pala.exchange.budget import ExchangeState, StepBudget, Stop
from pala.gorila.dqn import DQN, Loss, Transitions
from pala.gorila.networks import QNetwork
from pala.gorila.node import Formats, Node, Rules
from pala.gorila.replay import Batch, Experience
from pala.gorila.roles import assign
from pala.gorila.shard import ServedModel, Shard
from pala.gorila.store import ReplayStore
from pala.gorila.worker import Worker
from pala.networks.make import make_tape
from pala.networks.network import FlatParameters
from pala.networks.tape import Tape
from pala.run.loop import Counters, Progress
from pala.system.interrupt import Interrupt

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
SPACE, ACTIONS, STEPS = Box(0, 255, (1, 36, 36), np.uint8), Discrete(3), 30
CONFIG = Config(
    algorithm="gorila", env=EnvConfig(num_envs=2), network=NetworkConfig((4, 4, 4), conv_hidden=8),
    gorila=GorilaConfig(
        num_shards=2, replay_capacity_steps=200, min_replay_steps=20, minibatch_size=5, update_period_steps=1,
        target_period_updates=15,
    ),
)  # fmt: skip


class Noise(gymnasium.Env):
    observation_space, action_space = SPACE, ACTIONS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}

    def look(self) -> np.ndarray:
        return self.np_random.integers(0, 256, SPACE.shape, np.uint8)

    def step(self, action):
        return self.look(), float(action), False, False, {}


class CheckedTape(Tape):
    """Whose outputs must be those of the network as it is now."""

    def __init__(self, network: QNetwork) -> None:
        observations = torch.zeros(CONFIG.gorila.minibatch_size, *SPACE.shape, dtype=torch.uint8)
        self.network, self.tape = network, make_tape(network, CONFIG.network, 1, observations)
        self.begun = self.passes = 0

    def begin(self) -> None:
        self.begun += 1
        self.tape.begin()

    def forward(self, observations: Tensor) -> list[Tensor]:
        return self.checked(observations, self.tape.forward(observations))

    def peek(self, observations: Tensor) -> list[Tensor]:
        return self.checked(observations, self.tape.peek(observations))

    def backward(self, gradients_TBO: Sequence[Tensor]) -> None:
        self.tape.backward(gradients_TBO)

    def checked(self, observations: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        self.passes += 1
        torch.testing.assert_close(outputs[0], self.network(observations).detach(), rtol=1e-4, atol=1e-5)
        return outputs


class Rank:
    """One of two, each with a shard; in the place of its exchange, too. Messages arrive at once."""

    waited_s, stop = 0.0, Stop.NONE

    def __init__(self, rank: int, cluster: list[Rank]) -> None:
        gorila, env, roles = CONFIG.gorila, CONFIG.env, assign(CONFIG.gorila, 2)
        torch.manual_seed(0)
        network, target_network = (QNetwork(SPACE, ACTIONS, CONFIG.network) for _ in range(2))
        flat, target = (FlatParameters(n, torch.device("cpu")) for n in (network, target_network))
        target.data.copy_(flat.data)
        rules = Rules.of(gorila, roles, 2, flat, Formats.of(env, 1, gorila, SPACE, num_actions=3))
        self.shard = Shard(ServedModel.fresh(flat.data), rules.slices[rank], gorila)
        store = ReplayStore(
            [rank], gorila.replay_capacity_steps, env.num_envs, SPACE, 1, min_steps=gorila.min_replay_steps // 2,
            update_period_steps=gorila.update_period_steps, minibatch_size=gorila.minibatch_size,
            rng=np.random.default_rng(rank),
        )  # fmt: skip

        def send(peer: int, data: np.ndarray) -> Bytes:
            cluster[peer]._node.on_message(rank, data.copy())
            return Bytes(data)

        self._node = Node(StepBudget(rank, 2, 10**6), rules, 0, self.shard, store, send)
        self.tape, self.target_tape = CheckedTape(network), CheckedTape(target_network)
        self.taken, self.asked = 0, 0
        exchange: Any = self
        self.dqn = DQN(network.distribution, self.tape, flat, self.target_tape, target, gorila)
        progress = Progress(Counters(), torch.Generator().manual_seed(rank), ExchangeState([0, 0]))
        self.worker = Worker(CONFIG, rank, make_envs(env, 1, Noise), self.dqn, exchange, progress, Interrupt())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    @contextmanager
    def node(self) -> Iterator[Rank]:
        yield self

    @property
    def global_steps(self) -> int:
        return 10**7  # so that epsilon is small: actions are the network's

    def stepped(self, steps: int, experience: Experience) -> None:
        self._node.stepped(steps)
        self._node.experienced(experience)

    def next_batch(self, timeout_s: float) -> Batch | None:
        batch = self._node.next_batch()
        if batch is not None:
            self.on_sample(batch)
        return batch

    def on_sample(self, batch: Batch) -> None: ...

    def poll(self) -> None: ...

    def take_parameters(self, flat: Tensor) -> bool:
        before = flat.clone()
        changed = self._node.take_parameters(flat)
        assert changed is not flat.equal(before)
        self.asked, self.taken = self.asked + 1, self.taken + changed
        return changed

    def take_target(self, flat: Tensor) -> bool:
        before = flat.clone()
        changed = self._node.take_target(flat)
        assert changed is not flat.equal(before)
        return changed


@pytest.mark.slow
def test_minibatches_are_learned_from_with_the_target_network_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its values were computed ahead, perhaps before it changed; and in the order in which they were sampled."""
    cluster: list[Rank] = []
    cluster += [Rank(0, cluster), Rank(1, cluster)]
    sampled: list[np.ndarray] = []
    learned: list[Transitions] = []

    def watched(dqn: DQN, batch: Transitions, next_values: Tensor, between: Callable[[], None]) -> Loss:
        (rank,) = (rank for rank in cluster if rank.dqn is dqn)
        values = rank.target_tape.network(batch.next_observations).detach()
        torch.testing.assert_close(next_values, values, rtol=1e-4, atol=1e-5)
        if rank is cluster[0]:
            learned.append(batch)
        return differentiate(dqn, batch, next_values, between)

    differentiate = DQN.differentiate
    monkeypatch.setattr(DQN, "differentiate", watched)
    cluster[0].on_sample = lambda batch: sampled.append(batch.observations.copy())
    for rank in cluster:
        rank.worker.reset(np.arange(2) + 2 * rank.worker._envs.num_envs)
    for _ in range(STEPS):
        for rank in cluster:
            rank.worker._advance()
    assert len(learned) == len(sampled) > 2 * CONFIG.gorila.target_period_updates
    assert all(
        batch.observations.numpy().tolist() == seen.tolist() for batch, seen in zip(learned, sampled, strict=True)
    )
    assert cluster[0].target_tape.begun > 2


@pytest.mark.slow
def test_weights_are_made_ready_anew_exactly_when_they_change() -> None:
    cluster: list[Rank] = []
    cluster += [Rank(0, cluster), Rank(1, cluster)]
    for rank in cluster:
        rank.worker.reset(np.arange(2) + 2 * rank.worker._envs.num_envs)
    for _ in range(STEPS):
        for rank in cluster:
            rank.worker._advance()
    for rank in cluster:
        learned = rank.worker.counters.updates
        assert learned == (2 * STEPS - 10) // CONFIG.gorila.update_period_steps
        assert rank.tape.passes == STEPS + learned
        assert rank.tape.begun - 1 == rank.taken
        assert learned - 1 <= rank.taken < rank.asked  # the last gradient may not have come back
        # Two minibatches are due a step, and one pass is enough for both, unless the target network changes between.
        assert learned / 2 <= rank.target_tape.passes <= learned / 2 + rank.target_tape.begun
        assert 1 < rank.target_tape.begun < learned / 2
