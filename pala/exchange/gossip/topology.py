"""Topologies: the peers of a rank as pure functions of (rank, living ranks, round, seed). No MPI, no torch.

All four graphs are regular: when every living rank is in the same round, every rank receives exactly as many models
as it sends, so the mixing matrix is doubly stochastic and averaging keeps the mean.

| topology | peers in a round | spread |
|---|---|---|
| `random` | one: all shift by the same random offset | variance halves a round, in expectation |
| `ring` | one: the next rank | shrinks with cos(pi/n), slow for many ranks |
| `exponential` | one: the rank 1, 2, 4, ... further on | exact mean after log2 n rounds if n is a power of two |
| `complete` | everybody | exact mean after one round |

In `random`, each peer is uniformly random, and every rank receives exactly one model a round. `exponential` is the
one-peer exponential graph of Ying et al. 2021 (arXiv 2110.13363).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Graph:
    """A topology's peers: one a round, or all."""

    offset: Callable[[int, int, int], int] | None = None
    """(number of living ranks, round, seed) -> how much further on the one peer is, the same for all ranks; None: a
    rank sends to everybody."""

    def out_peers(self, rank: int, living: Sequence[int], round_: int, seed: int) -> tuple[int, ...]:
        """Return the ranks to which `rank` sends in its round `round_`. `living`: sorted ranks, `rank` among them."""
        n = len(living)
        if n == 1:
            return ()
        if self.offset is None:
            return tuple(peer for peer in living if peer != rank)
        return (living[(living.index(rank) + self.offset(n, round_, seed)) % n],)

    def num_in_peers(self, num_living: int) -> int:
        """Return how many models complete one round of receiving."""
        return num_living - 1 if self.offset is None else min(1, num_living - 1)


def _random(n: int, round_: int, seed: int) -> int:
    return 1 + _hash(seed, round_) % (n - 1)


def _ring(n: int, round_: int, seed: int) -> int:
    return 1


def _exponential(n: int, round_: int, seed: int) -> int:
    return 1 << (round_ % (n - 1).bit_length())


GRAPHS: Mapping[str, Graph] = {
    "random": Graph(_random),
    "ring": Graph(_ring),
    "exponential": Graph(_exponential),
    "complete": Graph(),
}
"""By the names of `exchange.topology`."""


def _hash(seed: int, round_: int) -> int:
    """Return splitmix64 of (seed, round): cheap, stateless, equal on every rank."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + round_ * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
