"""The exchange: all that a loop sees of the other ranks. The variants of the system differ by this one object."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Communicator, Survivors
from pala.config import Config
from pala.exchange.budget import ExchangeState, Stop
from pala.system.errors import EndError
from pala.system.interrupt import LEAVE, Interrupt
from pala.system.output import log
from pala.system.trace import Trace


class End(NamedTuple):
    """The agreement of all living ranks at the end."""

    stop: Stop
    steps_by_rank: np.ndarray  # uint64 [ranks]; of the dead, as far as a living rank knows
    living: Sequence[int]
    stayed: Sequence[int]  # those of the living that trained to the end; all, if none did


def agree_on_end(
    comm: Communicator,
    stop: Stop,
    steps_by_rank: np.ndarray,
    timeout_s: float | None,
    has_left: bool = False,
) -> End:
    """Return why training ends (the highest reason of any rank), every rank's steps, and the living ranks. Collective.

    `steps_by_rank`: uint64 [ranks], as far as known here; `has_left`: this rank trained no more, while others did.
    """

    def agree(survivors: Survivors) -> End:
        left = np.zeros(comm.size, np.uint64)
        left[comm.rank] = has_left
        table = np.array([stop, *steps_by_rank, *left], np.uint64)
        survivors.reduce(table, "max")
        steps, left = np.split(table[1:], [len(steps_by_rank)])
        stayed = [rank for rank in survivors.members if not left[rank]]
        return End(Stop(int(table[0])), steps, survivors.members, stayed or survivors.members)

    return comm.with_survivors(agree, timeout_s)


_HARDLY = 1e-9  # weight of a model that counts only if no other does


def average_of_ranks(
    comm: Communicator, parameters: Tensor, weight: float, counts: bool, timeout_s: float | None
) -> Tensor:
    """Return the weighted average of the living ranks' flat parameters, on the host. A model that is not finite has no
    part in it, and one that does not count (no rank has trained it, say) only if none counts. Collective. Raises
    EndError, on all ranks, if no rank's is finite."""
    mine, weight = parameters.detach().cpu(), weight * (1.0 if counts else _HARDLY)
    if not bool(mine.isfinite().all()):
        log(f"[rank {comm.rank}] its parameters are not finite and have no part in the final average")
        mine, weight = torch.zeros_like(mine), 0.0

    def average(survivors: Survivors) -> Tensor:
        total, weights = mine * weight, np.array([weight], np.float64)
        survivors.reduce(weights, "sum")
        survivors.reduce(total.numpy(), "sum")
        if weights[0] == 0:
            raise EndError(
                "The parameters of every rank are not finite; resume from a checkpoint, with a smaller learning rate."
            )
        return total.div_(float(weights[0]))

    return comm.with_survivors(average, timeout_s)


def model_of_first(comm: Communicator, parameters: Tensor, counts: bool, timeout_s: float) -> Tensor:
    """Return the flat parameters of the first rank that lives and counts, on the host; if none counts, of the first
    that lives. Collective."""
    mine = parameters.detach().cpu()

    def of_first(survivors: Survivors) -> Tensor:
        counted = np.zeros(comm.size, np.uint64)
        counted[comm.rank] = counts
        survivors.reduce(counted, "max")
        first = next((rank for rank in survivors.members if counted[rank]), survivors.members[0])
        final = mine.clone() if comm.rank == first else torch.zeros_like(mine)
        survivors.reduce(final.numpy(), "sum")
        return final

    return comm.with_survivors(of_first, timeout_s)


