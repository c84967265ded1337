"""What the learner sees of the other ranks: nothing but this. The variants of the system differ by this one object."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from torch import Tensor

from pala.exchange.protocol import Stop


class ExchangeState(NamedTuple):
    """What a checkpoint keeps of an exchange."""

    local_steps: list[int]  # of every rank, as far as known
    base_steps: int  # steps made before the run's number of ranks changed
    round: int
    weight: float


class Exchange(abc.ABC):
    """Between two updates, the learner's parameters pass through here."""

    waited_s = 0.0  # time in which the learner could not go on
    message_bytes = 0  # of one model on the wire

    @property
    @abc.abstractmethod
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here."""

    @property
    @abc.abstractmethod
    def stop(self) -> Stop:
        """Why training should end; NONE while it should not."""

    @abc.abstractmethod
    def stop_now(self, reason: Stop) -> None:
        """End training on all ranks."""

    @abc.abstractmethod
    def after_update(self, steps: int, healthy: bool) -> bool:
        """One update from `steps` steps is done; mix the parameters in place. May wait. Not collective.

        `healthy` is False if the parameters are not finite: then they are replaced by what peers sent. Returns whether
        the parameters are finite now.
        """

    def between_steps(self) -> None:  # noqa: B027  most exchanges have nothing to do here
        """Called by the learner between two steps, to move messages on. Returns at once. Not collective."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> Stop:
        """End the exchange: nothing is in flight after it, and all ranks agree on why training ended. Collective.

        From here on `state` and `global_steps` are exact. Raises PalaError when peers do not close within
        `timeout_s` seconds, or 10 s after a signal.
        """

    @abc.abstractmethod
    def final_parameters(self, timeout_s: float) -> Tensor:
        """The final policy's flat parameters, equal on all ranks, on the host. Collective; after `close`."""

    @abc.abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Figures since the last call, for the metrics file (keys: docs/metrics.md)."""

    @abc.abstractmethod
    def state(self) -> ExchangeState:
        """For the checkpoint."""
