"""A virtual cluster: the project's own GossipProtocol on a simulated network with a clock of its own.

No MPI, no threads, no torch, no waiting: a heap of events, a model that is a small vector, and one random stream. The
order of what a rank does is that of `gossip.py`; what the network does to it (delays, messages that overtake each
other, stragglers, pauses, deaths, poison) is drawn from the seed, so that every failure replays. Thousands of
schedules run in a minute on one core.

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

from pala.exchange.protocol import GossipProtocol, Stop

Range = tuple[float, float]


@dataclass(frozen=True)
class Scenario:
    """One simulated run. Times are seconds of the virtual clock; a range is drawn from uniformly."""

    size: int
    """Ranks."""
    topology: str = "random"
    """As in the configuration, like the next four."""
    mixing: str = "uniform"
    max_staleness: int = 10
    budget_steps: int = 100
    seed: int = 0
    steps_per_update: int = 1
    """Environment steps of one rank between two updates."""
    update_s: Range = (0.8, 1.2)
    """From the end of one exchange to the next update."""
    slowness: tuple[float, ...] = ()
    """A factor of `update_s` for each rank; empty: 1 for all."""
    pause_probability: float = 0.0
    """That an update also takes `pause_s` (a checkpoint, a swapped process)."""
    pause_s: Range = (5.0, 50.0)
    model_s: Range = (0.05, 0.3)
    """A model on its way."""
    control_s: Range = (0.01, 0.1)
    """A credit or a stop on its way; it may overtake a model."""
    wake_s: Range = (0.0, 0.01)
    """Until a waiting rank looks at what has come."""
    long_wait_s: float = 10.0
    """After this long a waiting rank sends once more."""
    send_buffers: int = 2
    """Snapshots that a rank can have under way."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """When ranks die."""
    death_notice_s: Range = (0.0, 2.0)
    """Until a peer hears of it."""
    death_loss: float = 0.5
    """Probability that a message under way from a dying rank is lost; those to it always are."""
    poison: Mapping[int, Range] = field(default_factory=dict)
    """Ranks whose every update between these times makes their model NaN."""


class _Message(NamedTuple):
    kind: str  # model, credit, stop
    sender: int
    receiver: int
    weight: float
    local_steps: np.ndarray
    stop: Stop
    model: np.ndarray | None
    buffer: int


class Rank:
    """One virtual rank: its protocol, its model, and what tests ask about it."""

    def __init__(self, protocol: GossipProtocol, model: np.ndarray, send_buffers: int) -> None:
        self.protocol, self.model = protocol, model
        self.inbox, self.inbox_weight = np.zeros_like(model), 0.0
        self.buffers = [0] * send_buffers  # messages under way from each
        self.healthy = True  # its model is finite, as far as its learner knows
        self.waiting = self.ended = self.dead = self.timer_set = False
        self.since_mix = 0  # updates since the last mix while there were peers, counted here and not by the protocol
        self.staleness: list[int] = []  # since_mix at the end of each update
        self.updates_after_budget = 0


class VirtualCluster:
    """`scenario.size` ranks on one clock. `run` plays the scenario to its end; the attributes tell what happened."""

    def __init__(
        self, scenario: Scenario, models: np.ndarray | None = None, learn: Callable[[int, np.ndarray], None] | None = None,
        observe: Callable[[VirtualCluster], None] | None = None, protocol: Callable[..., GossipProtocol] = GossipProtocol,
    ) -> None:  # fmt: skip
        """`models`: [size, parameters], by default each rank's number; `learn(rank, model)` changes a model in place at
        each update; `observe(self)` is called after every event; `protocol` lets tests plant a bug."""
        s = self.scenario = scenario
        models = np.arange(s.size, dtype=np.float64)[:, None] if models is None else models
        self._learn, self._observe, self._random = learn, observe, random.Random(s.seed)
        self.ranks = [
            Rank(protocol(rank, s.size, topology=s.topology, mixing=s.mixing, max_staleness=s.max_staleness,
                          budget_steps=s.budget_steps, seed=s.seed), models[rank].copy(), s.send_buffers)
            for rank in range(s.size)
        ]  # fmt: skip
        self.now, self.num_events, self.global_steps = 0.0, 0, 0
        self.lost_weight = 0.0  # push-sum weight that the dead took with them
        self.num_sent = self.num_mixed = self.num_refused = 0
        self.violations: list[str] = []
        self.budget_met_s = self.budget_known_s = float("inf")
        self.unseen_steps: list[int] = []  # of each rank, of the budget, when the budget was met
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._under_way: dict[int, _Message] = {}
        self._not_taken_in: set[tuple[int, int]] = set()
        for rank in range(s.size):
            self._start_update(rank)
        for rank, time_s in s.deaths.items():
            self._after((time_s, time_s), self._die, rank)

    def run(self, until_s: float = float("inf")) -> None:
        """Play until nothing more happens, or to a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, handler, arguments = heapq.heappop(self._events)
            handler(*arguments)
            if self._observe is not None:
                self._observe(self)

    # ---- what tests ask ------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Rank]:
        """Ranks that did not die."""
        return [rank for rank in self.ranks if not rank.dead]

    @property
    def stuck(self) -> list[int]:
        """After `run`: ranks that neither ended nor died. They wait for ever: a deadlock."""
        return [i for i, rank in enumerate(self.ranks) if not (rank.ended or rank.dead)]

    @property
    def models(self) -> np.ndarray:
        """[living ranks, parameters]."""
        return np.stack([rank.model for rank in self.living])

    @property
    def overshoot_steps(self) -> int:
        """Steps made by all ranks beyond the budget."""
        return self.global_steps - self.scenario.budget_steps

    def push_sum(self) -> tuple[float, np.ndarray]:
        """Sum of the weights, and of weight times model, of the living, in inboxes and under way."""
        models = [message for message in self._under_way.values() if message.model is not None]
        weight = sum(r.protocol.weight + r.inbox_weight for r in self.living) + sum(m.weight for m in models)
        product = sum((r.protocol.weight * r.model + r.inbox for r in self.living), np.zeros(()))
        return weight, product + sum((m.weight * m.model for m in models), np.zeros(()))

    # ---- a rank, in the order of gossip.py -----------------------------------------------------------------------

    def _start_update(self, number: int) -> None:
        s = self.scenario
        factor = s.slowness[number] if s.slowness else 1.0
        pause_s = self._draw(s.pause_s) if self._random.random() < s.pause_probability else 0.0
        self._at(self.now + self._draw(s.update_s) * factor + pause_s, self._finish_update, number)

    def _finish_update(self, number: int) -> None:
        rank, s = self.ranks[number], self.scenario
        if rank.dead:
            return
        rank.healthy = bool(np.isfinite(rank.model).all())  # a learner with NaN leaves out its update, and knows
        if rank.healthy and self._learn is not None:
            self._learn(number, rank.model)
        begin_s, end_s = s.poison.get(number, (0.0, 0.0))
        if begin_s <= self.now < end_s:
            rank.model[:] = np.nan
        rank.protocol.update_finished(s.steps_per_update)
        self._count_update(rank)
        self._tell_stop(rank)
        self._send_owed(rank)
        rank.waiting = True
        self._go_on(rank)

    def _wake(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.waiting and not rank.dead:
            self._send_owed(rank)
            self._go_on(rank)

    def _set_timer(self, rank: Rank) -> None:
        if not rank.timer_set:
            rank.timer_set = True
            self._at(self.now + self.scenario.long_wait_s, self._timer_rang, rank.protocol.rank, len(rank.staleness))

    def _timer_rang(self, number: int, update: int) -> None:
        """Send once more, if still the same update waits. Only if that did something the timer is set again."""
        rank = self.ranks[number]
        rank.timer_set = False
        if rank.dead or not rank.waiting:
            return
        sent = self.num_sent
        if update == len(rank.staleness):
            rank.protocol.waited_long()
            self._send_owed(rank)
        if update != len(rank.staleness) or self.num_sent > sent:
            self._set_timer(rank)

    def _go_on(self, rank: Rank) -> None:
        p = rank.protocol
        if p.must_wait if rank.healthy else p.must_wait_to_heal:
            self._set_timer(rank)
            return
        rank.waiting = False
        self._mix(rank)
        if rank.protocol.stop is Stop.NONE:
            self._start_update(rank.protocol.rank)
        else:
            rank.ended = True

    def _mix(self, rank: Rank) -> None:
        mix = rank.protocol.take(rank.healthy)
        if mix is None:
            return
        mean = rank.inbox / rank.inbox_weight
        rank.model = mean if mix.fraction == 1 else rank.model + mix.fraction * (mean - rank.model)
        rank.inbox, rank.inbox_weight = np.zeros_like(mean), 0.0
        rank.since_mix = 0
        self.num_mixed += 1
        for sender in mix.senders:
            self._return_credit(rank, sender)

    def _send_owed(self, rank: Rank) -> None:
        peers = rank.protocol.sendable() if rank.healthy else ()
        buffer = next((i for i, pending in enumerate(rank.buffers) if pending == 0), None)
        if not peers or buffer is None:
            return
        weight, snapshot = rank.protocol.sent(peers), rank.model.copy()
        rank.buffers[buffer] = len(peers)
        for peer in peers:
            pair = (rank.protocol.rank, peer)
            if pair in self._not_taken_in:
                self.violations.append(f"{self.now:.3f} s: rank {pair[0]} sent to {peer}, which holds its last model")
            self._not_taken_in.add(pair)
            self._post(rank, peer, "model", weight, snapshot, buffer)
        self.num_sent += len(peers)

    def _tell_stop(self, rank: Rank) -> None:
        for peer in rank.protocol.tell_stop():
            self._post(rank, peer, "stop")

    def _return_credit(self, rank: Rank, peer: int) -> None:
        self._not_taken_in.discard((peer, rank.protocol.rank))
        self._post(rank, peer, "credit")

    # ---- the network ---------------------------------------------------------------------------------------------

    def _post(
        self, rank: Rank, peer: int, kind: str, weight: float = 1.0, model: np.ndarray | None = None, buffer: int = -1
    ) -> None:
        p = rank.protocol
        self.num_events += 1
        number = self.num_events
        self._under_way[number] = _Message(kind, p.rank, peer, weight, p.local_steps.copy(), p.stop, model, buffer)
        self._after(self.scenario.control_s if model is None else self.scenario.model_s, self._deliver, number)

    def _deliver(self, number: int) -> None:
        message = self._under_way.pop(number, None)
        if message is None:  # lost with its sender
            return
        sender, rank = self.ranks[message.sender], self.ranks[message.receiver]
        if message.buffer >= 0:
            sender.buffers[message.buffer] -= 1
            self._wake_soon(sender)
        if rank.dead:
            self.lost_weight += message.weight if message.model is not None else 0.0
            return
        rank.protocol.news(message.local_steps, message.stop)
        if message.kind == "credit":
            rank.protocol.credit_returned(message.sender)
        elif message.model is not None:
            self._receive_model(rank, message, message.model)
        self._tell_stop(rank)
        self._notice_budget(rank)
        self._wake_soon(rank)

    def _receive_model(self, rank: Rank, message: _Message, model: np.ndarray) -> None:
        if np.isfinite(model).all():
            weight = rank.protocol.model_received(message.sender, message.weight)
            rank.inbox += weight * model
            rank.inbox_weight += weight
        else:
            self.num_refused += 1
            rank.protocol.model_refused(message.weight)
            self._return_credit(rank, message.sender)

    def _die(self, number: int) -> None:
        rank = self.ranks[number]
        rank.dead = True
        self.lost_weight += rank.protocol.weight + rank.inbox_weight
        for key, message in list(self._under_way.items()):
            if message.sender == number and self._random.random() < self.scenario.death_loss:
                self.lost_weight += message.weight if message.model is not None else 0.0
                del self._under_way[key]
        for peer in range(self.scenario.size):
            self._after(self.scenario.death_notice_s, self._hear_of_death, peer, number)

    def _hear_of_death(self, number: int, dead: int) -> None:
        rank = self.ranks[number]
        if not rank.dead:
            rank.protocol.peer_died(dead)
            self._tell_stop(rank)
            self._wake_soon(rank)

    # ---- clock and counts ----------------------------------------------------------------------------------------

    def _draw(self, bounds: Range) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * self._random.random()

    def _at(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (time_s, self.num_events, handler, arguments))

    def _after(self, delay_s: Range, handler: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + self._draw(delay_s), handler, *arguments)

    def _wake_soon(self, rank: Rank) -> None:
        if rank.waiting:
            self._after(self.scenario.wake_s, self._wake, rank.protocol.rank)

    def _count_update(self, rank: Rank) -> None:
        rank.since_mix += len(rank.protocol.living) > 1
        rank.staleness.append(rank.since_mix)
        rank.updates_after_budget += self.budget_met_s < float("inf")
        self.global_steps += self.scenario.steps_per_update
        if self.overshoot_steps >= 0 and not self.unseen_steps:
            self.budget_met_s = self.now
            self.unseen_steps = [self.scenario.budget_steps - r.protocol.global_steps for r in self.ranks]
        self._notice_budget(rank)

    def _notice_budget(self, rank: Rank) -> None:
        if rank.protocol.stop is not Stop.NONE:
            self.budget_known_s = min(self.budget_known_s, self.now)
