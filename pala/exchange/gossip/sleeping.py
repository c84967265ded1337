"""Gossip of a spare rank that sleeps: it hears who dies, leaves and joins, and of the end, and has no model.

It keeps its driver and protocol when it is needed and trains. Loads no torch.
"""

from __future__ import annotations

from typing import Any

from pala.comm.base import Bytes, Communicator, Packet, Received
from pala.config import Config
from pala.exchange.budget import StartState, Stop, budget_of
from pala.exchange.gossip.driver import GossipDriver, Models, Opened, make_protocol
from pala.exchange.gossip.messages import WITHOUT_MODEL
from pala.exchange.gossip.state import Rules
from pala.exchange.sleeping import Sleeping
from pala.exchange.wire import NOTHING, Message, Refusal, Wire


class NoModels(Models):
    """Messages as bytes, of a rank that has no model and is sent none."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def control(self, message: Message) -> Packet:
        return Bytes(self._wire.encoded(message))

    def open(self, received: Received, offer: Any = None) -> Opened:
        message = self._wire.decode_from(received.source, received.data)
        return Opened(None, message) if isinstance(message, Refusal) else Opened(message)


class SleepingGossip(Sleeping):
    """Waits for the rank's turn."""

    def __init__(self, comm: Communicator, config: Config, begin: StartState) -> None:
        """Open the transport and wait for a turn. Collective."""
        budget = budget_of(comm, begin.start, config.total_steps, config.run.spares)
        protocol = make_protocol(Rules.of(config, whole_every=1))
        state = protocol.new_state(budget, weight=0.0, round_=begin.start.round)
        wire = Wire(comm.size, begin.num_parameters, begin.signature, dict.fromkeys(WITHOUT_MODEL, NOTHING))
        super().__init__(comm, budget)
        self.driver = GossipDriver(protocol, state, self.transport, NoModels(wire))
        self.driver.start()

    @property
    def is_needed(self) -> bool:
        with self.driver.lock:
            return self._budget.is_needed

    def _wait(self, timeout_s: float) -> None:
        with self.driver.lock:
            if not self._budget.is_needed and self._budget.stop is Stop.NONE:
                self.driver.wait(timeout_s)

    def _end(self, reason: Stop) -> None:
        self.driver.end(reason)
