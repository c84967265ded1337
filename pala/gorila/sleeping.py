"""A spare rank of Gorila that sleeps: it hears who dies, leaves and joins, and of the end. Loads no torch."""

from __future__ import annotations

import threading

from pala.comm.base import Bytes, Communicator, Received, Receiver
from pala.config import Config
from pala.exchange.budget import StartState, Stop, budget_of
from pala.exchange.sleeping import Sleeping
from pala.exchange.wire import NOTHING, Message, Wire
from pala.gorila.members import Members
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.gorila.roles import assign
from pala.system.errors import EndError
from pala.system.output import log


class SleepingGorila(Sleeping, Receiver):
    """A rank that waits until it is needed, and then continues with what it knows of the others."""

    def __init__(self, comm: Communicator, config: Config, begin: StartState) -> None:
        """Open the transport and hear from now on. Collective."""
        spares = config.run.spares
        roles = assign(config.gorila, comm.size - spares, spares)
        budget = budget_of(comm, begin.start, config.total_steps, spares)
        self.members = Members(budget, roles, config.gorila.patience_s, self._tell)
        self._wire = Wire(comm.size, begin.num_parameters, begin.signature, dict.fromkeys(ABOUT_MEMBERS, NOTHING))
        self.changed = threading.Condition()  # with the lock under which messages are taken in, also by `awake`
        self.awake: Receiver | None = None  # what hears in its place from then on; set with the lock held
        self._refused: set[int] = set()
        super().__init__(comm, self.members.budget)
        self.transport.start(self)

    @property
    def is_needed(self) -> bool:
        if self.members.fault:
            raise EndError(self.members.fault)
        with self.changed:
            return self._budget.is_needed

    def _wait(self, timeout_s: float) -> None:
        with self.changed:
            if not (self._budget.is_needed or self.members.fault or self._budget.stop is not Stop.NONE):
                self.changed.wait(timeout_s)

    def _end(self, reason: Stop) -> None:
        with self.changed:
            self._budget.stop_now(reason)
            self.members.send_stop()

    # ---- the transport's calls -----------------------------------------------------------------------------------

    def on_message(self, message: Received) -> None:
        with self.changed:
            if self.awake is not None:
                self.awake.on_message(message)
                return
            heard = self._wire.decode_from(message.source, message.data)
            if isinstance(heard, Message):
                self.members.hear(heard)
            elif message.source not in self._refused:
                self._refused.add(message.source)
                log(f"[rank {self.members.rank}] refused a message from rank {message.source}: {heard.reason}.")
            self.members.send_stop()
            self.changed.notify_all()

    def on_death(self, rank: int) -> None:
        with self.changed:
            if self.awake is not None:
                self.awake.on_death(rank)
                return
            self.members.peer_died(rank)
            self.members.send_stop()
            self.changed.notify_all()

    def on_tick(self) -> None:
        with self.changed:
            if self.awake is not None:
                self.awake.on_tick()
                return
            self.members.look(self.transport.now_s())

    def _tell(self, rank: int, kind: Kind) -> Bytes:
        message = Message(kind, self.members.rank, 0, 1.0, self._budget.stop, self._budget.steps_by_rank)
        packet = Bytes(self._wire.encoded(message))
        self.transport.send(rank, packet)
        return packet
