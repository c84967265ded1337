"""What training does in ways of its own with Gorila: roles, shards of one model, replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.a2c.agent import prepare_device
from pala.config import Config
from pala.envs import MakeEnv
from pala.exchange.budget import StepBudget
from pala.gorila.dqn import LossFilter
from pala.gorila.exchange import GorilaExchange
from pala.gorila.networks import QNetwork
from pala.gorila.node import Formats, Node, make_wire
from pala.gorila.roles import assign
from pala.gorila.shard import Beginning, Shard, assemble, slices
from pala.gorila.store import ReplayStore, check_memory
from pala.gorila.worker import Worker
from pala.networks.make import make_tape
from pala.networks.network import FlatParameters
from pala.networks.tape import Tape
from pala.run import checkpoint
from pala.run.checkpoint import RankState
from pala.run.session import Training
from pala.system.runtime import Interrupt, available_memory_bytes, say
from pala.system.seeding import derive, stream
from pala.transport.agreement import collectively
from pala.transport.base import Bytes, Communicator


class GorilaTraining(Training):
    """The ranks share one model, of which each shard serves a slice."""

    network: QNetwork
    exchange: GorilaExchange

    def __init__(self, comm: Communicator, config: Config, make_env: MakeEnv | None, interrupt: Interrupt) -> None:
        super().__init__(comm, config, make_env, interrupt)
        self.roles = collectively(comm, lambda: assign(config.gorila, comm.size))
        gorila = config.gorila
        self.filter = LossFilter(gorila.loss_filter_deviations, gorila.loss_filter_horizon_updates)

    def _build_agent(self) -> None:
        config, envs = self.config, self.envs
        self.device = prepare_device(self.comm, config)
        torch.manual_seed(int(derive(config.seed, 0, "weights")[0]))

        def make_network() -> QNetwork:
            return QNetwork(envs.observation_space, envs.action_space, config.network)

        self.network = collectively(self.comm, make_network)
        self.target_network = make_network()
        self.flat = FlatParameters(self.network, self.device)
        self.target = FlatParameters(self.target_network, self.device)
        self.tape, self.target_tape = map(self._make_tape, (self.network, self.target_network))
        self.parts = collectively(self.comm, lambda: slices(self.flat.data.numel(), config.gorila.num_shards))
        self.target.data.copy_(self.flat.data)
        self.squares, self.version = torch.zeros_like(self.flat.data), 0
        is_atari = self.make_env is None and config.env.id.startswith("ALE/")
        self.frame_stack = config.env.frame_stack if is_atari else 1
        self.store = collectively(self.comm, self._make_store)
        self._check_memory()

    def _make_tape(self, network: QNetwork) -> Tape:
        """With room for a minibatch. Collective."""
        shape = (self.config.gorila.minibatch_size, *(self.envs.observation_space.shape or ()))
        observations = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return collectively(self.comm, lambda: make_tape(network, self.config.network, 1, observations))

    def _make_store(self) -> ReplayStore | None:
        """Of a rank that holds replay: that of the actors who feed it."""
        if self.rank not in self.roles.replays:
            return None
        gorila, num_actors = self.config.gorila, len(self.roles.actors)
        actors = [actor for actor in self.roles.actors if self.roles.replay_of(actor) == self.rank]
        return ReplayStore(
            actors, gorila.replay_capacity_steps // num_actors, self.envs.num_envs, self.envs.observation_space,
            self.frame_stack, min_steps=math.ceil(gorila.min_replay_steps * len(actors) / num_actors),
            update_period_steps=gorila.update_period_steps, minibatch_size=gorila.minibatch_size,
            rng=stream(self.config.seed, self.rank, "replay"),
        )  # fmt: skip

    def _check_memory(self) -> None:
        """Of all stores on this host together. Collective."""
        stores = self.comm.allgather((self.comm.host, self.store.memory_bytes if self.store is not None else 0))
        here = sum(size for host, size in stores if host == self.comm.host)
        capacity = self.config.gorila.replay_capacity_steps
        collectively(self.comm, lambda: check_memory(here, available_memory_bytes(), capacity))

    def _shared_tensors(self) -> list[Tensor]:
        return [self.flat.data, self.squares, self.target.data]

    def _restore(self) -> None:
        """Shards and counters; a rank's random streams only if the job has its old ranks. Collective."""
        own, first, lost = self._own_state()
        if own is None:
            self._say_ranks_changed(first, lost, "the shards' parameters are shared out anew")
        joint = self._restore_shards()
        self._restore_counters(own if own is not None else joint, same_ranks=own is not None)
        self._seed_streams(round_=1)
        self._restore_generator(own)
        if own is not None:
            limits = {"deviations": self.filter.deviations, "horizon": self.filter.horizon}  # they may have changed
            self.filter = LossFilter(**own.counters["gorila"]["filter"] | limits)
        self._restore_replay(own is not None)

    def _restore_shards(self) -> RankState:
        """Rank 0 reads them for all. Returns a state with the counters for another number of ranks. Collective."""

        def read() -> RankState | None:
            if self.rank != 0:
                return None
            states = checkpoint.load_all(self.old, self.flat.signature)
            begin = assemble(states)
            for mine, saved in zip(self._shared_tensors(), begin[:3], strict=True):
                mine.copy_(saved)
            self.version = begin.version
            return RankState(0, 1, self.flat.signature, {}, {}, checkpoint.joint_counters(states))

        joint = collectively(self.comm, read)
        self._share_model(root=0)
        joint, self.version = self.comm.bcast((joint, self.version))
        assert joint is not None
        return joint

    def _restore_replay(self, same_ranks: bool) -> None:
        """What was saved of it, if anything was and the job has its old ranks. Collective."""
        prefix = self._replay_prefix(self.old)
        found = self.store is None or self.store.is_saved(prefix)
        if self.config.gorila.save_replay and same_ranks and all(self.comm.allgather(found)):
            collectively(self.comm, lambda: self.store.load(prefix) if self.store is not None else None)
        elif self.rank == 0:
            say("No replay was saved to go on with: it is filled anew before learning goes on.")

    def _state_tensors(self) -> dict[str, Tensor]:
        if hasattr(self, "exchange"):
            tensors, self.version = self.exchange.shard_state()
            return tensors
        if self.rank not in self.roles.shards:
            return {}
        part = self.parts[self.roles.shards.index(self.rank)]
        return {"parameters": self.flat.data[part], "squares": self.squares[part], "target": self.target.data[part]}

    def _state_counters(self) -> dict[str, Any]:
        shards = self.roles.shards
        shard = shards.index(self.rank) if self.rank in shards else None
        return {"gorila": {
            "shard": shard, "num_shards": len(shards), "version": self.version,
            "num_targets": self.version // self.config.gorila.target_period_updates, "filter": asdict(self.filter),
        }}  # fmt: skip

    def _save_at_end(self) -> None:
        """The replay, however long that takes: who has none, or a fast disk, waits for the others."""
        if not self.config.gorila.save_replay:
            return
        if self.store is not None:
            try:
                self.store.save(self._replay_prefix(self.segment))
            except OSError as error:
                say(f"[rank {self.rank}] the replay cannot be saved: {error}. A resumed run will fill it anew.")
        self.comm.among_the_living(lambda living: None, None, Interrupt())  # a signal does not hurry it

    def _forget_old_replay(self) -> None:
        """From now on a resume begins with this segment; the replay of the one before would only take room."""
        if self.rank == 0 and self.old_segment is not None:
            for file in self.old_segment.glob("*.replay"):
                file.unlink()

    def _replay_prefix(self, segment: Path) -> Path:
        return segment / f"rank-{self.rank:04d}"

    def _make_exchange(self) -> GorilaExchange:
        self._forget_old_replay()
        config, env = self.config, self.config.env
        num_actions = self.network.distribution.num_outputs
        formats = Formats.of(env, self.frame_stack, config.gorila, self.envs.observation_space, num_actions)
        wire = make_wire(self.size, self.flat, self.parts, formats)
        budget = StepBudget(self.rank, self.size, config.total_steps, self.start.local_steps, self.start.base_steps)
        shard = None
        if self.rank in self.roles.shards:
            begin = Beginning(self.flat.data, self.squares, self.target.data, self.version)
            shard = Shard(begin, self.parts[self.roles.shards.index(self.rank)], config.gorila)

        def make_node(send: Callable[[int, np.ndarray], Bytes]) -> Node:
            return Node(budget, self.roles, config.gorila, wire, formats, self.version, shard, self.store, send)

        return GorilaExchange(self.comm, make_node, wire.most_bytes, self.interrupt)

    def _make_loop(self) -> Worker:
        return Worker(
            self.config, self.rank, self.roles, self.frame_stack, self.envs, self.network.distribution,
            self.tape, self.flat, self.target_tape, self.target, self.filter, self.exchange, self.generator,
            self.counters, self.interrupt,
        )  # fmt: skip
