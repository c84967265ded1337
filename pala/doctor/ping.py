"""A ping between the ranks: small messages, and messages as long as a model, there and back."""

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
MOST_PAIRS = 256
_SMALL_BYTES, _SMALL_TRIPS, _MODEL_TRIPS = 8, 50, 3


def tournament(size: int) -> list[list[Pair]]:
    """Rounds in which each rank meets one other, and after which each has met all (the circle method)."""
    seats = [*range(size), *([-1] if size % 2 else [])]  # who meets -1 has a rest
    half, rounds = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = [(min(pair), max(pair)) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        rounds.append([pair for pair in pairs if pair[0] >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def turns(hosts: Sequence[str], most_pairs: int = MOST_PAIRS) -> list[list[Pair]]:
    """Pairs that ping at the same time: no host is in two of them, so they share neither cores nor links.

    `hosts` are the ranks'. Whole rounds of the tournament are left out, evenly, so that about `most_pairs` are left.
    """
    rounds = tournament(len(hosts))
    wanted = max(1, min(len(rounds), most_pairs // max(1, len(hosts) // 2)))
    chosen: list[list[Pair]] = []
    for number in range(wanted):
        waiting = rounds[number * len(rounds) // wanted]
        while waiting:
            busy: set[str] = set()
            turn: list[Pair] = []
            for pair in waiting:
                if busy.isdisjoint(at := {hosts[rank] for rank in pair}):
                    turn.append(pair)
                    busy |= at
            chosen.append(turn)
            waiting = [pair for pair in waiting if pair not in turn]
    return chosen


def ping(comm: MpiCommunicator, hosts: Sequence[str], expect: Callable[[str], None]) -> list[PairPing]:
    """Ping all pairs; every rank returns all results. A rank that is not in a turn sleeps. Collective."""
    mine: list[PairPing] = []
    for turn in turns(hosts):
        expect("waiting for the pings of other ranks")
        comm.barrier()
        for pair in turn:
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
    """Median; the first trip, which makes the connection, does not count."""
    first, second = pair
    data, durations_s = np.zeros(num_bytes, np.uint8), []
    for _ in range(1 + trips):
        begin_s = time.perf_counter()
        if comm.rank == first:
            comm.mpi.Send(data, second)
            comm.mpi.Recv(data, second)
        else:
            comm.mpi.Recv(data, first)
            comm.mpi.Send(data, first)
        durations_s.append(time.perf_counter() - begin_s)
    return statistics.median(durations_s[1:])
