"""Topologies of a user's own: who is chosen how often, what is refused, and that training with them keeps progress."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pala.exchange.gossip.topology import by_weights, own_topology
from pala.gossip import Gossip
from pala.system.errors import PalaError
from pala.testing import fail_at, run_ranks
from pala.testing.memory import MemoryCommunicator
from support.gossip_loops import on_ranks, run_together, train, zeros

networkx = pytest.importorskip("networkx")


def star(size: int) -> Any:
    """Rank 0 in the midst; it chooses rank 1 three times as often as each other one."""
    graph = networkx.DiGraph()
    for leaf in range(1, size):
        graph.add_edge(0, leaf, weight=3.0 if leaf == 1 else 1.0)
        graph.add_edge(leaf, 0, weight=0.5)
    return graph


def test_weights_are_probabilities() -> None:
    peers = own_topology(star(5), by_pairs=False)
    chosen = Counter(peers.out_peers(0, range(5), round_, seed=7)[0] for round_ in range(6000))
    assert chosen[1] == pytest.approx(3000, abs=4 * 39) and all(
        chosen[leaf] == pytest.approx(1000, abs=4 * 29) for leaf in (2, 3, 4)
    )
    assert {peers.out_peers(3, range(5), round_, seed=7) for round_ in range(50)} == {(0,)}


def test_ranks_choose_apart_and_seeds_differ() -> None:
    peers = own_topology(networkx.complete_graph(8), by_pairs=False)  # undirected: each edge both ways
    streams = ((0, 1), (1, 1), (0, 2))  # rank, seed
    rows = [[peers.out_peers(rank, range(8), r, seed)[0] for r in range(700)] for rank, seed in streams]
    for a, b in ((0, 1), (0, 2)):
        assert sum(x == y for x, y in zip(rows[a], rows[b], strict=True)) < 0.25 * 700


def test_a_dead_peers_place_is_taken_by_its_peers() -> None:
    ring = by_weights({(rank, (rank + 1) % 5): 1.0 for rank in range(5)})
    living = [0, 3, 4]
    assert [ring.out_peers(rank, living, 9, seed=1) for rank in living] == [(3,), (4,), (0,)]
    hub_died = {own_topology(star(4), by_pairs=True).out_peers(1, [1, 2, 3], r, seed=1) for r in range(50)}
    assert hub_died == {(2,), (3,)}


def test_without_a_way_any_living_rank_is_chosen() -> None:
    inwards = by_weights({(leaf, 0): 1.0 for leaf in (1, 2, 3)})  # of a pair both move
    inwards.check(4, by_pairs=True)
    assert inwards.out_peers(0, range(4), 0, seed=1) == ()
    assert {inwards.out_peers(1, [1, 2, 3], r, seed=1) for r in range(50)} == {(2,), (3,)}


def two_islands() -> Any:
    return networkx.DiGraph([(0, 1), (1, 0), (2, 3), (3, 2)])


@pytest.mark.parametrize(
    ("topology", "by_pairs", "words"),
    [
        (two_islands(), False, "no way from rank 0 to rank 2"),
        (two_islands(), True, "no way between rank 0 and rank 2"),
        (networkx.DiGraph([(0, 1), (1, 2), (2, 3)]), False, "no way from rank 1 to rank 0"),
        (networkx.DiGraph([(0, 1), (1, 0)]), False, "no way from rank 0 to rank 2"),
        (networkx.DiGraph([(0, 1), (1, 9)]), False, "node of 'topology' is 9"),
        (networkx.DiGraph([("a", 1)]), False, r"edge of 'topology' is \('a', 1\)"),
        (networkx.DiGraph([(0, 1, {"weight": -1.0})]), False, "weight -1.0"),
        (lambda rank, living, round_: (), False, "no way from rank 0 to rank 1 in the first 64 rounds"),
        (lambda rank, living, round_: rank, False, "gave 0 for rank 0 in round 0"),
        (lambda rank, living, round_: [1, 1], False, r"gave \[1, 1\]"),
        (lambda rank, living, round_: "next", False, "gave 'next'"),
        (lambda rank, living, round_: [r for r in living if r != rank], True, "one peer in a round"),
    ],
)
def test_what_cannot_reach_a_common_model_is_refused(topology: Any, by_pairs: bool, words: str) -> None:
    with pytest.raises(PalaError, match=words):
        own_topology(topology, by_pairs).check(4, by_pairs)


def test_one_way_is_enough_for_pairs() -> None:
    own_topology(networkx.DiGraph([(0, 1), (2, 1), (2, 3)]), by_pairs=True).check(4, by_pairs=True)


def test_a_graph_that_is_refused_is_one_error_on_all_ranks() -> None:
    def main(comm: MemoryCommunicator) -> None:
        with Gossip(zeros(), total_steps=10, topology=two_islands(), comm=comm):
            raise AssertionError("the block must not begin")

    errors = [str(error) for error in run_ranks(4, main)]
    assert len(set(errors)) == 1 and "no way between rank 0 and rank 2" in errors[0] and "Rank" not in errors[0][:5]


def test_another_graph_on_one_rank() -> None:
    def main(comm: MemoryCommunicator) -> None:
        graph = star(3) if comm.rank < 2 else networkx.DiGraph([(0, 1), (1, 2), (2, 0)])
        with Gossip(zeros(), total_steps=10, topology=graph, comm=comm):
            raise AssertionError("the block must not begin")

    for error in run_ranks(3, main):
        assert isinstance(error, PalaError) and "rank 2 has other settings" in str(error)


def hypercube(rank: int, living: Sequence[int], round_: int) -> int:
    """Pairs that differ by one bit; among fewer ranks the next one."""
    place, n = living.index(rank), len(living)
    other = place ^ (1 << round_ % max(1, (n - 1).bit_length()))
    return living[other if other < n else (place + 1) % n]


@pytest.mark.parametrize("topology", [star(4), hypercube])
def test_pairs_keep_progress_over_any_topology(topology: Any) -> None:
    results = on_ranks(4, lambda comm: train(comm, total_steps=200, topology=topology))
    mean = sum(updates for _, _, updates in results) / 4
    for model, gossip, _ in results:
        assert gossip.global_steps == 4 * mean
        assert model.get_parameter("bias").tolist() == pytest.approx([mean] * 2, rel=1e-5)


@pytest.mark.parametrize(
    "topology", [star(4), hypercube, lambda rank, living, round_: {r for r in living if r != rank}]
)
def test_models_go_one_way_over_any_topology_and_a_death(topology: Any) -> None:
    kwargs = {"mixing": "uniform", "topology": topology, "patience_s": 0.5}
    results = on_ranks(4, lambda comm: train(comm, total_steps=300, **kwargs), fail_at(0, update=5))
    assert isinstance(results[0], BaseException)
    for model, gossip, _ in results[1:]:
        assert list(gossip.living) == [1, 2, 3] and gossip.global_steps >= 300
        assert model.get_parameter("bias").tolist() == results[1][0].get_parameter("bias").tolist()


def test_a_functions_late_mistake_ends_its_rank_with_a_sentence() -> None:
    def sometimes(rank: int, living: Sequence[int], round_: int) -> int:
        return 99 if round_ == 80 and rank == 1 else hypercube(rank, living, round_)

    results = run_together(3, lambda comm: train(comm, total_steps=2000, topology=sometimes))
    assert isinstance(results[1], PalaError) and "gave 99 for rank 1 in round 80" in str(results[1])
    assert results[0][1].global_steps >= 2000


def test_ranks_may_choose_unlike_numbers() -> None:
    """A function that is not the same on all ranks is no error, if models find their way."""
    draw = random.Random(0)

    def anybody(rank: int, living: Sequence[int], round_: int) -> int:
        return draw.choice([peer for peer in living if peer != rank])

    results = on_ranks(3, lambda comm: train(comm, total_steps=100, topology=anybody))
    assert len({tuple(model.get_parameter("bias").tolist()) for model, _, _ in results}) == 1
