"""The machines that a prediction is for, and its result: what all methods have in common. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_TIME_UNTIL_STEADY = 0.25  # of a simulated run
_MOST_UPDATES = 100_000
_LEAST_UPDATES_A_RANK = 32
_MOST_UPDATES_A_RANK = 400


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, one after the other; each host has one full-duplex link, shared by its ranks."""

    ranks: int
    ranks_per_host: int = 16
    cores_per_host: float = 16
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

    def slowness(self, threads: int) -> list[float]:
        """Return a factor of the times of each rank. Ranks of a host with too few cores share them evenly."""
        last = self.ranks - (self.num_hosts - 1) * self.ranks_per_host
        on_host = [self.ranks_per_host] * (self.num_hosts - 1) + [last]
        shared = [max(1.0, count * threads / self.cores_per_host) for count in on_host]
        factors = [shared[self.host_of(rank)] for rank in range(self.ranks)]
        return [factors[0] * self.straggler, *factors[1:]]

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
