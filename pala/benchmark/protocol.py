"""What the protocol itself costs, apart from copying and sending models: no MPI, no torch work, one process.

Each message carries the steps of all ranks (8 bytes a rank), so its cost could grow with the number of ranks.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.wire import NOTHING, Kind, Message, Refusal, Wire, gossip_sizes

_BLOCK = 200  # messages that are timed together, at least


def protocol_cost_us(num_ranks: int, messages: int = 2000) -> float:
    """CPU time of the protocol's code, in microseconds a model sent; the median over blocks of `messages`.

    Counted, on both sides together: counting the update, choosing the peer and asking the process lock, writing
    header and counters; reading and checking them, merging the counters, the decision to mix; and the same for the
    credit that goes back. Not counted: the model's own bytes (snapshot, check for NaN, sum, mix), MPI, threads and
    their lock. All `num_ranks` ranks make their rounds in step, on the random topology, with all objects of all
    ranks (at least two) in this process; caches are warmer than in training, where an update lies between two messages.
    """
    ranks = [_Rank(rank, num_ranks) for rank in range(num_ranks)]
    rounds_a_block = -(-_BLOCK // num_ranks)
    _play(ranks, rounds_a_block)  # warm
    costs_us = []
    for _ in range(max(3, messages // (rounds_a_block * num_ranks))):
        begin = time.process_time_ns()
        num_sent = _play(ranks, rounds_a_block)
        costs_us.append((time.process_time_ns() - begin) / 1e3 / num_sent)
    return statistics.median(costs_us)


class _Rank:
    """One rank's protocol and message buffer, with what `gossip.py` does to them."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.protocol = GossipProtocol(
            rank, num_ranks, topology="random", mixing="uniform", max_staleness=10, budget_steps=1 << 62, seed=1
        )
        self._wire = Wire(num_ranks, 0, signature=1, sizes=gossip_sizes(NOTHING))  # models without parameters
        self._bytes = np.zeros(self._wire.most_bytes, np.uint8)

    def update(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The peers that get a model after this update, and its header."""
        p = self.protocol
        p.clock(time.monotonic())
        p.update_finished(80)
        p.tell_stop()
        peers = p.sendable()
        return peers, self._encode(Kind.MODEL, p.sent(peers))

    def receive(self, data: np.ndarray) -> None:
        """What the data proxy's thread does with a message."""
        p, message = self.protocol, self._wire.decode(data)
        assert not isinstance(message, Refusal), message
        p.news(message.local_steps, message.stop)
        if message.kind is Kind.CREDIT:
            p.credit_returned(message.sender)
        else:
            p.model_received(message.sender, message.weight)
        p.tell_stop()

    def mix(self) -> list[tuple[int, np.ndarray]]:
        """The credits that go back after the mix, if one is due: (peer, message)."""
        p = self.protocol
        mix = None if p.must_wait else p.take()
        return [(sender, self._encode(Kind.CREDIT, 1.0)) for sender in mix.senders] if mix else []

    def _encode(self, kind: Kind, weight: float) -> np.ndarray:
        p = self.protocol
        self._wire.encode(Message(kind, p.rank, p.round, weight, p.stop, p.local_steps), self._bytes)
        return self._bytes


def _play(ranks: list[_Rank], rounds: int) -> int:
    """Every rank makes `rounds` updates, all in step. Returns the number of models sent."""
    num_sent = 0
    for _ in range(rounds):
        for rank in ranks:
            peers, data = rank.update()
            num_sent += len(peers)
            for peer in peers:
                ranks[peer].receive(data)
        for rank in ranks:
            for peer, data in rank.mix():
                ranks[peer].receive(data)
    return num_sent
