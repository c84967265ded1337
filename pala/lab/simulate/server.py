"""A parameter server, as in Gorila or A3C: each update sends a gradient up and waits for parameters to come down.

S servers, each on a host of its own, hold a part of the parameters each and apply gradients one after another. Every
update uses all S alike, so one of them is simulated, with a part of the bytes. Gradients do not wait for each other
(asynchronous), so a rank waits only for its own way there and back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from pala.lab.simulate.cluster import Cluster, Link, Prediction
from pala.lab.simulate.costs import Costs


class ServerCluster:
    """Ranks, links and one of the servers on one clock."""

    def __init__(self, cluster: Cluster, costs: Costs, servers: int, seed: int) -> None:
        self.updates, self.busy_s, self.now = 0, 0.0, 0.0
        self._cluster, self._costs, self._servers = cluster, costs, servers
        self._slowness = cluster.slowness(costs.threads)
        self._generator = np.random.default_rng(seed)
        self._hosts_out, self._hosts_in = (
            [Link(cluster.bandwidth_bytes_per_s) for _ in range(cluster.num_hosts)] for _ in range(2)
        )
        self._server_in, self._server_out = (Link(cluster.bandwidth_bytes_per_s) for _ in range(2))
        self._server_free_s = 0.0
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._ticket = 0
        for rank in range(cluster.ranks):
            self._start_update(rank, self._generator.random())

    def run(self, until_updates: int) -> None:
        """Play until all ranks together have made so many updates."""
        while self.updates < until_updates:
            self.now, _, handler, rank = heapq.heappop(self._events)
            handler(rank)

    @property
    def link_bytes(self) -> np.ndarray:
        """Bytes so far in each direction of each host's link and of the server's."""
        links = (*self._hosts_out, *self._hosts_in, self._server_in, self._server_out)
        return np.array([link.carried_bytes(self.now) for link in links])

    def _start_update(self, rank: int, phase: float = 1.0) -> None:
        costs = self._costs
        handling_s = costs.send_s + costs.receive_s
        duration_s = self._slowness[rank] * (float(costs.draw(self._generator.random())) + handling_s) * phase
        self.busy_s += duration_s
        self._at(self.now + duration_s, self._leave, rank)

    def _leave(self, rank: int) -> None:
        """The gradient, to all servers one after another; the first byte is on its way to ours."""
        begin_s, _ = self._hosts_out[self._cluster.host_of(rank)].carry(self.now, self._costs.model_bytes)
        self._at(begin_s + self._cluster.latency_s, self._arrive, rank)

    def _arrive(self, rank: int) -> None:
        _, end_s = self._server_in.carry(self.now, self._costs.model_bytes / self._servers)
        last_sent_s = self.now + self._costs.model_bytes / self._cluster.bandwidth_bytes_per_s
        self._at(max(end_s, last_sent_s), self._apply, rank)

    def _apply(self, rank: int) -> None:
        self._server_free_s = max(self.now, self._server_free_s) + self._costs.apply_s / self._servers
        self._at(self._server_free_s, self._answer, rank)

    def _answer(self, rank: int) -> None:
        begin_s, _ = self._server_out.carry(self.now, self._costs.model_bytes / self._servers)
        self._at(begin_s + self._cluster.latency_s, self._come_down, rank)

    def _come_down(self, rank: int) -> None:
        _, end_s = self._hosts_in[self._cluster.host_of(rank)].carry(self.now, self._costs.model_bytes)
        self._at(end_s, self._finish, rank)

    def _finish(self, rank: int) -> None:
        self.updates += 1
        self._start_update(rank)

    def _at(self, time_s: float, handler: Callable[[int], None], rank: int) -> None:
        heapq.heappush(self._events, (time_s, self._ticket, handler, rank))
        self._ticket += 1


def predict_server(cluster: Cluster, costs: Costs, servers: int, seed: int) -> Prediction:
    """Predict training with so many parameter servers."""
    played = ServerCluster(cluster, costs, servers, seed)
    played.run(cluster.warm_up_updates * cluster.ranks)
    began_s, updates, busy_s, link_bytes = played.now, played.updates, played.busy_s, played.link_bytes
    played.run(cluster.updates_a_rank * cluster.ranks)
    duration_s = played.now - began_s
    per_s = (played.updates - updates) / duration_s
    return Prediction(
        steps_per_s=costs.steps_per_update * per_s,
        wait_share=max(0.0, 1 - (played.busy_s - busy_s) / (cluster.ranks * duration_s)),
        bytes_per_s=2 * costs.model_bytes * per_s,
        busiest_link_bytes_per_s=float(max(played.link_bytes - link_bytes)) / duration_s,
    )
