"""Topologies of a user's own, beside the named ones (`pala/config/catalogue.py`). Pure: no MPI, no torch, no networkx.

Peers are chosen at random, by the weights of a graph, or by a function. Before training `check` looks whether all
models can reach each other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from pala.config.catalogue import TOPOLOGIES, random_bits
from pala.system.errors import PalaError

PeerFunction = Callable[[int, Sequence[int], int], int | Iterable[int]]
"""(rank, living ranks, round) -> the peer or peers that the rank sends to in this round of its own."""
_Choose = Callable[[int, Sequence[int], int, int], tuple[int, ...]]
_Edges = Mapping[int, set[int]]

_MOST_HOPS = 64  # from a dead rank to the next; more than any walk takes unless nobody can be reached
_MOST_ROUNDS = 64  # in which a function must have named every connection that is needed


class Peers(Protocol):
    """The peers of each rank in each round: a named topology, or a user's own."""

    @property
    def to_all(self) -> bool:
        """Whether a rank sends to all others in each round, not to one."""

    def out_peers(self, rank: int, living: Sequence[int], round_: int, seed: int) -> tuple[int, ...]:
        """Return the ranks to which `rank` sends in its round `round_`. `living`: sorted ranks, `rank` among them."""


class DirectedGraph(Protocol):
    """A graph as networkx has it; `weight` of an edge is 1 if it has none."""

    @property
    def edges(self) -> Any:
        """The edges; `edges(data="weight", default=1.0)` gives triples."""

    def is_directed(self) -> bool:
        """Return False if each edge goes both ways."""


class OwnTopology:
    """A user's own topology: the peers that a function chooses, again in each round."""

    to_all = False

    def __init__(self, choose: _Choose, edges: _Edges | None = None, likeness: object = "function") -> None:
        """`choose`: (rank, living ranks, round, seed) -> peers. `edges`: rank -> all peers that it may ever have; None:
        as the first rounds show. `likeness`: equal for ranks that were given the same, as far as that can be told."""
        self._choose, self._edges, self.likeness = choose, edges, likeness

    def out_peers(self, rank: int, living: Sequence[int], round_: int, seed: int) -> tuple[int, ...]:
        return () if len(living) == 1 else self._choose(rank, living, round_, seed)

    def check(self, size: int, by_pairs: bool) -> None:
        """Raise PalaError if `size` ranks could not reach a common model. `by_pairs`: both ranks of a pair move."""
        if self._edges is not None:
            if unknown := set(self._edges) - set(range(size)):
                raise PalaError(
                    f"Gossip: a node of 'topology' is {min(unknown)}, but the nodes must be the ranks 0 to {size - 1}."
                )
            _check_connected(self._edges, size, by_pairs)
            return
        edges: dict[int, set[int]] = {rank: set() for rank in range(size)}
        for round_ in range(_MOST_ROUNDS):
            for rank in range(size):
                edges[rank].update(self.out_peers(rank, range(size), round_, 0))
            if round_.bit_count() <= 1 and _unreached(edges, size, by_pairs) is None:
                return
        _check_connected(edges, size, by_pairs, f" in the first {_MOST_ROUNDS} rounds")


def own_topology(topology: Any, by_pairs: bool) -> OwnTopology:
    """Return the topology that a user gave: a graph as networkx has it, whose nodes are ranks, or a function. Raises
    PalaError for anything else."""
    if hasattr(topology, "edges") and hasattr(topology, "is_directed"):
        return by_weights(_weights_of(topology))
    if callable(topology):
        return OwnTopology(partial(_ask, topology, by_pairs))
    raise PalaError(
        f"Gossip: 'topology' is {topology!r}, but must be one of {', '.join(map(repr, ('auto', *TOPOLOGIES)))}, a "
        "networkx.DiGraph, or a function (rank, living ranks, round) -> peers."
    )


def _ask(
    function: PeerFunction, by_pairs: bool, rank: int, living: Sequence[int], round_: int, seed: int
) -> tuple[int, ...]:
    """Return the peers that a user's function names. `by_pairs`: a rank may have one in a round, not several."""
    named = function(rank, living, round_)
    try:
        peers = tuple(map(operator.index, named)) if isinstance(named, Iterable) else (operator.index(named),)
    except TypeError:
        peers = (rank,)  # which it may not be
    if not set(peers) <= set(living) - {rank} or len(set(peers)) < len(peers):
        raise PalaError(
            f"Gossip: 'topology' gave {named!r} for rank {rank} in round {round_}, but must give other ranks of "
            f"the living {list(living)}, each once."
        )
    if by_pairs and len(peers) > 1:
        raise PalaError(
            f"Gossip: 'topology' gave {named!r} for rank {rank} in round {round_}, but with 'mixing' 'paired' a "
            "rank has one peer in a round; give one, or set 'mixing' to 'uniform'."
        )
    return peers


