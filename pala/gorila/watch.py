"""The watch for ranks that answer: those that take in a ping. No MPI, no threads, no clock.

A message leaves when its receiver begins to take it in (`Packet.pending`), which the receiver's transport does by
itself however long its learner is busy. So a ping that does not leave tells of a rank that is stopped, or behind a link
that is cut; no answer is needed. Deaths are another matter: the transport reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pala.comm.base import Packet

_PARTS = 4  # of the patience: between two pings of a rank, and the most that the time between two looks counts


class _Ping(NamedTuple):
    packet: Packet
    sent_s: float  # of the time in which this rank was awake


class Watch:
    """The ranks that this one pings. `silent`: ranks that have not answered for `patience_s`."""

    def __init__(self, ranks: Iterable[int], patience_s: float, ping: Callable[[int], Packet]) -> None:
        """Begin with these ranks. `ping(rank)`: sends a message to that rank."""
        self.silent: set[int] = set()
        self.patience_s, self._ping = patience_s, ping
        self._pings: dict[int, _Ping | None] = dict.fromkeys(ranks)
        self._looked_s: float | None = None
        self.awake_s = 0.0  # since the first look, without the time in which this rank was itself stopped

    def look(self, now_s: float) -> None:
        """Judge the pings that were sent and send new ones. Called some times a second, at any time."""
        part_s = self.patience_s / _PARTS
        if self._looked_s is not None:
            self.awake_s += min(now_s - self._looked_s, part_s)
        self._looked_s = now_s
        for rank, ping in self._pings.items():
            waits_s = self.awake_s - ping.sent_s if ping is not None else part_s
            if ping is not None and ping.packet.pending:
                if waits_s > self.patience_s:
                    self.silent.add(rank)
                continue
            self.silent.discard(rank)
            if waits_s >= part_s:
                self._pings[rank] = _Ping(self._ping(rank), self.awake_s)

    def attend(self, ranks: Iterable[int]) -> None:
        """Watch these ranks from now on, and keep what is known of those that were watched before."""
        self._pings = {rank: self._pings.get(rank) for rank in ranks}
        self.silent.intersection_update(self._pings)

    def forget(self, rank: int) -> None:
        """Stop watching a rank that has died or left."""
        self._pings.pop(rank, None)
        self.silent.discard(rank)
