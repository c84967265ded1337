"""Costs of the protocol itself, apart from copying and sending models: no MPI, no torch, one process.

Each message carries the steps of all ranks (8 bytes a rank), so its cost could grow with the number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import numpy as np

from pala.comm.base import Bytes, Packet, Received, Receiver, Transport
from pala.exchange.budget import StepBudget
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import gossip_sizes
from pala.exchange.gossip.sleeping import NoModels
from pala.exchange.gossip.state import Rules
from pala.exchange.wire import NOTHING, Message, Wire

_BLOCK = 200  # messages that are timed together, at least


def protocol_cost_us(num_ranks: int, *, messages: int = 2000) -> float:
    """Return the CPU time of the protocol's code, in microseconds a model sent; the median over blocks of `messages`.

    Counted, on both sides together: counting the update, choosing the peer and asking the process lock, writing
    header and counters; reading and checking them, merging the counters, the decision to mix; and the same for the
    credit that goes back; all by the driver that training runs. Not counted: the model's own bytes (snapshot, check for
    NaN, sum, mix), and MPI. The ranks, at least two, make their updates in turn, on the random topology, all in this
    process. So with many ranks their objects no longer lie in the caches; a rank in training has its own there, but an
    update between two messages.
    """
    job = _Job(num_ranks)
    rounds_a_block = -(-_BLOCK // num_ranks)
    job.play(rounds_a_block)  # warm
    costs_us = []
    for _ in range(max(3, messages // (rounds_a_block * num_ranks))):
        before, begin = job.num_sent(), time.process_time_ns()
        job.play(rounds_a_block)
        costs_us.append((time.process_time_ns() - begin) / 1e3 / (job.num_sent() - before))
    return statistics.median(costs_us)


class _Job:
    """Ranks between which packets arrive at once."""

    def __init__(self, num_ranks: int) -> None:
        self._post: deque[tuple[int, Received]] = deque()
        self.ranks = [_driver(rank, num_ranks, self._post) for rank in range(num_ranks)]

    def play(self, rounds: int) -> None:
        """Make `rounds` updates of every rank, in turn, and all that follows."""
        for _ in range(rounds):
            for rank in self.ranks:
                rank.finish_update(80, healthy=True)
                rank.advance()
                while self._post:
                    receiver, received = self._post.popleft()
                    self.ranks[receiver].on_message(received)

    def num_sent(self) -> int:
        """Return how many models all ranks have sent."""
        return sum(rank.counts["models_sent"] for rank in self.ranks)


def _driver(rank: int, num_ranks: int, post: deque[tuple[int, Received]]) -> GossipDriver:
    protocol = make_protocol(Rules("random", max_staleness=10, seed=1))
    state = protocol.new_state(StepBudget(rank, num_ranks, budget_steps=1 << 62))
    wire = Wire(num_ranks, 0, signature=1, sizes=gossip_sizes(NOTHING))
    driver = GossipDriver(protocol, state, _Post(rank, post), _EmptyModels(wire))
    driver.start()
    return driver


class _Post(Transport):
    """A transport whose packets lie in one queue until they are brought."""

    def __init__(self, rank: int, post: deque[tuple[int, Received]]) -> None:
        self._rank, self._post = rank, post

    def start(self, receiver: Receiver) -> None:
        pass

    def now_s(self) -> float:
        return time.monotonic()

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        self._post.append((peer, Received(self._rank, packet.data.copy(), bulk, took_s=0.0)))


class _EmptyModels(NoModels):
    """Models that have no parameters are sent, too."""

    def new_snapshot(self) -> Bytes:
        return Bytes(np.zeros(self._wire.most_bytes, np.uint8))

    def fill(self, snapshot: Bytes, message: Message, whole: bool) -> int:
        self._wire.encode(message, snapshot.data)
        return len(snapshot.data)
