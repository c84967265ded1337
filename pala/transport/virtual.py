"""A virtual cluster: the project's own GossipProtocol on a simulated network with a clock of its own.

No MPI, no threads, no torch, no waiting: a heap of events, models that are small vectors, and one random stream. What a
rank does, and in which order, is `gossip.py`; what happens to it (delays, messages that overtake each other,
stragglers, pauses, deaths, poison) is drawn from the seed, so every failure replays.

    cluster = VirtualCluster(Scenario(size=8, topology="ring", max_staleness=3, seed=17))
    cluster.run()
    assert not cluster.stuck and not cluster.violations
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pala.exchange.budget import Stop
from pala.exchange.gossip.protocol import GossipProtocol

Range = tuple[float, float]
Learn = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Scenario:
    """One simulated run. Times are seconds of the virtual clock; a range is drawn from uniformly."""

    size: int
    topology: str = "random"
    mixing: str = "uniform"
    max_staleness: int = 10
    budget_steps: int = 100
    steps_per_update: int = 1
    seed: int = 0
    update_s: Range = (0.8, 1.2)
    """One update, with the environment steps before it."""
    slowness: tuple[float, ...] = ()
    """A factor of `update_s` for each rank; empty: 1 for all."""
    pause_probability: float = 0.0
    """That an update also takes `pause_s`."""
    pause_s: Range = (5.0, 50.0)
    model_s: Range = (0.05, 0.3)
    """A model on its way."""
    control_s: Range = (0.01, 0.1)
    """A credit or a stop on its way; it may overtake a model."""
    wake_s: Range = (0.0, 0.01)
    """Until a waiting rank looks at what has come."""
    again_s: float = 10.0
    """Until a waiting rank sends once more."""
    patience_s: float = 1e9
    """Until a waiting rank goes on, a peer is left out, and a rank that was away takes peers' models for its own. By
    default never: patience would hide a deadlock."""
    send_buffers: int = 2
    """Snapshots that a rank can have on their way."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """When which ranks die."""
    death_notice_s: Range = (0.0, 2.0)
    """Until a peer hears of it."""
    death_loss: float = 0.5
    """Probability that a message on its way from a dying rank is lost; one to it always is."""
    stops: Mapping[int, Range] = field(default_factory=dict)
    """When which ranks are stopped and go on (SIGSTOP, SIGCONT)."""
    cut_s: Range = (0.0, 0.0)
    """When the links are cut between the ranks below `cut_at` and the others; what was sent comes after that."""
    cut_at: int = 0
    poison: Mapping[int, Range] = field(default_factory=dict)
    """Ranks whose every update between these two times makes their model NaN."""
    whole_every: int = 1
    """Of so many sends one carries a whole model. A part heals nobody; in all else it counts here as a model."""


class _Message(NamedTuple):
    kind: str  # model, credit, ask (for a whole model, with the credit), stop
    sender: int
    receiver: int
    weight: float
    local_steps: np.ndarray
    stop: Stop
    model: np.ndarray | None
    buffer: int
    whole: bool
    time_s: float  # when it was sent


class Rank:
    """One virtual rank: its protocol, its model, and what is known of it from outside."""

    def __init__(self, protocol: GossipProtocol, model: np.ndarray, send_buffers: int) -> None:
        self.protocol, self.number, self.model = protocol, protocol.rank, model
        self.clear()
        self.buffers = [0] * send_buffers  # messages on their way from each
        self.waiting = self.ended = self.dead = self.timer_set = False
        self.healthy = True  # its model was finite before this update, so the update was applied
        self.since_mix = 0  # updates since the last mix, counted here and not by the protocol
        self.wait_began_s = 0.0
        self.longest_wait_s = self.waited_since_mix_s = 0.0
        self.inbox_from_s = float("inf")  # when the oldest model in it was sent
        self.oldest_mixed_s = 0.0  # the greatest age of a model when it was mixed
        self.staleness: list[int] = []  # since_mix at the end of each update
        self.updates_after_budget = 0

    def take_in(self, fraction: float) -> None:
        """x <- (1 - fraction) x + fraction * (weighted mean of the inbox)."""
        mean = self.inbox / self.inbox_weight
        self.model = mean if fraction == 1 else self.model + fraction * (mean - self.model)
        self.clear()
        self.since_mix, self.waited_since_mix_s = 0, 0.0

    def clear(self) -> None:
        """Empty the inbox."""
        self.inbox, self.inbox_weight, self.inbox_whole = np.zeros_like(self.model), 0.0, False
        self.inbox_from_s = float("inf")


class VirtualCluster:
    """`scenario.size` ranks on one clock. `run` plays the scenario to its end; the attributes say what happened."""

    def __init__(
        self, scenario: Scenario, models: np.ndarray | None = None, *, learn: Learn | None = None,
        observe: Callable[[VirtualCluster], None] | None = None, protocol: type[GossipProtocol] = GossipProtocol,
    ) -> None:  # fmt: skip
        """`models`: [size, parameters], by default each rank's number; `learn(rank, model)` changes a model in place at
        each update; `observe(self)` is called after each event; `protocol` lets tests plant a bug."""
        s = self.scenario = scenario
        models = np.arange(s.size, dtype=np.float64)[:, None] if models is None else models
        self._learn, self._observe, self._random = learn, observe, random.Random(s.seed)
        self.ranks = [
            Rank(protocol(rank, s.size, topology=s.topology, mixing=s.mixing, max_staleness=s.max_staleness,
                          budget_steps=s.budget_steps, seed=s.seed, whole_every=s.whole_every, again_s=s.again_s,
                          patience_s=s.patience_s),
                 models[rank].copy(), s.send_buffers)
            for rank in range(s.size)
        ]  # fmt: skip
        self.now, self.global_steps = 0.0, 0
        self.models_sent = self.models_refused = self.models_stale = self.mixes = 0
        self.lost_weight = 0.0  # push-sum weight that the dead took with them
        self.violations: list[str] = []  # of the process lock, the staleness bound, or of what may heal
        self.all_well_from_s = float("inf")  # from then on no patience should have to end
        self.budget_met_s = self.budget_known_s = float("inf")  # in truth; by the first rank
        self.unseen_steps: list[int] = []  # when the budget was met, steps that each rank did not know of
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = 0
        self._on_their_way: dict[int, _Message] = {}
        self._not_taken_in: set[tuple[int, int]] = set()
        for rank in self.ranks:
            rank.protocol.clock(self.now)
            rank.protocol.take()  # the first update begins
            self._start_update(rank)
        for number, time_s in s.deaths.items():
            self._at(time_s, self._die, self.ranks[number])

    @property
    def num_events(self) -> int:
        """Events that were ever to happen."""
        return self._ticket

    def run(self, until_s: float = float("inf")) -> None:
        """Play until nothing more happens, or to a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, handler, arguments = heapq.heappop(self._events)
            handler(*arguments)
            if self._observe is not None:
                self._observe(self)

    @property
    def living(self) -> list[Rank]:
        """Ranks that did not die."""
        return [rank for rank in self.ranks if not rank.dead]

    @property
    def stuck(self) -> list[int]:
        """After `run`: ranks that neither ended nor died. They wait for ever: a deadlock."""
        return [rank.number for rank in self.living if not rank.ended]

    @property
    def overshoot_steps(self) -> int:
        """Steps made by all ranks beyond the budget."""
        return self.global_steps - self.scenario.budget_steps

    @property
    def total_weight(self) -> float:
        """Sum of the push-sum weights of the living, in their inboxes and on the way."""
        held = sum(rank.protocol.weight + rank.inbox_weight for rank in self.ranks if not rank.dead)
        return held + sum(message.weight for message in self._on_their_way.values())

    @property
    def weighted_sum(self) -> np.ndarray:
        """Sum of weight times model, of the same."""
        held = [rank.protocol.weight * rank.model + rank.inbox for rank in self.living]
        on_the_way = [m.weight * m.model for m in self._on_their_way.values() if m.model is not None]
        return np.sum(held + on_the_way, axis=0)

    # ---- a rank, in the order of gossip.py -----------------------------------------------------------------------

    def _start_update(self, rank: Rank) -> None:
        s = self.scenario
        factor = s.slowness[rank.number] if s.slowness else 1.0
        pause_s = self._draw(s.pause_s) if self._random.random() < s.pause_probability else 0.0
        self._at(self.now + self._draw(s.update_s) * factor + pause_s, self._finish_update, rank)

    def _finish_update(self, rank: Rank) -> None:
        if rank.dead or self._is_stopped(rank, self._finish_update, rank):
            return
        rank.healthy = bool(np.isfinite(rank.model).all())
        if rank.healthy and self._learn is not None:
            self._learn(rank.number, rank.model)
        begin_s, end_s = self.scenario.poison.get(rank.number, (0.0, 0.0))
        if begin_s <= self.now < end_s:
            rank.model[:] = np.nan
        rank.protocol.clock(self.now)
        rank.protocol.update_finished(self.scenario.steps_per_update, rank.healthy)
        self._count_update(rank)
        self._tell_stop(rank)
        self._send_owed(rank)
        rank.waiting, rank.wait_began_s = True, self.now
        self._go_on_or_wait(rank)

    def _go_on_or_wait(self, rank: Rank) -> None:
        p = rank.protocol
        for sender in p.drop_parts():
            rank.clear()
            self._return_credit(rank, sender, "ask")
        p.clock(self.now)
        if p.must_wait:
            self._set_timer(rank)
            return
        rank.waiting = False
        waited_s = self.now - rank.wait_began_s
        rank.longest_wait_s = max(rank.longest_wait_s, waited_s)
        rank.waited_since_mix_s = max(rank.waited_since_mix_s, waited_s)
        oldest_s, had_model = self.now - rank.inbox_from_s, p.has_model
        if (mix := p.take()) is not None:
            if not had_model and not rank.inbox_whole:
                self.violations.append(f"rank {rank.number} was healed by a part of a model at {self.now} s")
            rank.oldest_mixed_s = max(rank.oldest_mixed_s, oldest_s)
            rank.take_in(mix.fraction)
            self.mixes += 1
            for sender in mix.senders:
                self._return_credit(rank, sender)
        if p.stop is Stop.NONE:
            self._start_update(rank)
        else:
            rank.ended = True

    def _wake(self, rank: Rank) -> None:
        if not rank.waiting or rank.dead or self._is_stopped(rank, self._wake, rank):
            return
        rank.protocol.clock(self.now)
        self._send_owed(rank)
        self._go_on_or_wait(rank)

    def _timer_rang(self, rank: Rank, wait_began_s: float) -> None:
        """Without patience the timer is set again only if something came of it: a deadlock ends the simulation."""
        if rank.dead or self._is_stopped(rank, self._timer_rang, rank, wait_began_s):
            return
        rank.timer_set, sent = False, self.models_sent
        self._wake(rank)
        something_came = self.models_sent > sent or rank.wait_began_s > wait_began_s
        if rank.waiting and (something_came or self.scenario.patience_s < 1e9):
            self._set_timer(rank)

    def _is_stopped(self, rank: Rank, handler: Callable[..., None], *arguments: Any) -> bool:
        """If the rank is stopped now, this happens when it goes on."""
        begin_s, end_s = self.scenario.stops.get(rank.number, (0.0, 0.0))
        if stopped := begin_s <= self.now < end_s:
            self._at(end_s, handler, *arguments)
        return stopped

    def _send_owed(self, rank: Rank) -> None:
        peers = rank.protocol.sendable()
        buffer = next((i for i, messages in enumerate(rank.buffers) if messages == 0), None)
        if not peers or buffer is None:
            return
        whole, weight, snapshot = rank.protocol.whole_is_due(peers), rank.protocol.sent(peers), rank.model.copy()
        rank.buffers[buffer] = len(peers)
        self.models_sent += len(peers)
        for peer in peers:
            if (rank.number, peer) in self._not_taken_in:
                self.violations.append(
                    f"process lock: at {self.now} s rank {rank.number} sent to {peer}, which holds its last model"
                )
            self._not_taken_in.add((rank.number, peer))
            self._post(rank, peer, "model", weight, snapshot, buffer, whole)

    def _return_credit(self, rank: Rank, peer: int, kind: str = "credit") -> None:
        self._not_taken_in.discard((peer, rank.number))
        self._post(rank, peer, kind)

    def _tell_stop(self, rank: Rank) -> None:
        for peer in rank.protocol.tell_stop():
            self._post(rank, peer, "stop")

    # ---- the network ---------------------------------------------------------------------------------------------

    def _post(
        self, rank: Rank, peer: int, kind: str, weight: float = 0.0, model: np.ndarray | None = None, buffer: int = -1,
        whole: bool = True,
    ) -> None:  # fmt: skip
        p, ticket = rank.protocol, self._ticket
        self._on_their_way[ticket] = _Message(
            kind, rank.number, peer, weight, p.local_steps.copy(), p.stop, model, buffer, whole, self.now
        )
        self._carry(ticket)

    def _carry(self, ticket: int) -> None:
        """See to it that the message is delivered. `pala.simulate` models a network here."""
        is_model = self._on_their_way[ticket].model is not None
        self._after(self.scenario.model_s if is_model else self.scenario.control_s, self._deliver, ticket)

    def _deliver(self, ticket: int) -> None:
        message = self._on_their_way.get(ticket)
        if message is None:  # lost with its sender
            return
        sender, rank = self.ranks[message.sender], self.ranks[message.receiver]
        begin_s, end_s = self.scenario.cut_s
        if begin_s <= self.now < end_s and len({n < self.scenario.cut_at for n in message[1:3]}) == 2:
            if ticket % 2:  # not even its announcement has come: nobody can tell how old it will be
                self._on_their_way[ticket] = message._replace(time_s=end_s)
            self._at(end_s + self._draw(self.scenario.control_s), self._deliver, ticket)
            return
        if self._is_stopped(rank, self._deliver, ticket):
            return
        if message.model is not None and ticket % 2 and self._is_stopped(sender, self._deliver, ticket):
            return  # some messages need their sender to the end, some do not
        del self._on_their_way[ticket]
        if message.buffer >= 0:
            sender.buffers[message.buffer] -= 1
            self._wake_soon(sender)
        if rank.dead:
            self.lost_weight += message.weight
            return
        rank.protocol.news(message.local_steps, message.stop)
        if message.kind in ("credit", "ask"):
            rank.protocol.credit_returned(message.sender, wants_whole=message.kind == "ask")
        elif message.model is not None:
            self._receive_model(rank, message, message.model)
        self._tell_stop(rank)
        self._notice_budget(rank)
        self._wake_soon(rank)

    def _receive_model(self, rank: Rank, message: _Message, model: np.ndarray) -> None:
        began_s = self.scenario.stops.get(rank.number, (0.0, 0.0))[1]  # of the receiving: not while it was stopped
        took_s = self.now - (began_s if message.time_s < began_s <= self.now else message.time_s)
        if rank.protocol.is_stale(message.sender, took_s):
            self.models_stale += 1
            rank.protocol.model_refused(message.weight)
            self._return_credit(rank, message.sender, "credit" if rank.protocol.has_model else "ask")
        elif np.isfinite(model).all():
            rank.inbox_from_s = min(rank.inbox_from_s, message.time_s)
            weight = rank.protocol.model_received(message.sender, message.weight, message.whole)
            rank.inbox += weight * model
            rank.inbox_weight += weight
            rank.inbox_whole |= message.whole
        else:
            self.models_refused += 1
            rank.protocol.model_refused(message.weight)
            self._return_credit(rank, message.sender)

    def _die(self, rank: Rank) -> None:
        rank.dead = True
        self.lost_weight += rank.protocol.weight + rank.inbox_weight
        for ticket, message in list(self._on_their_way.items()):
            if message.sender == rank.number and self._random.random() < self.scenario.death_loss:
                self.lost_weight += message.weight
                del self._on_their_way[ticket]
        for peer in self.living:
            self._after(self.scenario.death_notice_s, self._hear_of_death, peer, rank.number)

    def _hear_of_death(self, rank: Rank, dead: int) -> None:
        if not rank.dead:
            rank.protocol.peer_died(dead)
            self._tell_stop(rank)
            self._wake_soon(rank)

    # ---- clock and counts ----------------------------------------------------------------------------------------

    def _draw(self, bounds: Range) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * self._random.random()

    def _at(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, self._ticket, handler, arguments))
        self._ticket += 1

    def _after(self, delay_s: Range, handler: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + self._draw(delay_s), handler, *arguments)

    def _wake_soon(self, rank: Rank) -> None:
        if rank.waiting:
            self._after(self.scenario.wake_s, self._wake, rank)

    def _set_timer(self, rank: Rank) -> None:
        if not rank.timer_set:
            rank.timer_set = True
            self._at(self.now + 1.001 * self.scenario.again_s, self._timer_rang, rank, rank.wait_began_s)

    def _count_update(self, rank: Rank) -> None:
        rank.since_mix += len(rank.protocol.living) > 1
        rank.staleness.append(rank.since_mix)
        alone = len(rank.protocol.living) == 1
        if (
            rank.since_mix > self.scenario.max_staleness + 1
            and not alone
            and (rank.waited_since_mix_s < self.scenario.patience_s or self.now > self.all_well_from_s)
        ):
            self.violations.append(
                f"staleness: at {self.now} s rank {rank.number} made {rank.since_mix} updates on its own"
            )
        rank.updates_after_budget += self.global_steps >= self.scenario.budget_steps
        self.global_steps += self.scenario.steps_per_update
        if self.overshoot_steps >= 0 and not self.unseen_steps:
            self.budget_met_s = self.now
            self.unseen_steps = [self.scenario.budget_steps - r.protocol.global_steps for r in self.ranks]
        self._notice_budget(rank)

    def _notice_budget(self, rank: Rank) -> None:
        if rank.protocol.stop is not Stop.NONE:
            self.budget_known_s = min(self.budget_known_s, self.now)
