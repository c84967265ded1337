"""The one driver of the gossip protocol: it tells the protocol what happens, and carries out what that asks for.

Training drives it over MPI, tests over threads of one process, the simulator and the benchmark of the protocol over a
simulated network. They differ by the transport, and by what holds the models: tensors, or a few numbers.

Two threads meet here under one lock: the learner's, which finishes updates and asks to go on, and the transport's,
which brings messages when the learner's does not fetch them between two steps. Each holds the lock for well under a
millisecond. Only the learner's thread touches the parameters, and only between two updates.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from pala.exchange.budget import Stop
from pala.exchange.gossip.actions import Accept, Action, Clear, GoOn, Heal, Mix, SendControl, SendModel
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.wire import Message, Refusal
from pala.system.runtime import say
from pala.transport.base import Packet, Received, Receiver, Transport

_SNAPSHOTS = 2  # that may be on their way
_MIXES_A_MEASUREMENT = 8  # a measurement of the consensus distance costs as much as a mix


class Opened(NamedTuple):
    """What a packet turned out to be: a message, or why it is none. Of a model that is rejected, both."""

    message: Message | None
    refusal: Refusal | None = None


class Models(Protocol):
    """This rank's model, the inbox of those that came, and how both become packets."""

    def new_snapshot(self) -> Packet:
        """Memory for a copy of the model on its way."""

    def fill(self, snapshot: Any, message: Message, whole: bool) -> int:
        """Copy the model, or the part of it that is to be sent, under this header. Returns the number of bytes."""

    def control(self, message: Message) -> Packet:
        """A message without a model, in memory of its own."""

    def open(self, received: Received) -> Opened:
        """Read a packet; a model that may be accepted is held until `add` or the next one."""

    def add(self, weight: float) -> None:
        """Add the model that was opened last to the inbox."""

    def clear(self) -> None:
        """Empty the inbox."""

    def mix(self, own_weight: float, measure: bool) -> Any:
        """As `actions.Mix`. If `measure`, returns the distance between the model and the inbox's mean before."""

    def heal(self) -> None:
        """As `actions.Heal`."""

    def memory_for(self, num_bytes: int) -> np.ndarray | None:
        """As `Receiver.memory_for`."""

    def give_up_memory(self) -> None:
        """As `Receiver.give_up_memory`."""


class _Snapshot(NamedTuple):
    packet: Packet
    peers: tuple[int, ...]  # to whom it went last


