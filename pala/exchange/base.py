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

    @abc.abstractmethod
    def finish(self, timeout_s: float) -> Tensor:
        """The final policy's flat parameters, equal on all ranks. Collective; the last call. Raises as `close`."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """End without a final policy, after a signal. Collective; the last call. Raises PalaError when peers do not
        close within `timeout_s` seconds."""

    @abc.abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Figures since the last call, for the metrics file (keys: docs/metrics.md)."""

    @abc.abstractmethod
    def state(self) -> ExchangeState:
        """For the checkpoint."""
