"""The machines that a prediction is for, and gossip on them with modelled times.

It is the virtual cluster, whose ranks run the protocol that training runs, on links and cores.

A model between two hosts goes as MPI sends what is long: the receiver must see an announcement, and the sender its
answer, before the bytes leave. Every rank looks at its messages between two steps of its environments and after an
update, as in `data_proxy.py`, or at once while it waits; it receives one model at a time. Between ranks of one host the
receiver copies. Processor time of messages is added to the rank's next update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pala.exchange.gossip.state import Rules
from pala.lab.simulate.costs import Costs, control_bytes
from pala.lab.simulate.scenario import Scenario
from pala.lab.simulate.virtual_cluster import Rank, VirtualCluster

_TIME_UNTIL_STEADY = 0.25  # of a simulated run
_MOST_UPDATES = 100_000
_LEAST_UPDATES_A_RANK = 32
_MOST_UPDATES_A_RANK = 400


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, one after the other, with cores of their own; a host has one full-duplex link for all."""

    ranks: int
    ranks_per_host: int = 16
    latency_s: float = 50e-6
    """From one host to another, for a message of no length."""
    bandwidth_bytes_per_s: float = 1.25e9
    """Bandwidth of a link, in each direction."""
    straggler: float = 1.0
    """Factor by which an update of rank 0 takes longer."""

    @property
    def num_hosts(self) -> int:
        """The number of hosts; the last may have fewer ranks."""
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.ranks_per_host

    @property
    def slowness(self) -> list[float]:
        """A factor of the times of each rank."""
        return [self.straggler] + [1.0] * (self.ranks - 1)

    @property
    def updates_a_rank(self) -> int:
        """The number that is simulated of a rank that never waits: fewer, the more ranks there are."""
        return max(_LEAST_UPDATES_A_RANK, min(_MOST_UPDATES_A_RANK, _MOST_UPDATES // self.ranks))

    @property
    def warm_up_updates(self) -> int:
        """The number of those updates that are not counted."""
        return round(_TIME_UNTIL_STEADY * self.updates_a_rank)


@dataclass(frozen=True)
class Prediction:
    """Prediction of one method on one cluster. None: not defined for it, or not simulated."""

    steps_per_s: float
    """Environment steps of all ranks."""
    wait_share: float
    """Share of a rank's time in which it neither plays, learns nor handles messages; mean over ranks."""
    bytes_per_s: float
    """Sent, by all ranks together, whether or not they leave the host."""
    busiest_link_bytes_per_s: float
    """The most that a host's link carries in one direction."""
    models_an_update: float | None = None
    """Sent."""
    distance: float | None = None
    """Root mean square over ranks and time of the distance to the ranks' mean, in lengths of one update's step, where
    steps are random and independent: multiply by a measured length."""
    distance_grows: bool = False
    """It was still growing, so in a longer run it is larger."""


class Link:
    """One direction of a host's link: messages one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._bytes = 0.0  # of all messages so far

    def carry(self, now_s: float, num_bytes: float) -> tuple[float, float]:
        """Return when the first byte of a message goes through and when the last, if it is there from `now_s` on.
        Calls come in the order of time."""
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + num_bytes / self._bytes_per_s
        self._bytes += num_bytes
        return begin_s, self._free_s

    def carried_bytes(self, now_s: float) -> float:
        """Return the bytes that have gone through, without those that still wait."""
        waiting_s = self._free_s - now_s
        return self._bytes - waiting_s * self._bytes_per_s if waiting_s > 0 else self._bytes


_DIMENSION = 64  # of the models: the more, the less the distances scatter
_LOOKS_AT_DISTANCE = 40
_GROWING = 1.1  # the second half's distance over the first's
_HURRY_S = 0.0003  # a waiting rank looks for messages this often (`data_proxy.py`)


# ---- gossip ----------------------------------------------------------------------------------------------------------


class GossipCluster(VirtualCluster):
    """A virtual cluster whose delays come from links, cores and measured costs. Training has no end here."""

    def __init__(self, cluster: Cluster, costs: Costs, topology: str, seed: int) -> None:
        """Let ranks begin spread over an update, as they are after many."""
        self.costs, self._cluster = costs, cluster
        self.slowness = cluster.slowness
        self._control_bytes = control_bytes(cluster.ranks)
        self._protocol_s = costs.protocol_s[0] / 2 + costs.protocol_s[1] / 2 * cluster.ranks  # on one side
        self._links_out = [Link(cluster.bandwidth_bytes_per_s) for _ in range(cluster.num_hosts)]
        self._links_in = [Link(cluster.bandwidth_bytes_per_s) for _ in range(cluster.num_hosts)]
        self._began_s, self._ends_s = [0.0] * cluster.ranks, [0.0] * cluster.ranks
        self._owed_s = [0.0] * cluster.ranks  # processor time of messages that the next update has to pay
        self._waited_s = 0.0
        self._announced: list[deque[int]] = [deque() for _ in range(cluster.ranks)]  # the first is being received
        self.bytes_sent = 0
        self._generator = np.random.default_rng(seed)
        self._phases = self._generator.random(cluster.ranks)
        scenario = Scenario(
            cluster.ranks,
            topology,
            costs.mixing,
            costs.max_staleness,
            budget_steps=1 << 62,
            steps_per_update=costs.steps_per_update,
            seed=seed,
            wake_s=(0.0, _HURRY_S),
            again_s=Rules.again_s,
            patience_s=costs.patience_s,
        )
        super().__init__(scenario, np.zeros((cluster.ranks, _DIMENSION)), self._step_at_random)

    # ---- what is seen from outside ---------------------------------------------------------------------------------

    @property
    def updates(self) -> float:
        """Updates of all ranks so far, with the parts that are done of those under way."""
        done = (
            min(1.0, (self.now - b) / (e - b)) if e > b else 1.0
            for b, e in zip(self._began_s, self._ends_s, strict=True)
        )
        under_way = sum(part for part, rank in zip(done, self.ranks, strict=True) if not rank.waiting)
        return self.global_steps / self.costs.steps_per_update + under_way

    @property
    def waited_s(self) -> float:
        """Seconds that all ranks have waited up to now."""
        waiting = (self.now - self._ends_s[rank.number] for rank in self.ranks if rank.waiting)
        return self._waited_s + sum(waiting)

    @property
    def link_bytes(self) -> np.ndarray:
        """Bytes so far in each direction of each host's link."""
        return np.array([link.carried_bytes(self.now) for link in self._links_out + self._links_in])

    @property
    def squared_distance(self) -> float:
        """Squared distance to the mean of all ranks' models, mean over ranks, in mean squares of an update's step."""
        models = np.array([rank.model for rank in self.ranks])
        return float(np.mean(np.sum((models - models.mean(axis=0)) ** 2, axis=1)))

    def play_until(self, time_s: float) -> None:
        """Play as `run` does; the clock then shows that time."""
        self.run(time_s)
        self.now = time_s

    # ---- a rank's processor ----------------------------------------------------------------------------------------

    def _step_at_random(self, rank: int, model: np.ndarray) -> None:
        model += self._generator.standard_normal(_DIMENSION) / np.sqrt(_DIMENSION)

    def _start_update(self, rank: Rank) -> None:
        number = rank.number
        owed_s, self._owed_s[number] = self._owed_s[number], 0.0
        if rank.has_mixed:
            owed_s += self.costs.mix_s
        self._waited_s += self.now - self._ends_s[number]
        duration_s = self.slowness[number] * (float(self.costs.draw(self._generator.random())) + owed_s)
        self._began_s[number] = self.now - (1 - self._phases[number]) * duration_s
        self._phases[number] = 1.0
        self._ends_s[number] = self._began_s[number] + duration_s
        self._at(self._ends_s[number], self._finish_update, rank)

    def _at_poll(self, number: int, time_s: float, handler: Callable[[int], None], ticket: int) -> None:
        """Do it when that rank next looks at its messages, from `time_s` on."""
        waits = self.ranks[number].waiting
        if time_s > (self.now + _HURRY_S if waits else self._ends_s[number]):
            self._at(time_s, self._at_poll, number, time_s, handler, ticket)  # ask again then
        elif waits:
            self._at(self.now + _HURRY_S, handler, ticket)
        else:
            begin_s, end_s = self._began_s[number], self._ends_s[number]
            acting_s = self.costs.acting_share * (end_s - begin_s)
            step = np.ceil((time_s - begin_s) / acting_s * self.costs.rollout_steps)
            after_step = step <= self.costs.rollout_steps
            poll_s = begin_s + step / self.costs.rollout_steps * acting_s if after_step else end_s
            self._at(max(time_s, float(poll_s)), handler, ticket)

    # ---- the network -----------------------------------------------------------------------------------------------

    def _carry(self, ticket: int) -> None:
        message = self.on_their_way[ticket]
        is_model, within_host = message.bulk, self._within_host(ticket)
        self.bytes_sent += self._bytes(ticket)
        if is_model:
            self._owed_s[message.sender] += self.costs.send_s + self._protocol_s
        if is_model or within_host:
            arrives_s = self.now + (0.0 if within_host else self._cluster.latency_s)
            self._at_poll(message.receiver, arrives_s, self._announce if is_model else self._deliver, ticket)
        else:
            self._leave(ticket)

    def _announce(self, ticket: int) -> None:
        """Note that the receiver has seen that a model wants to come."""
        queue = self._announced[self.on_their_way[ticket].receiver]
        queue.append(ticket)
        if len(queue) == 1:
            self._call(ticket)

    def _call(self, ticket: int) -> None:
        """Let the receiver copy the model, or tell the sender of another host to let it go."""
        if self._within_host(ticket):
            self._take_in(ticket)
        else:
            sender = self.on_their_way[ticket].sender
            self._at_poll(sender, self.now + self._cluster.latency_s, self._leave, ticket)

    def _leave(self, ticket: int) -> None:
        host = self._cluster.host_of(self.on_their_way[ticket].sender)
        begin_s, _ = self._links_out[host].carry(self.now, self._bytes(ticket))
        self._at(begin_s + self._cluster.latency_s, self._arrive, ticket)

    def _arrive(self, ticket: int) -> None:
        """Receive a message whose first byte is at the receiver's host."""
        message = self.on_their_way[ticket]
        _, end_s = self._links_in[self._cluster.host_of(message.receiver)].carry(self.now, self._bytes(ticket))
        self._at_poll(message.receiver, end_s, self._deliver if not message.bulk else self._take_in, ticket)

    def _take_in(self, ticket: int) -> None:
        """Deliver a model that has come as a whole; the receiver can turn to the next."""
        number = self.on_their_way[ticket].receiver
        self._owed_s[number] += self.costs.receive_s + self._protocol_s
        self._deliver(ticket)
        queue = self._announced[number]
        queue.popleft()
        if queue:
            self._call(queue[0])

    def _within_host(self, ticket: int) -> bool:
        message = self.on_their_way[ticket]
        return self._cluster.host_of(message.sender) == self._cluster.host_of(message.receiver)

    def _bytes(self, ticket: int) -> int:
        is_model = self.on_their_way[ticket].bulk
        return self._control_bytes + self.costs.model_bytes * is_model


def predict_gossip(topology: str, cluster: Cluster, costs: Costs, seed: int) -> Prediction:
    """Predict gossip with this topology over MPI."""
    return measured(GossipCluster(cluster, costs, topology, seed), cluster.warm_up_updates, cluster.updates_a_rank)


def measured(cluster: GossipCluster, warm_up_updates: int, updates: int) -> Prediction:
    """Play until a rank that never waits has made `updates`, and return what those after the warm-up show."""
    num_ranks = len(cluster.ranks)
    update_s = cluster.costs.update_s * sorted(cluster.slowness)[(num_ranks - 1) // 2]
    begin_s, duration_s = warm_up_updates * update_s, (updates - warm_up_updates) * update_s
    cluster.play_until(begin_s)
    before = _counts(cluster)
    squares = []
    for look in range(1, _LOOKS_AT_DISTANCE + 1):
        cluster.play_until(begin_s + look / _LOOKS_AT_DISTANCE * duration_s)
        squares.append(cluster.squared_distance)
    num_updates, num_models, num_bytes, waited_s, *link_bytes = _counts(cluster) - before
    first, second = np.sqrt(np.mean(np.reshape(squares, (2, -1)), axis=1))
    return Prediction(
        steps_per_s=num_updates * cluster.costs.steps_per_update / duration_s,
        wait_share=waited_s / (num_ranks * duration_s),
        bytes_per_s=num_bytes / duration_s,
        busiest_link_bytes_per_s=max(link_bytes) / duration_s,
        models_an_update=num_models / num_updates,
        distance=float(np.sqrt(np.mean(squares))),
        distance_grows=bool(second > _GROWING * first),
    )


def _counts(cluster: GossipCluster) -> np.ndarray:
    """Return updates, models, bytes, seconds of waiting, and the bytes of each link."""
    counts = (cluster.updates, cluster.models_sent, cluster.bytes_sent, cluster.waited_s)
    return np.array([*counts, *cluster.link_bytes], np.float64)