def by_weights(weights: Mapping[tuple[int, int], float]) -> OwnTopology:
    """Return the topology in which a rank chooses each peer as probably as weights say. A dead peer's place is taken by
    one of its own peers, chosen likewise: ranks that are connected stay so.

    `weights`: (rank, peer) -> weight, 0 or more; of each rank they are divided by their sum.
    """
    chosen: dict[int, list[tuple[int, float]]] = {rank: [] for edge in weights for rank in edge}
    for (rank, peer), weight in sorted(weights.items()):
        if rank != peer and weight > 0:
            chosen[rank].append((peer, weight))
    tables = {rank: _table(peers) for rank, peers in chosen.items() if peers}
    edges = {rank: {peer for peer, _ in peers} for rank, peers in chosen.items()}
    return OwnTopology(partial(_draw, tables), edges, likeness=tables)


class _Table(NamedTuple):
    """The peers that a rank chooses from, and the sums of their probabilities up to each; the last is 1."""

    peers: tuple[int, ...]
    sums: tuple[float, ...]


def _table(peers: Sequence[tuple[int, float]]) -> _Table:
    total = sum(weight for _, weight in peers)
    sums = tuple(accumulate(weight / total for _, weight in peers))
    return _Table(tuple(peer for peer, _ in peers), (*sums[:-1], 1.0))


def _draw(tables: Mapping[int, _Table], rank: int, living: Sequence[int], round_: int, seed: int) -> tuple[int, ...]:
    """Return the peer that a rank's table gives by the random bits of this round."""
    if rank not in tables:
        return ()
    there, place, draw = set(living), rank, random_bits(random_bits(seed, round_), rank)
    for hop in range(_MOST_HOPS):
        if place not in tables:
            break
        share = random_bits(draw, hop) / 2**64
        place = next(peer for peer, total in zip(*tables[place], strict=True) if share < total)
        if place in there and place != rank:
            return (place,)
    return TOPOLOGIES["random"].out_peers(rank, living, round_, seed)  # the dead were its only way to the others


def _weights_of(graph: Any) -> dict[tuple[int, int], float]:
    """Return the weights of a graph's edges, 1 of an edge without one."""
    weights: dict[tuple[int, int], float] = {}
    for rank, peer, weight in graph.edges(data="weight", default=1.0):
        if type(rank) is not int or type(peer) is not int:
            raise PalaError(
                f"Gossip: an edge of 'topology' is ({rank!r}, {peer!r}), but nodes must be ranks: 0, 1, ..."
            )
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
            raise PalaError(
                f"Gossip: the edge ({rank}, {peer}) of 'topology' has the weight {weight!r}, not 0 or more."
            )
        weights[rank, peer] = float(weight)
        if not graph.is_directed():
            weights[peer, rank] = float(weight)
    return weights


def _check_connected(edges: Mapping[int, set[int]], size: int, by_pairs: bool, when: str = "") -> None:
    """Raise PalaError if the models of all ranks cannot become one over these edges."""
    if (unreached := _unreached(edges, size, by_pairs)) is None:
        return
    start, end = unreached
    between = f"between rank {start} and rank {end}" if by_pairs else f"from rank {start} to rank {end}"
    raise PalaError(
        f"Gossip: 'topology' has no way {between}{when}, so the ranks would never have a common model; add edges."
    )


def _unreached(edges: Mapping[int, set[int]], size: int, by_pairs: bool) -> tuple[int, int] | None:
    """Return two ranks of which the second gets nothing from the first, not even through others; None if there are
    none. In pairs models go both ways."""
    back: dict[int, set[int]] = {}
    for rank, peers in edges.items():
        for peer in peers:
            back.setdefault(peer, set()).add(rank)
    if by_pairs:
        both = {rank: edges.get(rank, set()) | back.get(rank, set()) for rank in range(size)}
        missing = set(range(size)) - _reached(both)
        return (0, min(missing)) if missing else None
    if missing := set(range(size)) - _reached(edges):
        return (0, min(missing))
    if missing := set(range(size)) - _reached(back):
        return (min(missing), 0)
    return None


def _reached(edges: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that can be reached from rank 0."""
    found, waiting = {0}, [0]
    while waiting:
        fresh = edges.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found
