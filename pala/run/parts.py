"""What learns on a rank, with either algorithm: built whole, it is saved, goes on from what was saved, and trains."""

from __future__ import annotations

import abc
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from pala.comm.agreement import collectively, from_first
from pala.comm.base import Communicator
from pala.config import Config
from pala.envs.vector import Envs, MakeEnv, make_envs
from pala.exchange.base import Exchange
from pala.exchange.budget import ExchangeState
from pala.networks.network import FlatParameters
from pala.run import checkpoint, run_folder
from pala.run.checkpoint import RankState
from pala.run.loop import Loop, Progress
from pala.system.device import has_bfloat16, set_torch, use_device
from pala.system.errors import CollectiveError
from pala.system.interrupt import Interrupt
from pala.system.output import say
from pala.system.text import counted

ExchangeT = TypeVar("ExchangeT", bound=Exchange)


@dataclass(frozen=True)
class Saved:
    """What a run goes on from."""

    segment: Path  # folder of the ranks' checkpoints
    own: RankState | None  # this rank's, if the job has all its old ranks again, and their models are close enough
    num_trainers: int  # ranks that trained then; of spares none, though they took a place
    num_lost: int  # ranks that had died; at least so many
    config: Config  # that the run had

    @classmethod
    def find(cls, comm: Communicator, segment: Path, flat: FlatParameters, coupling: int) -> Saved:
        """Read the checkpoints of such a network. `coupling`: how close the ranks' models are to be. Collective."""

        config = from_first(comm, lambda: run_folder.config_of(segment.parents[1]))

        def load(rank: int, ranks: int | None = None) -> RankState:
            return checkpoint.load_rank(segment, rank, flat.signature, ranks, len(flat.data))

        first = collectively(comm, lambda: load(0))
        if first.num_trainers != comm.size or coupling > config.exchange_kind.coupling:
            return cls(segment, None, first.num_trainers, 0, config)
        own = collectively(comm, lambda: load(comm.rank, first.ranks))
        # A spare that trains is in the place of somebody who may have died before the next checkpoint of any other.
        replaced = from_first(comm, lambda: checkpoint.has_spares(segment, first))
        num_lost = max(comm.allgather(max(len(own.counters["lost"]), int(replaced))))
        updates = comm.allgather(own.counters["updates"])
        # Killed between the ranks' first checkpoints: some have weights that nobody learned.
        untrained = coupling == 1 and any(updates) and not all(updates)
        return cls(segment, None if num_lost or untrained else own, first.num_trainers, num_lost, config)

    def say_ranks_changed(self, comm: Communicator, what: str) -> None:
        """Rank 0 says what the ranks begin with when they are not those of before."""
        if comm.rank == 0:
            had = f"had {counted(self.num_trainers, 'rank')} and now has {comm.size}"
            if self.num_trainers == comm.size:
                had = "had a model for each rank, which are now brought together"
            text = f"had lost {counted(self.num_lost, 'rank')}" if self.num_lost else had
            say(f"The run {text}: {what}; the steps made count; random streams are new.")


class Parts(abc.ABC, Generic[ExchangeT]):
    """What the algorithms have and do in ways of their own."""

    config: Config  # as `device_and_precision` gives it
    device: torch.device
    network: nn.Module
    flat: FlatParameters

    @property
    def acts(self) -> bool:
        """This rank plays."""
        return True

    @property
    def coupling(self) -> int:
        """How close the ranks' models are to be (`ExchangeKind.coupling`)."""
        return 0

    @property
    @abc.abstractmethod
    def shared_tensors(self) -> list[Tensor]:
        """What all ranks begin with alike."""

    def share(self, comm: Communicator, root: int = 0) -> None:
        """Everybody gets the root's `shared_tensors`, the parameters checked by checksum. Collective."""
        for tensor in self.shared_tensors:
            host = tensor.cpu().numpy()
            comm.bcast_array(host, root)
            tensor.copy_(torch.from_numpy(host))
        checksums = comm.allgather(zlib.crc32(self.flat.data.detach().cpu().numpy().tobytes()))
        wrong = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[root]]
        if wrong:
            raise CollectiveError(
                f"Rank {wrong[0]} began with other weights than rank {root}: its memory or link is faulty."
            )

    @abc.abstractmethod
    def restore(self, comm: Communicator, saved: Saved) -> dict[str, Any]:
        """Go on from checkpoints. Returns the counters (`RankState.counters`) that this rank goes on from, its own if
        there are some. Collective."""

    @abc.abstractmethod
    def state(self, exchange: ExchangeT | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Flat tensors and numbers for this rank's checkpoint. None: training has not begun."""

    @abc.abstractmethod
    def make_exchange(self, comm: Communicator, start: ExchangeState, interrupt: Interrupt) -> ExchangeT:
        """Collective."""

    @abc.abstractmethod
    def take_place(self, comm: Communicator, sleeping: Any, interrupt: Interrupt) -> ExchangeT | None:
        """Make the exchange of a spare that trains from now on, with a model from others; None if training ended
        before. `sleeping`: the algorithm's `Sleeping`. Not collective."""

    @abc.abstractmethod
    def make_loop(self, rank: int, envs: Envs, exchange: ExchangeT, progress: Progress, interrupt: Interrupt) -> Loop:
        """The training loop of this rank."""

    def before_training(self, previous: Path | None) -> None:
        """Everything is saved in a new segment; `previous`: the one before."""

    def after_training(self, comm: Communicator, segment: Path) -> None:
        """Save what is saved only once, when all else is. Collective."""


def build_envs(comm: Communicator, config: Config, threads: int, make_env: MakeEnv | None = None) -> Envs:
    """This rank's environments; torch gets as many threads. Collective."""
    made: list[Envs] = []
    try:
        collectively(comm, lambda: made.append(make_envs(config.env, threads, make_env)))
    except BaseException:
        for envs in made:  # those of another rank could not be made
            envs.abandon()
        raise
    set_torch(threads)
    return made[0]


def device_and_precision(comm: Communicator, config: Config, envs: Envs) -> tuple[torch.device, Config]:
    """The configuration's device, made the current one; and the configuration with a `network.precision` of `auto`
    decided, for all ranks alike. Collective."""
    before_this = comm.allgather(comm.host)[: comm.rank].count(comm.host)
    device = collectively(comm, lambda: use_device(config.run.device, before_this))
    is_fast = all(comm.allgather(has_bfloat16(device)))
    if config.network.precision == "bfloat16" and not is_fast and comm.rank == 0:
        say("'network.precision' is 'bfloat16', for which not all ranks have instructions; 'float32' would be faster.")
    if config.network.precision != "auto":
        return device, config
    is_image = len(envs.observation_space.shape or ()) == 3
    network = replace(config.network, precision="bfloat16" if is_fast and is_image else "float32")
    return device, replace(config, network=network)
