"""Gorila's ranks without MPI, in one process and in lockstep: each message arrives at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.comm.base import Bytes, Received
from pala.config import Config, EnvConfig, GorilaConfig, NetworkConfig, RunConfig
from pala.envs.vector import make_envs
from pala.exchange.budget import StepBudget
from pala.exchange.wire import Message
from pala.gorila import worker as worker_module
from pala.gorila.agent import GorilaAgent
from pala.gorila.dqn import DQN
from pala.gorila.exchange import GorilaExchange
from pala.gorila.messages import Kind
from pala.gorila.networks import QNetwork
from pala.gorila.node import Node, Rules
from pala.gorila.roles import assign
from pala.gorila.shard import ServedModel, Shard
from pala.gorila.store import ReplayStore
from pala.networks.network import FlatParameters
from pala.networks.tape import AutogradTape, Tape
from pala.system.interrupt import Interrupt

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
CPU = torch.device("cpu")
CELLS, SEED = 5, 3
RankT = TypeVar("RankT", bound="Rank")


def begin_with(parameters: torch.Tensor) -> ServedModel:
    """What the shards of a new run begin with."""
    return ServedModel(parameters, torch.zeros_like(parameters), parameters)


class Corridor(gymnasium.Env):
    """A corridor of cells: every step costs 0.1, its right end pays 3 and ends the episode, as does a time limit."""

    observation_space = Box(0, 1, (CELLS,), np.float32)
    action_space = Discrete(3, start=-1)  # left, stay, right
    limit = 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = int(self.np_random.integers(CELLS - 1)), 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.eye(CELLS, dtype=np.float32)[self.at]

    def step(self, action):
        self.at = min(max(self.at + int(action), 0), CELLS - 1)
        self.steps += 1
        at_end = self.at == CELLS - 1
        return self.look(), 3.0 if at_end else -0.1, at_end, self.steps == self.limit, {}


def make_network() -> QNetwork:
    torch.manual_seed(SEED)
    return QNetwork(Corridor.observation_space, Corridor.action_space, NetworkConfig(mlp_hidden=(8,)))


def make_config(num_envs: int = 1, total_steps: int = 10**9, **gorila: Any) -> Config:
    small = {
        "replay_capacity_steps": 60, "min_replay_steps": 20, "minibatch_size": 8, "target_period_updates": 7,
        "epsilon_decay_steps": 150, "loss_filter_deviations": 0.0, "adagrad_learning_rate": 0.05,
    }  # fmt: skip
    return Config(
        algorithm="gorila", total_steps=total_steps, env=EnvConfig(num_envs=num_envs),
        gorila=GorilaConfig(**small | gorila), run=RunConfig(log_interval_s=1e6, checkpoint_interval_s=1e6),
    )  # fmt: skip


SEPARATE = {"roles": "separate", "num_actors": 1, "num_learners": 1}
GLOBAL = SEPARATE | {"replay": "global", "num_replays": 1}
LOCAL = {"roles": "separate", "num_actors": 2, "num_learners": 2}  # ranks: shard, 2 learners, 2 actors
MANY = LOCAL | {"replay": "global", "num_replays": 2, "num_shards": 2}  # 2 shards, 2 replays, 2 learners, 2 actors


class Rank:
    """All that a rank has of a real one, except MPI: its bytes arrive at once at the rank that they are sent to."""

    make_env: Callable[[], gymnasium.Env] = Corridor
    make_tape: Callable[[QNetwork], Tape] = AutogradTape

    def __init__(self, rank: int, config: Config, cluster: list[Rank], num_ranks: int, base_steps: int = 0) -> None:
        self.rank, self.cluster, self.sent = rank, cluster, Counter[Kind]()
        self.last: dict[Kind, tuple[int, bytes]] = {}  # of each kind, its receiver and the bytes
        gorila, roles = config.gorila, assign(config.gorila, num_ranks)
        self.envs = make_envs(config.env, 1, self.make_env)
        network, target_network = self.make_network(), self.make_network()
        self.flat, self.target = FlatParameters(network, CPU), FlatParameters(target_network, CPU)
        self.target.data.copy_(self.flat.data)
        space = self.envs.observation_space
        rules = Rules.of(config, roles, num_ranks, self.flat, space, frame_stack=1)
        self.parts, self.wire = rules.slices, rules.wire
        self.shard, self.store = None, None
        if rank in roles.shards:
            begin = begin_with(self.flat.data)
            self.shard = Shard(begin, self.parts[roles.shards.index(rank)], gorila)
        if rank in roles.replays:
            self.store = ReplayStore(
                roles.actors_of(rank), gorila.replay_capacity_steps, config.env.num_envs, space, 1,
                min_steps=gorila.min_replay_steps, update_period_steps=gorila.update_period_steps,
                minibatch_size=gorila.minibatch_size, rng=np.random.default_rng(SEED),
            )  # fmt: skip
        budget = StepBudget(rank, num_ranks, config.total_steps, base_steps=base_steps)
        self.transport = AtOnce(self.send)
        comm: Any = SimpleNamespace(rank=rank, interrupt=Interrupt(), open_transport=lambda: self.transport)
        make_node = partial(Node, budget, rules, 0, self.shard, self.store)
        self.exchange = GorilaExchange(comm, make_node)
        with self.exchange.node() as self.node:
            pass
        self.tape, self.target_tape = self.make_tape(network), self.make_tape(target_network)
        self.dqn = DQN(network.distribution, self.tape, self.flat, self.target_tape, self.target, gorila)
        agent = GorilaAgent(rank, config, self.envs, CPU, network, self.flat, rules, 1, self.dqn, self.store)
        agent.generator = torch.Generator().manual_seed(SEED)
        self.worker = agent.make_loop(self.exchange)

    def make_network(self) -> QNetwork:
        return make_network()

    def send(self, peer: int, packet: Bytes) -> None:
        data = packet.data
        message = self.wire.decode(data)
        assert isinstance(message, Message)
        self.sent[message.kind] += 1
        self.last[message.kind] = peer, data.tobytes()
        self.cluster[peer].hear(self.rank, data.tobytes())

    def hear(self, source: int, data: bytes) -> None:
        self.exchange.on_message(Received(source, np.frombuffer(bytearray(data), np.uint8), False, 0.0))


class AtOnce:
    """A transport whose messages arrive as they are sent."""

    def __init__(self, send: Callable[[int, Bytes], None]) -> None:
        self.send = send

    def start(self, receiver: object) -> None: ...

    def poll(self) -> None: ...

    def hurry(self, waiting: bool) -> None: ...

    def raise_failure(self) -> None: ...


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_module, "_PATIENCE_S", 0.0)
    yield


def make_ranks(
    num_ranks: int, config: Config, base_steps: int = 0, make_rank: Callable[..., RankT] = Rank
) -> list[RankT]:
    cluster: list[RankT] = []
    cluster += [make_rank(rank, config, cluster, num_ranks, base_steps) for rank in range(num_ranks)]
    return cluster


ENV_SEEDS = np.array([11, 12, 13])


def play(ranks: Sequence[Rank]) -> Iterator[None]:
    """Play in lockstep forever: actors go first, then learners; shards and replays just answer."""
    roles = ranks[0].node.roles
    order = [ranks[rank] for rank in dict.fromkeys((*roles.actors, *roles.learners))]
    for rank in order:
        acts = rank.rank in roles.actors
        rank.worker.begin(rank.envs.reset(ENV_SEEDS[: rank.envs.num_envs]) if acts else None)
    while True:
        for rank in order:
            rank.worker._advance()
        yield


def play_steps(ranks: Sequence[Rank], steps: int) -> None:
    """Make `steps` steps of each environment."""
    lockstep = play(ranks)
    for _ in range(steps):
        next(lockstep)