class GossipDriver(Receiver):
    """One rank's protocol over a transport. Every method but `start` may be called on either thread."""

    def __init__(
        self, protocol: GossipProtocol, transport: Transport, models: Models, num_snapshots: int = _SNAPSHOTS,
        report: Callable[[str], None] = say,
    ) -> None:  # fmt: skip
        """`num_snapshots`: copies of the model that may be on their way, if the peers that they went to answer;
        `report`: takes a sentence for people."""
        self.protocol, self.transport, self.models = protocol, transport, models
        self._num_snapshots, self._report = num_snapshots, report
        self.lock = threading.RLock()
        self._changed, self._num_waiting = threading.Condition(self.lock), 0
        self.counts: Counter[str] = Counter()  # for the metrics; whoever reads them may empty it
        self.distances: list[Any] = []
        self._snapshots = [_Snapshot(models.new_snapshot(), ()) for _ in range(num_snapshots)]
        self._complained_of: set[int] = set()

    # ---- the learner's thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first update begins; messages may come from now on."""
        self.protocol.start(self.transport.now_s())
        self.transport.start(self)

    def finish_update(self, steps: int, healthy: bool) -> None:
        """One update from `steps` steps is done; `healthy`: the model is finite. `advance` must follow."""
        with self.lock:
            self._perform(self.protocol.update_finished(self.transport.now_s(), steps, healthy))

    def advance(self) -> bool:
        """Send, mix and give credit as is due. True if the next update may begin; else ask again when something has
        come, or after a while."""
        with self.lock:
            actions = self.protocol.advance(self.transport.now_s(), self._can_send)
            self._perform(actions)
            return isinstance(actions[-1], GoOn)

    def wait(self, timeout_s: float) -> None:
        """Until something has come; asleep. With the lock held, which is given up meanwhile."""
        self._num_waiting += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._num_waiting -= 1

    def end(self, reason: Stop) -> None:
        """This rank ends training: tell the others."""
        with self.lock:
            self._perform(self.protocol.end(reason))

    def finish(self) -> None:
        """The transport has closed: mix whatever has come."""
        with self.lock:
            self._perform(self.protocol.finish())

    # ---- the transport's calls -----------------------------------------------------------------------------------

    def on_message(self, message: Received) -> None:
        source, opened = message.source, self.models.open(message)
        if opened.message is not None and opened.message.sender != source:
            opened = Opened(None, Refusal(f"it says it comes from rank {opened.message.sender}"))
        with self.lock:
            if opened.message is not None:
                rejected = opened.refusal is not None
                self._perform(
                    self.protocol.message_came(opened.message, message.took_s, message.too_late, rejected)
                )  # fmt: skip
            elif message.bulk:
                self._perform(self.protocol.unreadable_model_came(source))
            if opened.refusal is not None:
                self._complain(source, opened.refusal)
            self._notify()

    def on_death(self, rank: int) -> None:
        with self.lock:
            self._perform(self.protocol.peer_died(rank))
            self._notify()

    def on_tick(self) -> None:
        with self.lock:
            self.protocol.clock(self.transport.now_s())

    @property
    def patience_s(self) -> float:
        return self.protocol.transfer_patience_s

    def memory_for(self, num_bytes: int) -> np.ndarray | None:
        return self.models.memory_for(num_bytes)

    def give_up_memory(self) -> None:
        self.models.give_up_memory()

    # ---- with the lock held --------------------------------------------------------------------------------------

    def _notify(self) -> None:
        if self._num_waiting > 0:
            self._changed.notify_all()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendControl):
                self.transport.send(action.peer, self.models.control(action.message))
            elif isinstance(action, SendModel):
                self._send_model(action)
            elif isinstance(action, Accept):
                self.models.add(action.weight)
            elif isinstance(action, Mix):
                self._mix(action)
            elif isinstance(action, Heal):
                self.models.heal()
                self._count_mix(action.num_models)
            elif isinstance(action, Clear):
                self.models.clear()

    def _send_model(self, action: SendModel) -> None:
        index = self._free_snapshot()
        assert index is not None, "the protocol was told that there is no memory for a snapshot"
        packet = self._snapshots[index].packet
        self._snapshots[index] = _Snapshot(packet, action.peers)
        num_bytes = self.models.fill(packet, action.message, action.whole)
        for peer in action.peers:
            self.transport.send(peer, packet, bulk=True)
        self.counts["models_sent"] += len(action.peers)
        self.counts["bytes_sent"] += len(action.peers) * num_bytes

    def _can_send(self) -> bool:
        return self._free_snapshot() is not None

    def _free_snapshot(self) -> int | None:
        """The index of one that has left. If peers that do not answer hold all, there is one more, which is given up
        when they answer again."""
        snapshots, silent = self._snapshots, self.protocol.silent
        free = [i for i, snapshot in enumerate(snapshots) if snapshot.packet.pending == 0]
        if not free and all(not silent.isdisjoint(snapshot.peers) for snapshot in snapshots):
            snapshots.append(_Snapshot(self.models.new_snapshot(), ()))
            return len(snapshots) - 1
        for index in reversed(free[1:]):
            if len(snapshots) > self._num_snapshots:
                del snapshots[index]
        return free[0] if free else None

    def _mix(self, action: Mix) -> None:
        measure = self.counts["mixes"] % _MIXES_A_MEASUREMENT == 0
        distance = self.models.mix(action.own_weight, measure)
        if distance is not None:
            self.distances.append(distance)
        self._count_mix(action.num_models)

    def _count_mix(self, num_models: int) -> None:
        self.counts["mixes"] += 1
        self.counts["models_mixed"] += num_models

    def _complain(self, source: int, refusal: Refusal) -> None:
        """Once for each peer."""
        if source not in self._complained_of:
            self._complained_of.add(source)
            self._report(
                f"[rank {self.protocol.rank}] refused a model from rank {source}: {refusal.reason}. "
                "Later ones are only counted."
            )
