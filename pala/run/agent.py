"""The agent of a rank, with either algorithm: built whole, it begins or continues a run, trains, and is saved."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pala.comm.agreement import collectively
from pala.comm.base import Communicator
from pala.config import Config, to_table
from pala.envs.vector import Envs, MakeEnv, make_envs
from pala.exchange.base import Exchange
from pala.exchange.budget import ExchangeState
from pala.exchange.flat import share_tensors
from pala.networks.network import FlatParameters, Network
from pala.run import checkpoint, run_folder
from pala.run.checkpoint import RankState
from pala.run.run import Run
from pala.system.device import has_bfloat16, set_torch, use_device
from pala.system.errors import CollectiveError, SaveError, reason
from pala.system.output import log
from pala.system.seeding import derive, seed_process

if TYPE_CHECKING:
    from pala.run.loop import Loop
    from pala.run.saved import Saved

ExchangeT = TypeVar("ExchangeT", bound=Exchange)


@dataclass
class Counters:
    """A rank's work so far; a resumed rank continues from its checkpoint."""

    updates: int = 0
    local_steps: int = 0
    time_s: float = 0.0  # training time of all segments
    applied: int = 0  # updates that were not left out


@dataclass
class Agent(abc.ABC, Generic[ExchangeT]):
    """Environments, network and optimiser of a rank, and how far it is. The algorithms fill in the rest."""

    rank: int  # in the job
    config: Config  # with the precision that `device_and_precision` chooses
    envs: Envs
    device: torch.device
    network: Network
    flat: FlatParameters
    counters: Counters = field(init=False, default_factory=Counters)
    generator: torch.Generator = field(init=False, repr=False)  # of its actions
    start: ExchangeState = field(init=False, repr=False)  # what its exchange begins with
    first_observations: np.ndarray | None = field(init=False, default=None, repr=False)
    """First observations of the environments, [B, *obs]; None: this rank does not act."""
    saved_lost: Sequence[int] | None = field(init=False, default=None)
    """Ranks that the newest checkpoint calls lost; None: the newest state could not be saved."""

    # ---- what each algorithm has of its own ------------------------------------------------------------------------

    @property
    def acts(self) -> bool:
        """Whether this rank plays."""
        return True

    @property
    def coupling(self) -> int:
        """Closeness that the ranks' models must have (`ExchangeKind.coupling`)."""
        return 0

    def can_continue(self, saved: Saved, hosts: Sequence[str]) -> bool:
        """Return whether each rank may begin with its own checkpoint. `hosts`: of each rank now."""
        return True

    @property
    @abc.abstractmethod
    def shared_tensors(self) -> list[Tensor]:
        """The tensors that all ranks begin with alike."""

    @abc.abstractmethod
    def restore(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Continue from checkpoints. Returns the counters (`RankState.counters`) that this rank continues from, its own
        if there are some. Collective."""

    @abc.abstractmethod
    def state(self, exchange: ExchangeT | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return flat tensors and numbers for this rank's checkpoint. None: training has not begun."""

    @abc.abstractmethod
    def make_exchange(self, comm: Communicator) -> ExchangeT:
        """Make what this rank tells the others through, from `start` on. Collective."""

    @abc.abstractmethod
    def wake_exchange(self, comm: Communicator, sleeping: Any) -> ExchangeT | None:
        """Turn what a spare has slept by into its exchange, and join those who train, with a model of theirs; None if
        training ended before. `sleeping`: the algorithm's `Sleeping`. Not collective."""

    @abc.abstractmethod
    def make_loop(self, exchange: ExchangeT) -> Loop:
        """Make the training loop of this rank."""

    def before_training(self, previous: Path | None) -> None:
        """Do what is due when everything is saved in a new segment; `previous`: the one before."""

    # ---- the beginning ---------------------------------------------------------------------------------------------

    def begin(self, comm: Communicator, run: Run) -> None:
        """Take the weights that all begin with, or what the run's checkpoints hold. `comm`: communicator of the ranks
        that train. Collective."""
        signatures = comm.allgather(self.flat.signature)
        if unlike := [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]:
            raise CollectiveError(
                f"The network of rank {unlike[0]} is not that of rank 0, with which it would exchange parameters: give "
                "all ranks the same network, whose buffers come out the same each time, and environments with the same "
                "spaces."
            )
        self.generator = make_generator(self.config.seed, self.rank, self.device, _purpose(run))
        if run.previous is None:
            self.share(comm)
            self.start = ExchangeState([0] * len(run.hosts))
            return
        from pala.run.saved import Saved

        saved = Saved.find(comm, run.previous, self.flat.signature, self.coupling)
        if not self.can_continue(saved, run.hosts):
            saved = replace(saved, own=None)
        restored = self.restore(comm, saved)
        if saved.own is not None:
            _restore_generator(comm.rank, self.generator, saved.own)
        self.counters, start = _restored_counters(comm, restored, same_ranks=saved.own is not None)
        self.start = start._replace(steps_by_rank=[*start.steps_by_rank, *[0] * run.spares])

    def begin_late(self, run: Run, start: ExchangeState, time_s: float) -> None:
        """Begin as a spare that has taken a place. `start`: state of its exchange; `time_s`: training time so far."""
        self.counters = Counters(time_s=time_s)
        self.generator = make_generator(self.config.seed, self.rank, self.device, _purpose(run))
        self.start = start

    def share(self, comm: Communicator, root: int = 0) -> None:
        """Give all ranks the root's `shared_tensors`, the parameters checked by checksum. Collective."""
        share_tensors(comm, self.shared_tensors, self.flat.data, root)

    def reset_envs(self, run: Run, try_out: bool = False) -> None:
        """Begin the games, by new seeds in each segment, unless this rank only answers others; `try_out`: one
        environment first. Raises PalaError."""
        if self.acts:
            seeds = derive(self.config.seed, self.rank, f"environments {_purpose(run)}", self.envs.num_envs)
            if try_out:
                self.envs.try_out(int(seeds[0]))
            self.first_observations = self.envs.reset(seeds)

    # ---- what is kept of it ----------------------------------------------------------------------------------------

    def save(self, run: Run, exchange: ExchangeT | None) -> None:
        """Save this rank's checkpoint; if its tensors are not finite, keep the one before. `exchange`: None before
        training. Raises SaveError, and EndError if the run's folder is another job's by now. Not collective."""
        self.saved_lost = None
        run.check_folder()
        tensors, numbers = self.state(exchange)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            log(
                f"[rank {self.rank}] its parameters or optimiser's state are not finite: the checkpoint before is kept."
            )
            return
        state = exchange.state() if exchange is not None else self.start
        counters = {**asdict(self.counters), "spares": run.spares, **state._asdict(), **numbers}
        streams = {"actions": self.generator.get_state()}
        try:
            checkpoint.save_rank(
                run.segment, RankState(self.rank, len(run.hosts), self.flat.signature, tensors, streams, counters)
            )
        except OSError as error:
            raise SaveError.of(error) from error
        self.saved_lost = state.lost

    def export(self, run: Run, final: Tensor, header: dict[str, Any]) -> None:
        """Write the final policy, of these parameters, which the network has from now on. Raises SaveError, and
        EndError if the run's folder is another job's by now."""
        run.check_folder()
        self.flat.data.copy_(final)
        try:
            checkpoint.save_policy(run.folder / run_folder.POLICY, dict(self.network.state_dict()), header)
        except OSError as error:
            raise SaveError.of(error) from error

    def policy_header(self, run: Run, global_steps: int) -> dict[str, Any]:
        """Return the header of a policy that is exported at this moment."""
        return {
            "config": to_table(run.config),
            "environment": self.envs.name,
            "global_steps": global_steps,
            "ranks": run.num_trainers,
            "signature": self.flat.signature,
        }

    def policy(self) -> dict[str, Tensor] | None:
        """Return a copy of the policy, in the host's memory; None if it is not finite."""
        if not bool(self.flat.data.isfinite().all()):
            return None
        return {name: tensor.detach().cpu().clone() for name, tensor in self.network.state_dict().items()}


def build_envs(comm: Communicator, config: Config, threads: int, make_env: MakeEnv | None = None) -> Envs:
    """Make this rank's environments; torch gets as many threads. Collective."""
    made: list[Envs] = []
    try:
        collectively(comm, lambda: made.append(make_envs(config.env, threads, make_env)))
    except BaseException:
        for envs in made:  # those of another rank could not be made
            envs.abandon()
        raise
    set_torch(threads)
    made[0].sender = f"[rank {comm.rank}] "
    return made[0]


def device_and_precision(comm: Communicator, config: Config, envs: Envs) -> tuple[torch.device, Config]:
    """Return the configuration's device, made the current one; and the configuration with a `network.precision` of
    `auto` decided, for all ranks alike. Collective."""
    before_this = comm.allgather(comm.host)[: comm.rank].count(comm.host)
    device = collectively(comm, lambda: use_device(config.run.device, before_this))
    is_fast = all(comm.allgather(has_bfloat16(device)))
    if config.network.precision == "bfloat16" and not is_fast and comm.rank == 0:
        log("'network.precision' is 'bfloat16', for which not all ranks have instructions; 'float32' would be faster.")
    if config.network.precision != "auto":
        return device, config
    is_image = len(envs.observation_space.shape or ()) == 3
    network = replace(config.network, precision="bfloat16" if is_fast and is_image else "float32")
    return device, replace(config, network=network)


def make_generator(seed: int, rank: int, device: torch.device, purpose: str = "") -> torch.Generator:
    """Return the random stream that a rank's actions are drawn from. The global ones, which dropout and environments
    may draw from, get seeds of this rank's as well. `purpose`: see `_purpose`."""
    seed_process(seed, rank, f"process {purpose}")
    torch.manual_seed(int(derive(seed, rank, f"torch {purpose}")[0]))
    generator = torch.Generator(device)
    generator.manual_seed(int(derive(seed, rank, f"actions {purpose}")[0]))
    return generator


def _purpose(run: Run) -> str:
    """Return what tells the random streams of a resumed run from those before."""
    return f"segment {run.segment.name}" if run.previous is not None else ""


def _restore_generator(rank: int, generator: torch.Generator, own: RankState) -> None:
    saved = own.random_states.get("actions")
    if saved is None:
        return
    try:
        if saved.numel() == generator.get_state().numel():
            generator.set_state(saved)
        elif rank == 0:
            log("The checkpoint is of another kind of device: the random streams of actions are new.")
    except (RuntimeError, TypeError) as error:
        log(f"[rank {rank}] The checkpoint's random stream cannot be used ({reason(error)}): that of actions is new.")


def _restored_counters(
    comm: Communicator, restored: dict[str, Any], same_ranks: bool
) -> tuple[Counters, ExchangeState]:
    """Return the counters, and the state of the exchange, of what `Agent.restore` gives. Push-sum weights are scaled so
    that their sum is the number of ranks again. Collective."""
    local_steps, applied = restored["local_steps"] if same_ranks else 0, restored["applied"]
    counters = Counters(restored["updates"], local_steps, restored["time_s"], applied)
    weight = restored["weight"] if same_ranks else 1.0
    weight *= comm.size / sum(comm.allgather(weight))
    known = comm.allgather(restored["local_steps"]) if same_ranks else [0] * comm.size
    return counters, ExchangeState(known, restored["base_steps"], restored["round"], weight)
