"""An A2C actor-learner: network, its tape and optimiser; how these begin, are saved and continue."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pala.a2c.averaging import average_of, check_actor_critic, num_squares
from pala.a2c.learner import Learner
from pala.a2c.update import A2C
from pala.comm.agreement import collectively, from_first, sum_on_host
from pala.comm.base import Communicator
from pala.config import Config
from pala.envs.spaces import background_of, has_images
from pala.envs.vector import Envs
from pala.exchange.base import ModelExchange, Setup
from pala.exchange.budget import ExchangeState
from pala.exchange.flat import share_tensors
from pala.exchange.gossip.exchange import GossipExchange
from pala.exchange.groups import groups_of, members_of
from pala.exchange.make import check_placement, check_size, make_exchange
from pala.networks.make import actor_critic, make_tape
from pala.networks.network import FlatParameters, blank_observations
from pala.run.agent import Agent, device_and_precision
from pala.run.checkpoint import RankState
from pala.system.errors import PalaError
from pala.system.resources import available_memory_bytes
from pala.system.seeding import derive, seed_process, torch_weights

if TYPE_CHECKING:
    from pala.exchange.gossip.sleeping import SleepingGossip
    from pala.networks.own import MakeNetwork
    from pala.run.saved import Saved


@dataclass
class A2CAgent(Agent[ModelExchange]):
    """An actor-learner with a model of its own."""

    a2c: A2C

    @property
    def coupling(self) -> int:
        return self.config.exchange_kind.coupling

    def can_continue(self, saved: Saved, hosts: Sequence[str]) -> bool:
        """Return whether those that hold one model now have held one before."""
        now = self.config.exchange
        return not now.has_groups or groups_of(saved.hosts, saved.config.exchange.group) == groups_of(hosts, now.group)

    @property
    def shared_tensors(self) -> list[Tensor]:
        return list(self.a2c.tensors.values())

    def restore(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Continue from this rank's checkpoint, or from the average if the number of ranks changed. Collective."""
        own = saved.own
        if own is None:
            counters = self._average(comm, saved)
        else:
            collectively(comm, lambda: check_actor_critic(own))
            self._take(own)
            counters = own.counters
            for members in self._holding_one_model(comm):
                counters = self._begin_alike(comm, counters, members)
        self.a2c.num_squares = num_squares(counters)
        return counters

    def state(self, exchange: ModelExchange | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.a2c.tensors, {"num_squares": self.a2c.num_squares}

    def make_exchange(self, comm: Communicator) -> ModelExchange:
        return make_exchange(self._setup(comm, self.start))

    def wake_exchange(self, comm: Communicator, sleeping: SleepingGossip) -> ModelExchange | None:
        exchange = GossipExchange(self._setup(comm, sleeping.driver.state.kept()), slept=sleeping)
        return exchange if exchange.join() else None

    def make_loop(self, exchange: ModelExchange) -> Learner:
        return Learner(self, exchange)

    def _setup(self, comm: Communicator, start: ExchangeState) -> Setup:
        flat = self.flat
        return Setup(comm, flat.data, self.config, start, flat.signature, flat.num_moments)

    def _take(self, state: RankState) -> None:
        for name, tensor in self.a2c.tensors.items():
            if name in state.tensors:  # the run may have begun without momentum
                tensor.copy_(state.tensors[name])

    def _average(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Load the average of the ranks' states on every rank, and return its counters. Collective."""
        saved.say_ranks_changed(
            comm,
            "every rank starts from the average of the ranks' parameters and of RMSprop's mean squares (independent "
            "learners: from the first's)",
        )
        first_only = saved.config.exchange_kind.independent

        def join() -> dict[str, Any]:
            joint = average_of(saved.segment, self.flat.signature, first_only)[0]
            self._take(joint)
            return joint.counters

        counters = from_first(comm, join)  # which alone reads all files
        self.share(comm)
        return counters

    def _holding_one_model(self, comm: Communicator) -> list[list[int]]:
        """Return the ranks of every group that holds one model. Collective."""
        if self.config.exchange_kind.averages_gradients:
            return [list(range(comm.size))]
        if not self.config.exchange.has_groups:
            return []
        return members_of(groups_of(comm.allgather(comm.host), self.config.exchange.group))

    def _begin_alike(self, comm: Communicator, counters: dict[str, Any], members: list[int]) -> dict[str, Any]:
        """Take over the model and counts of that one of `members` that came furthest, since ranks save at unlike times.
        Returns this rank's counters with these counts; of a rank that is not among them, as they are. Collective."""
        updates = comm.allgather(counters["updates"])
        root = max(members, key=lambda rank: updates[rank])
        is_member = comm.rank in members
        tensors = self.shared_tensors if is_member else [tensor.clone() for tensor in self.shared_tensors]
        share_tensors(comm, tensors, tensors[0], root)
        newest = comm.bcast(counters, root)
        if not is_member:
            return counters
        return counters | {
            "updates": newest["updates"],
            "applied": newest["applied"],
            "local_steps": newest["steps_by_rank"][comm.rank],
            "time_s": newest["time_s"],
            "num_squares": num_squares(newest),
        }


def build(
    comm: Communicator,
    config: Config,
    envs: Envs,
    make_network: MakeNetwork | None = None,
    sleeping: SleepingGossip | None = None,
) -> A2CAgent:
    """Build network, tape and optimiser, with the seed's first weights. `sleeping`: the sleeping gossip of a spare that
    is needed; it is then alone in `comm`. Collective."""
    collectively(comm, lambda: check_placement(comm, config.exchange))
    device, config = device_and_precision(comm, config, envs)
    if not config.network.custom:
        config = with_background(comm, config, envs, make_network)
    _check_memory(comm, config, envs, device)
    rank = comm.rank if sleeping is None else sleeping.rank
    return collectively(comm, lambda: make_agent(rank, config, envs, device, make_network))


def with_background(comm: Communicator, config: Config, envs: Envs, make_network: MakeNetwork | None = None) -> Config:
    """Return the configuration with a number for a `network.background` of `auto`: found by the first rank in what its
    first environment shows; 0 for vectors and a network of the user's own. Collective. Raises CollectiveError."""
    if config.network.background != "auto":
        return config

    def look() -> float:
        if make_network is not None or not has_images(envs.observation_space):
            return 0.0
        seed_process(config.seed, 0, "background")
        return background_of(envs.first_frame(int(derive(config.seed, 0, "background")[0])), envs.observation_space)

    return replace(config, network=replace(config.network, background=from_first(comm, look)))


def _check_memory(comm: Communicator, config: Config, envs: Envs, device: torch.device) -> None:
    """Raise PalaError if the rollouts of this host's ranks that compute on the CPU cannot fit into its memory.
    Collective."""
    space, steps = envs.observation_space, config.a2c.rollout_steps * envs.num_envs
    assert space.shape is not None and space.dtype is not None
    mine = steps * math.prod(space.shape) * space.dtype.itemsize if device.type == "cpu" else 0
    here = sum_on_host(comm, mine)

    def check() -> None:
        if here > (available := available_memory_bytes()):
            raise PalaError(
                f"'a2c.rollout_steps' is {config.a2c.rollout_steps:,}: the observations of a rollout alone take "
                f"{here / 2**30:.1f} GiB for the ranks on {platform.node()}, and their activations more, but "
                f"{available / 2**30:.1f} GiB of memory are available. Lower it, or 'env.num_envs'."
            )

    collectively(comm, check)


def make_agent(
    rank: int, config: Config, envs: Envs, device: torch.device, make_network: MakeNetwork | None = None
) -> A2CAgent:
    """Build one rank's agent, as `build` does. Not collective. Raises PalaError."""
    with torch_weights(config.seed):
        network = actor_critic(envs.observation_space, envs.action_space, config, make_network)
    flat = FlatParameters(network, device)
    check_size(flat.data)
    observations = blank_observations(envs.observation_space, envs.num_envs, device)
    tape = make_tape(network, config.network, config.a2c.rollout_steps, observations)
    a2c = A2C(network.distribution, tape, flat, config.a2c)
    return A2CAgent(rank, config, envs, device, network, flat, a2c)
