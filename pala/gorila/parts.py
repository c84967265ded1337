"""What a rank of Gorila is made of: roles, networks, shard and replay; and how these begin, are saved and go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pala.comm.agreement import collectively, from_first, sum_on_host
from pala.comm.base import Communicator
from pala.config import ENV_OPERATION, Config, EnvConfig
from pala.envs.vector import AtariEnvs, Envs
from pala.exchange.budget import budget_of
from pala.gorila.dqn import LossFilter
from pala.gorila.exchange import GorilaExchange
from pala.gorila.networks import q_network
from pala.gorila.node import Formats, Rules
from pala.gorila.places import check_spares
from pala.gorila.roles import Roles, assign
from pala.gorila.shard import ServedModel, Shard, assemble, targets_at
from pala.gorila.sleeping import SleepingGorila
from pala.gorila.store import ReplayStore, check_memory
from pala.gorila.worker import Worker
from pala.networks.make import blank_observations, make_tape
from pala.networks.network import FlatParameters, Network
from pala.networks.own import MakeNetwork
from pala.networks.tape import Tape
from pala.run import checkpoint
from pala.run.agent import Agent, Saved, device_and_precision
from pala.system.errors import PalaError, reason
from pala.system.interrupt import Interrupt
from pala.system.output import say
from pala.system.resources import available_memory_bytes
from pala.system.seeding import stream, torch_weights
from pala.system.text import counted

_SAVE_REPLAY_S = 3600.0


@dataclass
class GorilaParts(Agent[GorilaExchange]):
    """The ranks share one model, of which each shard serves a slice."""

    place: int  # whose roles it takes: a rank's own, or the one in which a spare takes over
    rules: Rules
    frame_stack: int  # frames of an observation of which each step brings one; 1: whole observations
    tape: Tape
    target: FlatParameters
    target_tape: Tape
    squares: Tensor  # the optimiser's state, of the whole network
    store: ReplayStore | None  # of a rank that holds replay
    filter: LossFilter
    version: int = 0  # gradients that are in the parameters

    @property
    def acts(self) -> bool:
        return self.place in self.rules.roles.actors

    @property
    def shared_tensors(self) -> list[Tensor]:
        return [self.flat.data, self.squares, self.target.data]

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def restore(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Shards and counters; a rank's own only if the job has its old ranks. Collective."""
        if saved.own is None:
            saved.say_ranks_changed(comm, "the shards' parameters are shared out anew")
        joint = self._restore_shards(comm, saved)
        if saved.own is not None:
            limits = {"deviations": self.filter.deviations, "horizon": self.filter.horizon}  # they may have changed
            self.filter = LossFilter(**saved.own.counters["gorila"]["filter"] | limits)
        has_replay = self._restore_replay(comm, saved)
        gorila, left = self.config.gorila, self.config.total_steps - joint["base_steps"]
        if comm.rank == 0 and not has_replay and 0 < left < gorila.min_replay_steps + gorila.update_period_steps:
            say(
                f"{left:,} steps are left, and learning begins again after 'gorila.min_replay_steps' "
                f"({gorila.min_replay_steps:,}): nothing more will be learned. Raise 'total_steps' to go on learning."
            )
        return saved.own.counters if saved.own is not None else joint

    def _restore_shards(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Rank 0 reads them for all. Returns the counters for another number of ranks. Collective."""

        def read() -> tuple[dict[str, Any], int]:
            states = checkpoint.load_all(saved.segment, self.flat.signature, len(self.flat.data))
            begin = assemble(states, len(self.flat.data))
            for mine, of_all in zip(self.shared_tensors, begin[:3], strict=True):
                mine.copy_(of_all)
            before = saved.config.gorila.optimiser
            if before != self.config.gorila.optimiser:  # one keeps the mean of squares, the other their sum
                self.squares.zero_()
                say(f"'gorila.optimiser' was '{before}', whose squares are not those of the new one: they begin anew.")
            return states[0].counters | checkpoint.joint_counters(states), begin.version

        joint, self.version = from_first(comm, read)
        self.share(comm)
        return joint

    def _restore_replay(self, comm: Communicator, saved: Saved) -> bool:
        """What was saved of it, if anything was and the job has its old ranks; whether it is there. Collective."""
        prefix = self._replay_prefix(saved.segment)
        found = self.store is None or self.store.is_saved(prefix)
        changed, is_wanted = _changed(saved.config.env, self.config.env), self.config.gorila.save_replay
        same_ranks = saved.own is not None and self._shares_replay_as(assign(saved.config.gorila, comm.size))
        if all(comm.allgather(found)) and same_ranks and is_wanted and not changed:
            collectively(comm, lambda: self.store.load(prefix) if self.store is not None else None)
            return True
        if self.rank == 0:
            what = "No replay was saved to go on with"
            if any(saved.segment.glob("*.replay")):
                why = "its ranks or roles are not this job's, or a file is missing"
                why = f"it was played with another {', '.join(changed)}" if changed else why
                why = why if is_wanted else "'gorila.save_replay' is off"
                what = f"The replay that was saved is not used, and deleted ({why})"
            say(f"{what}: it is filled anew before learning goes on.")
        return False

    def _shares_replay_as(self, before: Roles) -> bool:
        now = self.rules.roles
        return (before.replays, before.actors) == (now.replays, now.actors)

    def state(self, exchange: GorilaExchange | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        index = self._shard_index
        tensors: dict[str, Tensor] = {}
        if exchange is not None:
            tensors, self.version = exchange.shard_state()
        elif index is not None:
            part = self.rules.slices[index]
            tensors = {
                "parameters": self.flat.data[part], "squares": self.squares[part], "target": self.target.data[part],
            }  # fmt: skip
        return tensors, {"gorila": {
            "shard": index, "num_shards": len(self.rules.roles.shards), "version": self.version,
            "num_targets": targets_at(self.version, self.config.gorila), "filter": asdict(self.filter),
        }}  # fmt: skip

    def before_training(self, previous: Path | None) -> None:
        """From now on a resume begins with the new segment; the replay of the one before would only take room, and so
        does a file that cannot be removed."""
        if self.rank == 0:
            _warn_of_staleness(self.config, self.rules.roles)
            _warn_of_first_target(self.config)
        if self.rank == 0 and previous is not None:
            for file in previous.glob("*.replay"):
                with suppress(OSError):
                    file.unlink()
        if self.store is not None and previous is not None:  # else it would draw what it drew before
            self.store.reseed(stream(self.config.seed, self.rank, f"replay after {previous.name}"))

    def after_training(self, comm: Communicator, segment: Path) -> None:
        """The replay: who has none, or a fast disk, waits for the others, and a signal does not hurry it. Collective.
        Raises EndError when they have not saved theirs after an hour."""
        if not self.config.gorila.save_replay:
            return
        if self.store is not None:
            try:
                self.store.save(self._replay_prefix(segment))
            except OSError as error:
                say(f"[rank {self.rank}] the replay cannot be saved: {reason(error)}. A resumed run will fill it anew.")
        comm.with_survivors(lambda living: None, _SAVE_REPLAY_S, Interrupt())

    def _replay_prefix(self, segment: Path) -> Path:
        return segment / f"rank-{self.rank:04d}"

    # ---- training ------------------------------------------------------------------------------------------------

    @property
    def _shard_index(self) -> int | None:
        return self.rules.roles.shards.index(self.rank) if self.rank in self.rules.roles.shards else None

    def make_exchange(self, comm: Communicator, interrupt: Interrupt) -> GorilaExchange:
        index, shard = self._shard_index, None
        if index is not None:
            begin = ServedModel(self.flat.data, self.squares, self.target.data, self.version)
            shard = Shard(begin, self.rules.slices[index], self.config.gorila)
        budget = budget_of(comm, self.start, self.config.total_steps, self.config.run.spares)
        return GorilaExchange(comm, self.rules, budget, self.version, shard, self.store, interrupt)

    def take_place(self, comm: Communicator, sleeping: SleepingGorila, interrupt: Interrupt) -> GorilaExchange | None:
        budget = sleeping.members.budget
        exchange = GorilaExchange(comm, self.rules, budget, 0, None, self.store, interrupt, sleeping)
        if not exchange.take_place(self.flat.data, self.target.data):
            return None
        if self.store is not None:
            say(f"[rank {self.rank}] begins an empty replay: what the one before it held is lost.")
        return exchange

    def make_loop(self, exchange: GorilaExchange, interrupt: Interrupt) -> Worker:
        return Worker(self, exchange, interrupt)


def build(
    comm: Communicator, config: Config, envs: Envs, make_network: MakeNetwork | None = None,
    sleeping: SleepingGorila | None = None,
) -> GorilaParts:  # fmt: skip
    """Networks with the seed's first weights, and what the rank's roles need. `sleeping`: of a spare that is needed,
    and alone in `comm`. Collective."""
    rank, place, roles = _find_place(comm, config, sleeping)
    device, config = device_and_precision(comm, config, envs)

    def make_one() -> Network:
        with torch_weights(config.seed):
            return q_network(envs.observation_space, envs.action_space, config, make_network)

    network, target_network = collectively(comm, lambda: _two_of(make_one))
    flat, target = FlatParameters(network, device), FlatParameters(target_network, device)
    collectively(comm, lambda: _check_alike(flat, target))
    frame_stack = config.env.frame_stack if isinstance(envs, AtariEnvs) else 1

    def make_rules() -> Rules:
        num_actions = network.distribution.num_outputs
        formats = Formats.of(config.env, frame_stack, config.gorila, envs.observation_space, num_actions)
        return Rules.of(config.gorila, roles, len(roles.everybody) + config.run.spares, flat, formats)

    rules = collectively(comm, make_rules)  # first, since it refuses a minibatch that is too large
    batch_size = config.gorila.minibatch_size
    observations = blank_observations(envs.observation_space, batch_size, device)  # room for a minibatch
    tape, target_tape = (
        collectively(comm, lambda net=net: make_tape(net, config.network, 1, observations))  # type: ignore[misc]
        for net in (network, target_network)
    )
    target.data.copy_(flat.data)
    store = collectively(comm, lambda: _make_store(rank, place, config, roles, envs, frame_stack))
    _check_memory(comm, config, store)
    gorila = config.gorila
    loss_filter = LossFilter(gorila.loss_filter_deviations, gorila.loss_filter_horizon_updates)
    return GorilaParts(
        rank, config, envs, device, network, flat, place, rules, frame_stack, tape, target, target_tape,
        torch.zeros_like(flat.data), store, loss_filter,
    )  # fmt: skip


def _two_of(make_one: Callable[[], Network]) -> tuple[Network, Network]:
    """The network that learns and its target network. Raises PalaError if they share parameters."""
    made = make_one(), make_one()
    first, second = (set(map(id, network.parameters())) for network in made)
    if first & second:
        raise PalaError("Your own network shares parameters with another that was made: each call must make a new one.")
    return made


def _check_alike(flat: FlatParameters, target: FlatParameters) -> None:
    """Raise PalaError if they differ in more than their parameters: the target network gets only these."""
    if flat.signature != target.signature:
        raise PalaError(
            "Your own network is not alike each time that it is made, and Gorila needs two: give each call's the same "
            "layers and buffers, with torch's random numbers or a generator that the call itself seeds."
        )


def _find_place(comm: Communicator, config: Config, sleeping: SleepingGorila | None) -> tuple[int, int, Roles]:
    """Which rank of the job this is, whose roles it takes, and the roles of all. Collective."""
    if sleeping is not None:
        members, place = sleeping.members, sleeping.members.order
        assert place is not None
        return members.rank, place, members.places.first_roles

    def make_roles() -> Roles:
        roles = assign(config.gorila, comm.size, config.run.spares)
        check_spares(roles, config.run.spares)
        return roles

    return comm.rank, comm.rank, collectively(comm, make_roles)


def _changed(before: EnvConfig, now: EnvConfig) -> list[str]:
    """Settings that differ and may change what a transition means."""
    then = asdict(before)
    return [f"'env.{key}'" for key in then if key not in ENV_OPERATION and then[key] != getattr(now, key)]


def _warn_of_staleness(config: Config, roles: Roles) -> None:
    """A learner computes a gradient while its last one is under way, and environments that step together pay for
    several minibatches at once: in so many updates most gradients come. Say it if they will be discarded."""
    gorila, num_learners = config.gorila, len(roles.learners)
    at_once = config.env.num_envs // gorila.update_period_steps if roles.learners == roles.actors else 0
    usual = num_learners * (2 * gorila.parameters_period_updates + at_once)
    if roles.learners != roles.shards[:1] and gorila.max_staleness_updates < usual:  # else nothing is under way
        say(
            f"'gorila.max_staleness_updates' is {gorila.max_staleness_updates}, but with "
            f"{counted(num_learners, 'learner')} gradients may be about {usual} updates old: many will be discarded "
            "(`gradients_stale`). Raise it to that."
        )


def _warn_of_first_target(config: Config) -> None:
    """Say it if the budget ends before the target network is copied: it is a random network until then."""
    gorila = config.gorila
    updates = (config.total_steps - gorila.min_replay_steps) // gorila.update_period_steps
    if updates < gorila.target_period_updates:
        say(
            f"'total_steps' ({config.total_steps:,}) pays for about {updates:,} updates, but the target network is "
            f"first copied after 'gorila.target_period_updates' ({gorila.target_period_updates:,}), so targets stay a "
            "random network's. Raise the one or lower the other."
        )


def _make_store(
    rank: int, place: int, config: Config, roles: Roles, envs: Envs, frame_stack: int
) -> ReplayStore | None:
    """The store of a place that holds replay, for those of the actors who feed it; None for others."""
    if place not in roles.replays:
        return None
    gorila, num_actors = config.gorila, len(roles.actors)
    least = num_actors * envs.num_envs
    if gorila.replay_capacity_steps < least:
        raise PalaError(
            f"'gorila.replay_capacity_steps' is {gorila.replay_capacity_steps:,}, less than a step of each environment "
            f"of {counted(num_actors, 'actor')} ('env.num_envs' is {envs.num_envs:,}): raise it to {least:,} at least."
        )
    actors = [actor for actor in roles.actors if roles.replay_of(actor) == place]
    return ReplayStore(
        actors, gorila.replay_capacity_steps // num_actors, envs.num_envs, envs.observation_space, frame_stack,
        min_steps=math.ceil(gorila.min_replay_steps * len(actors) / num_actors),
        update_period_steps=gorila.update_period_steps, minibatch_size=gorila.minibatch_size,
        rng=stream(config.seed, rank, "replay"),
    )  # fmt: skip


def _check_memory(comm: Communicator, config: Config, store: ReplayStore | None) -> None:
    """Raise PalaError if the stores on this host together need more memory than it has. Collective."""
    here = sum_on_host(comm, store.memory_bytes if store is not None else 0)
    collectively(comm, lambda: check_memory(here, available_memory_bytes(), config.gorila.replay_capacity_steps))
