"""A spare rank that sleeps, and how it waits for its turn. Loads no torch."""

from __future__ import annotations

import abc

from pala.comm.base import Communicator
from pala.exchange.budget import StepBudget, Stop
from pala.system.waiting import wait_asleep

_LOOK_S = 0.5  # between two looks at signals of a rank that sleeps


class Sleeping(abc.ABC):
    """Waits for the rank's turn. It hears who dies, leaves and joins, and of the end, and has no model."""

    def __init__(self, comm: Communicator, budget: StepBudget) -> None:
        """Open the transport. Collective."""
        self._budget = budget
        self.transport = comm.open_transport()
        self._interrupt = comm.interrupt

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._budget.rank

    @property
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here."""
        return self._budget.global_steps

    def until_needed(self) -> bool:
        """Sleep. Returns True if this rank has to take a place; False if training ends, or it is told to leave. Raises
        EndError if training cannot continue."""
        wait_asleep(self._may_wake, None, self._interrupt, _LOOK_S, sleep=self._wait)
        return self.is_needed and not self._interrupt.leave_requested

    def _may_wake(self) -> bool:
        self.transport.raise_failure()
        if self._interrupt.signal is not None:
            self._end(Stop.SIGNAL)
        return self.is_needed or self._interrupt.leave_requested or self._budget.stop is not Stop.NONE

    def close(self, timeout_s: float) -> None:
        """Take part in the end of the messages. Collective. Raises EndError as `Transport.close`."""
        self.transport.close(timeout_s)

    @property
    @abc.abstractmethod
    def is_needed(self) -> bool:
        """Whether this rank has to take a place."""

    @abc.abstractmethod
    def _wait(self, timeout_s: float) -> None:
        """Sleep until something has come, at most `timeout_s` seconds."""

    @abc.abstractmethod
    def _end(self, reason: Stop) -> None:
        """End training on all ranks."""
