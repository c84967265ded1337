"""The one driver of the gossip protocol: it tells the protocol what happens, and carries out the actions that it
returns.

Training drives it over MPI, tests over threads of one process, the simulator over a simulated network, the benchmark of
the protocol over a queue. They differ by the transport, and by what holds the models: tensors, or a few numbers.

Two threads meet here under one lock: the learner's, which finishes updates and asks to continue, and the transport's,
which brings messages when the learner's does not fetch them between two steps. Each holds the lock for well under a
millisecond; for about one on a GPU, for about two with `top_k`. Only the learner's thread touches the parameters, and
only between two updates.
"""

from __future__ import annotations

import abc
import enum
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np

from pala.comm.base import Bytes, Packet, Received, Receiver, Transport
from pala.config.catalogue import RULES
from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import (
    NEWS,
    Accept,
    Action,
    Clear,
    Close,
    GoOn,
    Heal,
    Keep,
    Kind,
    Mix,
    Move,
    Pull,
    SendControl,
    SendModel,
    Wait,
)
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState, Rules
from pala.exchange.wire import Message, Refusal
from pala.system.output import log
from pala.system.trace import Trace

_SNAPSHOTS = 2  # of this rank's model that may be on their way
_MOST_UNDER_WAY = 4  # models to one peer: an offer, an answer, and the next of each before these are seen to have left
_MOST_REPLIES = 8  # to one peer, that have not left
_ASKED_AGAIN = (Kind.WISH, Kind.STAY, Kind.JOIN)  # of each kind, one unsent message to a peer is enough
_MOST_DISTANCES = 1024  # that wait to be read; a user's loop may never ask for them
MIXES_A_MEASUREMENT = 8  # a measurement of the consensus distance costs as much as a mix


def make_protocol(rules: Rules) -> GossipProtocol:
    """Return the protocol that the row of the rules' mixing names."""
    protocol: type[GossipProtocol] = resolve_name(RULES[rules.mixing].protocol)
    return protocol(rules)


class Opened(NamedTuple):
    """A decoded packet: a message, or the reason why it is none; for a rejected model both."""

    message: Message | None
    refusal: Refusal | None = None


class Models(abc.ABC):
    """This rank's model, the inbox of those that came, and how both become packets. By default there are no parameters,
    and whatever would move them does nothing."""

    def new_snapshot(self) -> Packet:
        """Return memory for a copy of the model on its way."""
        return Bytes(np.zeros(0, np.uint8))

    def fill(self, snapshot: Any, message: Message, whole: bool) -> int:
        """Copy the model, or the part of it that is to be sent, under this header. Return the number of bytes."""
        return 0

    def fill_answer(self, snapshot: Any, message: Message, peer: int) -> int:
        """Fill a snapshot with only the parameters that the offer from this peer held, which is in the inbox."""
        return 0

    @abc.abstractmethod
    def control(self, message: Message) -> Packet:
        """Return a message without a model, in memory of its own."""

    @abc.abstractmethod
    def open(self, received: Received, offer: Any = None) -> Opened:
        """Read a packet, and refuse one that names another sender; a model that may be accepted is held until `add`,
        `keep` or the next one. `offer`: the open offer to its sender, if there is one."""

    def add(self, weight: float) -> None:  # noqa: B027
        """Add the model that was opened last to the inbox."""

    def clear(self) -> None:  # noqa: B027
        """Empty the inbox."""

    def mix(self, own_weight: float, measure: bool) -> Any:
        """Do what `messages.Mix` says. If `measure`, return the distance from the model to the inbox's mean before."""
        return None

    def pull(self, fraction: float, measure: bool) -> Any:
        """Do what `messages.Pull` says; measure as `mix`."""
        return None

    def keep(self, offer: Any) -> None:  # noqa: B027
        """Do what `messages.Keep` says, with the answer that was opened last."""

    def move(self, offer: Any, fraction: float) -> None:  # noqa: B027
        """Do what `messages.Move` says."""

    def heal(self) -> None:  # noqa: B027
        """Do what `messages.Heal` says."""

    def memory_for(self, num_bytes: int) -> np.ndarray | None:
        """Do what `Receiver.memory_for` says."""
        return None

    def give_up_memory(self) -> None:  # noqa: B027
        """Do what `Receiver.give_up_memory` says."""


