"""Gorila's loop on images: what acts and learns are the newest parameters, whichever rank's shard they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from pala.config import Config, EnvConfig, GorilaConfig, NetworkConfig
from pala.gorila.dqn import DQN, Loss, Transitions
from pala.gorila.networks import QNetwork
from pala.gorila.replay import Batch
from pala.networks.make import make_tape
from pala.networks.tape import Tape
from support.gorila_ranks import Rank, make_ranks, play_steps

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
SPACE, ACTIONS, STEPS = Box(0, 255, (1, 36, 36), np.uint8), Discrete(3), 30
CONFIG = Config(
    algorithm="gorila", env=EnvConfig(num_envs=2), network=NetworkConfig((4, 4, 4), conv_hidden=8, precision="float32"),
    gorila=GorilaConfig(
        num_shards=2, replay_capacity_steps=200, min_replay_steps=10, minibatch_size=5, update_period_steps=1,
        target_period_updates=15, epsilon_decay_steps=1,
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


class Watched(Rank):
    """One of two ranks, each with a shard; it counts what it takes of them."""

    make_env, make_tape = Noise, CheckedTape

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.taken, self.asked = 0, 0
        take_parameters, take_target = self.node.take_parameters, self.node.take_target

        def watch(take: Callable[[Tensor], bool], flat: Tensor) -> bool:
            before = flat.clone()
            changed = take(flat)
            assert changed is not flat.equal(before)
            return changed

        def watch_parameters(flat: Tensor) -> bool:
            changed = watch(take_parameters, flat)
            self.asked, self.taken = self.asked + 1, self.taken + changed
            return changed

        self.node.take_parameters = watch_parameters  # type: ignore[method-assign]
        self.node.take_target = lambda flat: watch(take_target, flat)  # type: ignore[method-assign]

    def make_network(self) -> QNetwork:
        torch.manual_seed(0)
        return QNetwork(SPACE, ACTIONS, CONFIG.network)


@pytest.mark.slow
def test_minibatches_are_learned_from_with_the_target_network_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its values were computed ahead, perhaps before it changed; and in the order in which they were sampled."""
    cluster = make_ranks(2, CONFIG, make_rank=Watched)
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
    next_batch = cluster[0].node.next_batch

    def sample() -> Batch | None:
        batch = next_batch()
        if batch is not None:
            sampled.append(batch.observations.copy())
        return batch

    cluster[0].node.next_batch = sample  # type: ignore[method-assign]
    play_steps(cluster, STEPS)
    assert len(learned) == len(sampled) > 2 * CONFIG.gorila.target_period_updates
    assert all(
        batch.observations.numpy().tolist() == seen.tolist() for batch, seen in zip(learned, sampled, strict=True)
    )
    assert cluster[0].target_tape.begun > 2


@pytest.mark.slow
def test_weights_are_made_ready_anew_exactly_when_they_change() -> None:
    cluster = make_ranks(2, CONFIG, make_rank=Watched)
    play_steps(cluster, STEPS)
    for rank in cluster:
        learned = rank.worker.counters.updates
        assert learned == (2 * STEPS - 10) // CONFIG.gorila.update_period_steps
        assert rank.tape.passes == STEPS + learned
        assert rank.tape.begun - 1 == rank.taken
        assert learned - 1 <= rank.taken < rank.asked  # the last gradient may not have come back
        # Two minibatches are due a step, and one pass is enough for both, unless the target network changes between.
        assert learned / 2 <= rank.target_tape.passes <= learned / 2 + rank.target_tape.begun
        assert 1 < rank.target_tape.begun < learned / 2
