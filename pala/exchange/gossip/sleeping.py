"""Gossip of a spare rank that sleeps: it hears who dies, leaves and joins, and of the end, and has no model.

Its driver and protocol are those that it goes on with when it is needed. Loads no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from pala.config import Config
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import GossipDriver, Models, Opened
from pala.exchange.gossip.messages import WITHOUT_MODEL
from pala.exchange.gossip.protocols import make_protocol
from pala.exchange.wire import NOTHING, Message, Refusal, Wire
from pala.system.runtime import Interrupt
from pala.transport.base import Bytes, Communicator, Packet, Received

_LOOK_S = 0.5  # a rank that sleeps looks at signals so often


class Beginning(NamedTuple):
    """What a rank that sleeps has to know of those that train."""

    num_parameters: int
    signature: int  # of the network's layout
    local_steps: list[int]  # of every rank, those that sleep too
    base_steps: int
    round: int


class _NoModels:
    """As much of `Models` as a rank needs to which nobody sends one."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def control(self, message: Message) -> Packet:
        data = np.zeros(self._wire.control_bytes, np.uint8)
        self._wire.encode(message, data)
        return Bytes(data)

    def open(self, received: Received, offer: Any = None) -> Opened:
        message = self._wire.decode(received.data)
        return Opened(None, message) if isinstance(message, Refusal) else Opened(message)

    def memory_for(self, num_bytes: int) -> None:
        return None


class SleepingGossip:
    """Waits for the rank's turn."""

    def __init__(self, comm: Communicator, config: Config, begin: Beginning, interrupt: Interrupt) -> None:
        """Collective."""
        self._interrupt = interrupt
        budget = StepBudget(
            comm.rank, comm.size, config.total_steps, begin.local_steps, begin.base_steps, config.run.spares
        )  # fmt: skip
        self._budget = budget
        protocol = make_protocol(config, budget, begin.round, weight=0.0, whole_every=1)
        wire = Wire(comm.size, begin.num_parameters, begin.signature, dict.fromkeys(WITHOUT_MODEL, NOTHING))
        self.transport = comm.open_transport()
        self.driver = GossipDriver(protocol, self.transport, cast(Models, _NoModels(wire)), num_snapshots=0)
        self.driver.start()

    @property
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here."""
        return self._budget.global_steps

    def until_needed(self) -> bool:
        """Sleep. True if this rank has to take a place; False if training ends, or it is told to leave."""
        with self.driver.lock:
            while not (self._budget.is_needed or self._interrupt.is_told_to_leave):
                if self._budget.stop is not Stop.NONE:
                    return False
                self.driver.wait(_LOOK_S)
                self.transport.raise_failure()
                if self._interrupt.signal is not None:
                    self.driver.end(Stop.SIGNAL)
        return not self._interrupt.is_told_to_leave

    @property
    def is_over(self) -> bool:
        """Training has ended, as far as known here."""
        self.transport.raise_failure()
        if self._interrupt.signal is not None:
            self.driver.end(Stop.SIGNAL)
        return self._budget.stop is not Stop.NONE

    def close(self, timeout_s: float) -> None:
        """Take part in the end of the messages. Collective. Raises EndError as `Transport.close`."""
        self.transport.close(timeout_s, self._interrupt)