@dataclass(eq=False)
class Snapshot:
    """Memory for a copy of the model, and what it is used for."""

    packet: Packet
    sent_s: float = -math.inf  # when it was sent last
    peers: tuple[int, ...] = ()  # to whom
    is_offer: bool = False  # open: an answer will be compared with it

    @property
    def is_free(self) -> bool:
        """Whether it may be written over."""
        return self.packet.pending == 0 and not self.is_offer


class GossipDriver(Receiver):
    """One rank's protocol over a transport, whose calls may come on either thread. All others come on the learner's:
    some of them touch the parameters."""

    def __init__(
        self,
        protocol: GossipProtocol,
        state: GossipState,
        transport: Transport,
        models: Models,
        num_snapshots: int = _SNAPSHOTS,
        report: Callable[[str], None] = log,
    ) -> None:
        """`num_snapshots`: copies of the model that may be on their way, if the peers that they went to answer;
        `report`: takes a sentence for people."""
        self.protocol, self.state = protocol, state
        self.transport, self.models = transport, models
        self._num_snapshots, self._report = num_snapshots, report
        self.lock = threading.RLock()
        self._changed, self._num_waiting = threading.Condition(self.lock), 0
        self.counts: Counter[str] = Counter()  # for the metrics; whoever reads them may empty it
        self.distances: deque[Any] = deque(maxlen=_MOST_DISTANCES)  # the last ones; as `counts`
        self.heals = 0
        self._is_quiet = False
        self.trace: Trace | None = None
        self.num_mixes = 0
        self._num_asked = 0  # times that a mix could have been measured
        self.snapshots = [Snapshot(models.new_snapshot()) for _ in range(num_snapshots)]
        self.offers: dict[int, Snapshot] = {}  # open ones, by the peer that is to answer
        self._replies: list[tuple[int, enum.IntEnum | None, Packet]] = []
        """Receiver, kind if it is one of `_ASKED_AGAIN`, and packet; those that have left are removed later."""
        self._reported: set[int] = set()  # peers of which a message was refused

    # ---- the learner's thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the first update; messages may come from now on."""
        self.protocol.start(self.state, self.transport.now_s())
        self.transport.start(self)

    def begin(self) -> None:
        """Begin to gossip, after a time in which another rank of the group did."""
        with self.lock:
            self.protocol.start(self.state, self.transport.now_s())

    def finish_update(self, steps: int, healthy: bool) -> None:
        """Count an update from `steps` steps; `healthy`: the model is finite. `advance` must follow."""
        with self.lock:
            self._perform(self.protocol.update_finished(self.state, self.transport.now_s(), steps, healthy))

    def advance(self) -> bool:
        """Send, mix and give credit as is due. True if the next update may begin; else ask again when something has
        come, or after a while."""
        with self.lock:
            actions = self.protocol.advance(self.state, self.transport.now_s(), self._can_send)
            self._perform(actions)
            return isinstance(actions[-1], GoOn)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something has come. With the lock held, which is given up meanwhile."""
        self._num_waiting += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._num_waiting -= 1

    def end(self, reason: Stop) -> None:
        """End training, and tell the others."""
        with self.lock:
            self._perform(self.protocol.end(self.state, reason))

    def wake(self, models: Models, whole_every: int) -> None:
        """Hold a model from now on, after sleep, though it is of no use yet."""
        with self.lock:
            self.models = models
            self.protocol = type(self.protocol)(replace(self.protocol.rules, whole_every=whole_every))
            self.snapshots = [Snapshot(models.new_snapshot()) for _ in range(self._num_snapshots)]

    def join(self) -> None:
        """Train from now on; `advance` says when a peer's model has come."""
        with self.lock:
            self.protocol.join(self.state, self.transport.now_s())

    def wish_to_leave(self) -> None:
        """Ask the others who has a model of use and stays."""
        with self.lock:
            self._perform(self.protocol.wish_to_leave(self.state))

    def leave(self) -> None:
        """Train no more, and tell the others, who continue."""
        with self.lock:
            self._perform(self.protocol.leave(self.state))

    def be_quiet(self) -> None:
        """Send nothing more, while the transport pauses: all ranks do so, so no answer is missed."""
        with self.lock:
            self._is_quiet = True

    def restart(self) -> None:
        """Begin again after the transport has paused, when no rank expects anything of another. Collective."""
        with self.lock:
            self._perform(self.protocol.restart(self.state))

    def averaged(self) -> None:
        """Hold the average of all ranks' models from now on, and send again. Collective."""
        with self.lock:
            self.protocol.averaged(self.state, self.transport.now_s())
            self._is_quiet = False

    def finish(self) -> None:
        """Mix whatever has come, after the transport has closed."""
        with self.lock:
            self._perform(self.protocol.finish(self.state))

    # ---- the transport's calls -----------------------------------------------------------------------------------

    def on_message(self, message: Received) -> None:
        begin_s = time.perf_counter()
        opened = self._take_in(message)
        if self.trace is not None:
            came = opened.message
            kind, round_ = (came.kind.name, came.round) if came is not None else ("unreadable", 0)
            self.trace.received(kind, message.source, round_, message.took_s, begin_s)
            if opened.refusal is not None:
                self.trace.mark("refused a message", message.source)

    def _take_in(self, message: Received) -> Opened:
        """Tell the protocol of a message, and carry out what it asks for."""
        source, opened = message.source, self.models.open(message, self.offer_to(message.source))
        with self.lock:
            if self._takes_nothing(source) and (opened.message is None or opened.message.kind not in NEWS):
                self.counts["models_refused"] += 1
                self._report_refusal(
                    source, Refusal(f"{_MOST_UNDER_WAY} models have been sent to it, which it does not take")
                )
                return opened
            if opened.message is not None:
                rejected = opened.refusal is not None
                took_s, late = message.took_s, message.too_late
                self._perform(self.protocol.message_came(self.state, opened.message, took_s, late, rejected))
            elif message.bulk:
                self._perform(self.protocol.unreadable_model_came(self.state, source))
            else:
                self.counts["models_refused"] += 1
            if opened.refusal is not None:
                self._report_refusal(source, opened.refusal)
            self._notify()
        return opened

    def on_death(self, rank: int) -> None:
        with self.lock:
            self._perform(self.protocol.peer_died(self.state, rank))
            self._notify()
        if self.trace is not None:
            self.trace.mark("death", rank)

    def on_tick(self) -> None:
        with self.lock:
            self.protocol.clock(self.state, self.transport.now_s())

    @property
    def patience_s(self) -> float:
        return self.state.transfer_patience_s

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
            if self._is_quiet and isinstance(action, (SendControl, SendModel)):
                continue
            if isinstance(action, SendControl):
                self._send_control(action)
            elif isinstance(action, SendModel):
                self._send_model(action)
            elif isinstance(action, Accept):
                self.models.add(action.weight)
            elif isinstance(action, Mix):
                self._count_mix(action.num_models, self.models.mix(action.own_weight, self._measures()))
            elif isinstance(action, Pull):
                self._count_mix(action.num_models, self.models.pull(action.fraction, self._measures()))
            elif isinstance(action, Keep):
                self.models.keep(self.offers[action.peer].packet)
            elif isinstance(action, Move):
                self.models.move(self._close_offer(action.peer), action.fraction)
                self._count_mix(1)
            elif isinstance(action, Close):
                self._close_offer(action.peer)
            elif isinstance(action, Heal):
                self.models.heal()
                self.heals += 1
                self._count_mix(action.num_models)
            elif isinstance(action, Clear):
                self.models.clear()
            else:
                assert isinstance(action, (Wait, GoOn)), action  # `advance` returns them

    def _send_control(self, action: SendControl) -> None:
        """Send a message, but keep at most 8 unsent replies for each peer: a peer that receives nothing, but continues
        to send what has to be rejected, must not fill this rank's memory. Of ranks that leave, questions and replies
        count apart: they are many on a slow link, and a credit that is left out keeps a process lock forever."""
        begin_s, packet = time.perf_counter(), self.models.control(action.message)
        kind = action.message.kind
        if kind not in NEWS:
            again = kind if kind in _ASKED_AGAIN else None
            self._replies = [reply for reply in self._replies if reply[2].pending]
            unsent = sum((peer, of) == (action.peer, again) for peer, of, _ in self._replies)
            if unsent >= (_MOST_REPLIES if again is None else 1):
                return
            self._replies.append((action.peer, again, packet))
        self.transport.send(action.peer, packet)
        if self.trace is not None:
            self.trace.sent(kind.name, action.peer, action.message.round, len(packet.data), begin_s)

    def _takes_nothing(self, peer: int) -> bool:
        """Return whether the models under way to this peer are too many for it to have received the last: its messages,
        credits above all, must not add to them."""
        return sum(one.peers == (peer,) and one.packet.pending > 0 for one in self.snapshots) >= _MOST_UNDER_WAY

    def _send_model(self, action: SendModel) -> None:
        begin_s = time.perf_counter()
        kind, snapshot = action.message.kind, self._free_snapshot()
        if snapshot is None:
            assert kind is not Kind.MODEL, "the protocol was told that there is no memory for a snapshot"
            snapshot = self._new_snapshot()  # of offers and answers there are at most two a peer
        snapshot.sent_s, snapshot.peers = self.transport.now_s(), action.peers
        if kind is Kind.OFFER:
            snapshot.is_offer = True
            self.offers[action.peers[0]] = snapshot
        if kind is Kind.ANSWER:
            num_bytes = self.models.fill_answer(snapshot.packet, action.message, action.peers[0])
        else:
            num_bytes = self.models.fill(snapshot.packet, action.message, action.whole)
        for peer in action.peers:
            self.transport.send(peer, snapshot.packet, bulk=True)
            if self.trace is not None:
                self.trace.sent(kind.name, peer, action.message.round, num_bytes, begin_s)
        self.counts["models_sent"] += len(action.peers)
        self.counts["bytes_sent"] += len(action.peers) * num_bytes

    def _close_offer(self, peer: int) -> Packet:
        """Return what was offered to this peer; it may be written over from now on."""
        snapshot = self.offers.pop(peer)
        snapshot.is_offer = False
        return snapshot.packet

    def offer_to(self, peer: int) -> Any:
        """Return the open offer to this peer, or None. Needs no lock."""
        snapshot = self.offers.get(peer)
        return None if snapshot is None else snapshot.packet

    def _can_send(self) -> bool:
        return self._free_snapshot() is not None

    def _free_snapshot(self) -> Snapshot | None:
        """Return a snapshot that has left, or None. If peers that do not answer hold all, there is one more, which is
        given up when they answer again."""
        snapshots, patience_s = self.snapshots, self.state.patience_s
        free = [snapshot for snapshot in snapshots if snapshot.is_free]
        if not free and all(snapshot.sent_s < self.transport.now_s() - patience_s for snapshot in snapshots):
            return self._new_snapshot() if len(snapshots) < self._num_snapshots + self.state.budget.size else None
        for snapshot in reversed(free[1:]):
            if len(snapshots) > self._num_snapshots:
                snapshots.remove(snapshot)
        return free[0] if free else None

    def _new_snapshot(self) -> Snapshot:
        self.snapshots.append(Snapshot(self.models.new_snapshot()))
        return self.snapshots[-1]

    def _measures(self) -> bool:
        """Return True for one of `MIXES_A_MEASUREMENT` calls."""
        self._num_asked += 1
        return self._num_asked % MIXES_A_MEASUREMENT == 1

    def _count_mix(self, num_models: int, distance: Any = None) -> None:
        if distance is not None:
            self.distances.append(distance)
        self.num_mixes += 1
        self.counts["mixes"] += 1
        self.counts["models_mixed"] += num_models

    def _report_refusal(self, source: int, refusal: Refusal) -> None:
        """Report a refused message, once for each peer."""
        if source not in self._reported:
            self._reported.add(source)
            self._report(
                f"[rank {self.state.rank}] rejected a message from rank {source}: {refusal.reason}. "
                "Later ones are only counted."
            )
