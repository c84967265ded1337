"""Gorila's agent: a rank's roles, networks, shard and replay, and how these begin, are saved and continue."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pala.comm.agreement import collectively, from_first, sum_on_host
from pala.comm.base import Communicator
from pala.config import Config
from pala.envs.vector import AtariEnvs, Envs
from pala.exchange.budget import budget_of
from pala.gorila.dqn import DQN, LossFilter
from pala.gorila.exchange import GorilaExchange
from pala.gorila.networks import q_network
from pala.gorila.node import Node, Rules
from pala.gorila.roles import Roles, assign
from pala.gorila.shard import ServedModel, Shard, assemble, targets_at
from pala.gorila.sleeping import SleepingGorila
from pala.gorila.store import ReplayStore, check_memory
from pala.gorila.worker import Worker
from pala.networks.make import make_tape
from pala.networks.network import FlatParameters, Network, blank_observations
from pala.networks.own import MakeNetwork
from pala.run import checkpoint
from pala.run.agent import Agent, device_and_precision
from pala.run.run import Run
from pala.system.errors import PalaError
from pala.system.output import log
from pala.system.resources import available_memory_bytes
from pala.system.seeding import stream, torch_weights
from pala.system.text import counted

if TYPE_CHECKING:
    from pala.run.saved import Saved


@dataclass
class GorilaAgent(Agent[GorilaExchange]):
    """One rank's part of the model that all ranks share; each shard serves a slice of it."""

    rules: Rules
    frame_stack: int  # frames of an observation of which each step brings one; 1: whole observations
    dqn: DQN
    store: ReplayStore | None  # of a rank that holds replay

    @property
    def acts(self) -> bool:
        return self.rank in self.rules.roles.with_spares([self.rank]).actors

    @property
    def shared_tensors(self) -> list[Tensor]:
        return list(self.dqn.tensors.values())

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def restore(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Restore shards and counters, and this rank's own if the job has its old ranks. Collective."""
        if saved.own is None:
            saved.say_ranks_changed(comm, "the shards' parameters are shared out again")
        joint = self._restore_shards(comm, saved)
        if saved.own is not None:
            old, dqn = saved.own.counters["gorila"]["filter"], self.dqn
            limits = {"deviations": dqn.filter.deviations, "horizon": dqn.filter.horizon}  # they may have changed
            dqn.filter = LossFilter(**old | limits)
        gorila, left = self.config.gorila, self.config.total_steps - joint["base_steps"]
        if comm.rank == 0:
            log("The replay is never saved: it is filled again before learning continues.")
            if 0 < left < gorila.min_replay_steps + gorila.update_period_steps:
                log(
                    f"{left:,} steps are left, and learning begins again after 'gorila.min_replay_steps' "
                    f"({gorila.min_replay_steps:,}): nothing more will be learned. Raise 'total_steps' to learn more."
                )
        return saved.own.counters if saved.own is not None else joint

    def _restore_shards(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Read all shards on rank 0 for all ranks. Returns the counters for another number of ranks. Collective."""

        def read() -> tuple[dict[str, Any], int]:
            states = checkpoint.load_all(saved.segment, self.flat.signature)
            begin = assemble(states)
            for mine, of_all in zip(self.shared_tensors, begin[:3], strict=True):
                mine.copy_(of_all)
            before = saved.config.gorila.optimiser
            if before != self.config.gorila.optimiser:  # one keeps the mean of squares, the other their sum
                self.dqn.squares.zero_()
                log(f"'gorila.optimiser' was '{before}', whose squares are not those of the new one: they begin again.")
            return states[0].counters | checkpoint.joint_counters(states), begin.version

        joint, self.dqn.version = from_first(comm, read)
        self.share(comm)
        return joint

    def state(self, exchange: GorilaExchange | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        index, dqn = self._shard_index, self.dqn
        tensors: dict[str, Tensor] = {}
        if exchange is not None:
            tensors, dqn.version = exchange.shard_state()
        elif index is not None:
            tensors = {name: tensor[self.rules.slices[index]] for name, tensor in dqn.tensors.items()}
        counters = {
            "shard": index,
            "num_shards": len(self.rules.roles.shards),
            "version": dqn.version,
            "num_targets": targets_at(dqn.version, self.config.gorila),
            "filter": asdict(dqn.filter),
        }
        return tensors, {"gorila": counters}

    def reset_envs(self, run: Run, try_out: bool = False) -> None:
        super().reset_envs(run, try_out)
        if self.envs.action_masks is not None:
            raise PalaError(
                f"The environment '{self.envs.name}' gives action masks, but 'algorithm' is 'gorila', whose replay "
                "keeps none; set it to 'a2c', or leave the masks out by a wrapper."
            )

    def before_training(self, previous: Path | None) -> None:
        """Warn of settings, and after a resume draw minibatches by another stream."""
        if self.rank == 0:
            _warn_of_staleness(self.config, self.rules.roles)
            _warn_of_first_target(self.config)
        if self.store is not None and previous is not None:  # else it would draw what it drew before
            self.store.rng = stream(self.config.seed, self.rank, f"replay after {previous.name}")

    # ---- training ------------------------------------------------------------------------------------------------

    @property
    def _shard_index(self) -> int | None:
        return self.rules.roles.shards.index(self.rank) if self.rank in self.rules.roles.shards else None

    def make_exchange(self, comm: Communicator) -> GorilaExchange:
        index, dqn = self._shard_index, self.dqn
        shard: Shard | None = None
        if index is not None:
            begin = ServedModel(self.flat.data, dqn.squares, dqn.target.data, dqn.version)
            shard = Shard(begin, self.rules.slices[index], self.config.gorila)
        budget = budget_of(comm, self.start, self.config.total_steps, self.config.run.spares)
        return GorilaExchange(comm, partial(Node, budget, self.rules, dqn.version, shard, self.store))

    def wake_exchange(self, comm: Communicator, sleeping: SleepingGorila) -> GorilaExchange | None:
        members = sleeping.members
        make_node = partial(Node, members.budget, self.rules, 0, None, self.store, members=members)
        exchange = GorilaExchange(comm, make_node, sleeping)
        if not exchange.join(self.flat.data, self.dqn.target.data):
            return None
        log(f"[rank {self.rank}] begins an empty replay: what the one before it held is lost.")
        return exchange

    def make_loop(self, exchange: GorilaExchange) -> Worker:
        return Worker(self, exchange)


def build(
    comm: Communicator,
    config: Config,
    envs: Envs,
    make_network: MakeNetwork | None = None,
    sleeping: SleepingGorila | None = None,
) -> GorilaAgent:
    """Build networks with the seed's first weights, and what the rank's roles need. `sleeping`: the sleeping Gorila of
    a spare that is needed; it is then alone in `comm`. Collective."""
    rank, roles = _find_roles(comm, config, sleeping)
    device, config = device_and_precision(comm, config, envs)
    frame_stack = config.env.frame_stack if isinstance(envs, AtariEnvs) else 1

    def make_one() -> Network:
        with torch_weights(config.seed):
            return q_network(envs.observation_space, envs.action_space, config, make_network)

    (network, flat), (target_network, target) = collectively(comm, lambda: _two_of(make_one, device))

    def make_rules() -> Rules:
        num_ranks = len(roles.everybody) + config.run.spares
        return Rules.of(config, roles, num_ranks, flat, envs.observation_space, frame_stack)

    rules = collectively(comm, make_rules)  # first, since it refuses a minibatch that is too large
    batch_size = config.gorila.minibatch_size
    observations = blank_observations(envs.observation_space, batch_size, device)  # room for a minibatch
    tape, target_tape = (
        collectively(comm, lambda net=net: make_tape(net, config.network, 1, observations))  # type: ignore[misc]
        for net in (network, target_network)
    )
    target.data.copy_(flat.data)
    dqn = DQN(network.distribution, tape, flat, target_tape, target, config.gorila)
    store = collectively(comm, lambda: _make_store(rank, config, roles, envs, frame_stack))
    _check_memory(comm, config, store)
    return GorilaAgent(rank, config, envs, device, network, flat, rules, frame_stack, dqn, store)


def _two_of(make_one: Callable[[], Network], device: torch.device) -> list[tuple[Network, FlatParameters]]:
    """Return the network that learns and its target network, with their parameters. Raises PalaError if they share
    parameters, or differ in more than these: the target network gets only these."""
    first, second = make_one(), make_one()
    if {*map(id, first.parameters())} & {*map(id, second.parameters())}:
        raise PalaError("Your own network shares parameters with another that was made: each call must make a new one.")
    made = [(network, FlatParameters(network, device)) for network in (first, second)]
    if made[0][1].signature != made[1][1].signature:
        raise PalaError(
            "Your own network is not alike each time that it is made, and Gorila needs two: give each call's the same "
            "layers and buffers, with torch's random numbers or a generator that the call itself seeds."
        )
    return made


def _find_roles(comm: Communicator, config: Config, sleeping: SleepingGorila | None) -> tuple[int, Roles]:
    """Return which rank of the job this is, and the roles with which it began. Collective."""
    spares = config.run.spares
    if sleeping is not None:
        members = sleeping.members
        return members.rank, assign(config.gorila, members.budget.size - spares, spares)
    return comm.rank, collectively(comm, lambda: assign(config.gorila, comm.size, spares))


def _warn_of_staleness(config: Config, roles: Roles) -> None:
    """Say it if many gradients will be discarded as too old. A learner computes one while its last is under way, and
    environments that step together pay for several minibatches at once."""
    gorila, num_learners = config.gorila, len(roles.learners)
    at_once = config.env.num_envs // gorila.update_period_steps if roles.learners == roles.actors else 0
    usual = num_learners * (2 * gorila.parameters_period_updates + at_once)
    if roles.learners != roles.shards[:1] and gorila.max_staleness_updates < usual:  # else nothing is under way
        log(
            f"'gorila.max_staleness_updates' is {gorila.max_staleness_updates}, but with "
            f"{counted(num_learners, 'learner')} gradients may be about {usual} updates old: many will be discarded "
            "(`gradients_stale`). Raise it to that."
        )


def _warn_of_first_target(config: Config) -> None:
    """Say it if the budget ends before the target network is copied: it is a random network until then."""
    gorila = config.gorila
    updates = (config.total_steps - gorila.min_replay_steps) // gorila.update_period_steps
    if updates < gorila.target_period_updates:
        log(
            f"'total_steps' ({config.total_steps:,}) pays for about {updates:,} updates, but the target network is "
            f"first copied after 'gorila.target_period_updates' ({gorila.target_period_updates:,}), so targets stay a "
            "random network's. Raise the one or lower the other."
        )


def _make_store(rank: int, config: Config, first_roles: Roles, envs: Envs, frame_stack: int) -> ReplayStore | None:
    """Return the store of a rank that holds replay, for the actors that feed it; None for others."""
    gorila, num_actors = config.gorila, len(first_roles.actors)
    roles = first_roles.with_spares([rank])
    if rank not in roles.replays:
        return None
    least = num_actors * envs.num_envs
    if gorila.replay_capacity_steps < least:
        raise PalaError(
            f"'gorila.replay_capacity_steps' is {gorila.replay_capacity_steps:,}, less than a step of each environment "
            f"of {counted(num_actors, 'actor')} ('env.num_envs' is {envs.num_envs:,}): raise it to {least:,} at least."
        )
    actors = roles.actors_of(rank)
    return ReplayStore(
        actors,
        gorila.replay_capacity_steps // num_actors,
        envs.num_envs,
        envs.observation_space,
        frame_stack,
        min_steps=math.ceil(gorila.min_replay_steps * len(actors) / num_actors),
        update_period_steps=gorila.update_period_steps,
        minibatch_size=gorila.minibatch_size,
        rng=stream(config.seed, rank, "replay"),
    )


def _check_memory(comm: Communicator, config: Config, store: ReplayStore | None) -> None:
    """Raise PalaError if the stores on this host together need more memory than it has. Collective."""
    here = sum_on_host(comm, store.memory_bytes if store is not None else 0)
    collectively(comm, lambda: check_memory(here, available_memory_bytes(), config.gorila.replay_capacity_steps))
