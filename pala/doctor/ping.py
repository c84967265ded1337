"""The ping between ranks: small messages, and messages as long as a model, there and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pala.doctor.facts import PairPing

if TYPE_CHECKING:
    from pala.comm.mpi import MpiCommunicator

Pair = tuple[int, int]

MODEL_BYTES = 4 * 865_413  # GALA's network with 4 actions, in float32
_MOST_PAIRS = 64
_SMALL_BYTES = 8
_TAG = 5  # a receipt of any tag would take what a roll call has sent (`comm/roll_call.py`)
_SMALL_TRIPS = 50
_MODEL_TRIPS = 3


def pairs_of(size: int) -> list[Pair]:
    """Return the pairs of ranks that ping, one after the other: two at a time could share cores or a link.

    Each rank pings the ranks at some distances from it: at all distances, if that makes no more than about
    `_MOST_PAIRS`; else at a few, spread evenly up to the longest."""
    longest = size // 2
    num_distances = max(1, min(longest, _MOST_PAIRS // size))
    distances = [(number + 1) * longest // num_distances for number in range(num_distances)]
    pairs = [(rank, (rank + distance) % size) for distance in distances for rank in range(size) if distance]
    return sorted({(min(pair), max(pair)) for pair in pairs})


def ping(comm: MpiCommunicator, hosts: Sequence[str], expect: Callable[[str], None]) -> list[PairPing]:
    """Ping all pairs; every rank returns all results. A rank that is not in a pair sleeps. Collective."""
    mine: list[PairPing] = []
    for pair in pairs_of(comm.size):
        expect("waiting for the pings of other ranks")
        comm.barrier()
        if comm.rank in pair:
            peer = sum(pair) - comm.rank
            expect(f"the ping between rank {comm.rank} on {hosts[comm.rank]} and rank {peer} on {hosts[peer]}")
            measured = _measure(comm, pair)
            mine += [measured] if comm.rank == pair[0] else []
    expect("waiting for the pings of other ranks")
    return sorted((found for of_rank in comm.allgather(mine) for found in of_rank), key=lambda found: found.ranks)


def _measure(comm: MpiCommunicator, pair: Pair) -> PairPing:
    small_s = _round_trip_s(comm, pair, _SMALL_BYTES, _SMALL_TRIPS)
    model_s = _round_trip_s(comm, pair, MODEL_BYTES, _MODEL_TRIPS)
    return PairPing(pair, 1e6 * small_s, 2e-6 * MODEL_BYTES / model_s)


def _round_trip_s(comm: MpiCommunicator, pair: Pair, num_bytes: int, trips: int) -> float:
    """Return the median; the first trip, which makes the connection, does not count."""
    first, second = pair
    data, durations_s = np.zeros(num_bytes, np.uint8), []
    for _ in range(1 + trips):
        begin_s = time.perf_counter()
        if comm.rank == first:
            comm.mpi.Send(data, second, _TAG)
            comm.mpi.Recv(data, second, _TAG)
        else:
            comm.mpi.Recv(data, first, _TAG)
            comm.mpi.Send(data, first, _TAG)
        durations_s.append(time.perf_counter() - begin_s)
    return statistics.median(durations_s[1:])