class Exchange(abc.ABC):
    """The interface through which a loop, of either algorithm, reaches the other ranks."""

    interrupt: Interrupt  # this rank's signals: those of its communicator
    waited_s = 0.0  # time in which this rank could not continue
    message_bytes = 0  # of the largest message
    trace: Trace | None = None  # records this rank's timeline, if there is one

    def record(self, trace: Trace) -> None:
        """Record waits and messages from now on."""
        self.trace = trace

    def _waited_since(self, begin_s: float) -> None:
        """Count the time since then, by `time.perf_counter`, as waiting."""
        end_s = time.perf_counter()
        self.waited_s += end_s - begin_s
        if self.trace is not None:
            self.trace.span("wait", begin_s, end_s)

    @property
    @abc.abstractmethod
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here."""

    @property
    @abc.abstractmethod
    def living(self) -> Sequence[int]:
        """Ranks that live and train, as far as known here; sorted."""

    @property
    def left(self) -> Collection[int]:
        """Ranks that have left the job in good order."""
        return ()

    @property
    def joining(self) -> Collection[int]:
        """Spares that take a place and have trained nothing yet, as far as known here."""
        return ()

    @property
    @abc.abstractmethod
    def stop(self) -> Stop:
        """The reason to end training; NONE while it continues."""

    @abc.abstractmethod
    def stop_now(self, reason: Stop) -> None:
        """End training on all ranks."""

    def listen(self) -> None:  # noqa: B027  most hear of each other anyhow
        """Let `stop_now` reach all ranks from now on, also of an exchange that otherwise tells them nothing. Before the
        first update. Collective."""

    def leave(self) -> bool:
        """Hand this rank's steps to the others, which continue without it. May wait a little. Returns False if this
        rank must stay; the reason is then printed. Not collective."""
        log(
            f"Process {os.getpid()} was told to leave ({LEAVE.name}), but only ranks of gossip and Gorila can: it "
            "stays. SIGUSR1 ends the whole job, with a checkpoint."
        )
        return False

    @abc.abstractmethod
    def close(self, timeout_s: float) -> Stop:
        """End the exchange: nothing is in flight after it, and all ranks agree on why training ended. Collective.

        From here on `state` and `global_steps` are exact. Raises EndError when peers do not close within
        `timeout_s` seconds, or 30 s after a signal.
        """

    def abandon(self) -> None:  # noqa: B027  some have no transport
        """Say and hear nothing from here on: this rank has failed. Not collective."""

    @abc.abstractmethod
    def final_parameters(self, timeout_s: float) -> Tensor:
        """Return the final policy's flat parameters, equal on all ranks, on the host. Collective; after `close`."""

    def metrics(self) -> dict[str, Any]:
        """Return figures since the last call, for the metrics file (keys: docs/metrics.md); none, if there is no more
        to say than every rank's loop does."""
        return {}

    @abc.abstractmethod
    def state(self) -> ExchangeState:
        """Return what a checkpoint keeps of this exchange."""


class Setup(NamedTuple):
    """All that an exchange of models is made of, on one rank."""

    comm: Communicator
    parameters: Tensor
    """Flat parameters, float32 [parameters], which are changed in place, on the learner's thread alone."""
    config: Config
    start: ExchangeState
    """The state that the exchange begins with."""
    signature: int = 0
    """Checksum of the network's layout, equal on all ranks."""
    num_exact: int = 0
    """Number of the last parameters, which are never rounded or left out, and are no part of distances."""


class ModelExchange(Exchange):
    """The exchange of A2C: between two updates, the learner's parameters pass through here."""

    culprits: Sequence[int] = ()  # other ranks whose gradients made the last average not finite

    def __init__(self, setup: Setup) -> None:
        """Exchange from now on. Collective."""
        self._comm, self._parameters, self.interrupt = setup.comm, setup.parameters, setup.comm.interrupt

    @property
    def num_learners(self) -> int:
        """Number of ranks that train, as this update knows it: the same on all ranks that make it together."""
        return max(1, len(self.living))  # 0: all are leaving

    @property
    def num_models(self) -> int:
        """Number of different models among them."""
        return self.num_learners

    @property
    def heals(self) -> int:
        """Number of times that `after_update` replaced this rank's model by what peers sent."""
        return 0

    def average_gradient(self, gradient: Tensor) -> bool:
        """Average the flat gradient of an update in place, before the optimiser takes it. May wait.

        False if training ends here and the update is to be left out. Most exchanges leave gradients alone; all-reduce
        is collective here, and raises EndError where it waits in vain.
        """
        return True

    @abc.abstractmethod
    def after_update(self, steps: int, healthy: bool) -> bool:
        """Mix the parameters in place after an update from `steps` steps. May wait. Not collective.

        `healthy` is False if the parameters are not finite: then they are replaced by what peers sent, where peers send
        models. Returns whether the parameters are finite now; where they are not, this rank cannot continue.
        """

    def between_steps(self) -> None:
        """Move messages on between two steps. Returns at once. Not collective."""
