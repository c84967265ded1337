"""Who sends to whom: regular in every round, and as good at averaging as the theory says."""

from __future__ import annotations

import typing
from collections import Counter, deque

import numpy as np
import pytest

from pala.config import ExchangeConfig
from pala.config.catalogue import RULES, TOPOLOGIES
from pala.exchange.budget import broadcast_peers
from pala.exchange.gossip.codecs import CODECS

SIZES = [1, 2, 3, 5, 8, 13, 16]


def mixing_matrix(topology: str, living: list[int], round_: int, seed: int = 1) -> np.ndarray:
    """W of one round in which everyone sends and then mixes uniformly: x <- W x."""
    n = len(living)
    W = np.eye(n)
    for place, rank in enumerate(living):
        for peer in TOPOLOGIES[topology].out_peers(rank, living, round_, seed):
            W[living.index(peer), place] += 1
    return W / W.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", SIZES)
def test_every_rank_receives_as_many_as_it_sends(topology: str, n: int) -> None:
    for living in (list(range(n)), [3 * rank + 1 for rank in range(n)]):  # the second: with gaps, as after deaths
        for round_ in range(200):
            sent = {rank: TOPOLOGIES[topology].out_peers(rank, living, round_, seed=7) for rank in living}
            received = Counter(peer for peers in sent.values() for peer in peers)
            for rank, peers in sent.items():
                assert rank not in peers and set(peers) <= set(living) and len(set(peers)) == len(peers)
                assert len(peers) == received[rank] == (n - 1 if TOPOLOGIES[topology].to_all else min(1, n - 1))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 16])
@pytest.mark.slow
def test_random_peers_are_uniform_and_all_ranks_agree(n: int) -> None:
    num_rounds = 4000
    offsets = [(TOPOLOGIES["random"].out_peers(0, range(n), r, seed=3)[0]) % n for r in range(num_rounds)]
    for rank in range(n):
        assert offsets == [
            (TOPOLOGIES["random"].out_peers(rank, range(n), r, seed=3)[0] - rank) % n for r in range(num_rounds)
        ]
    counts = Counter(offsets)
    expected = num_rounds / (n - 1)
    chi_square = sum((counts[offset] - expected) ** 2 / expected for offset in range(1, n))
    assert counts[0] == 0
    assert chi_square <= (n - 2) + 4 * np.sqrt(2 * (n - 2))  # mean and four standard deviations


def test_random_rounds_and_seeds_are_independent() -> None:
    n, num_rounds = 9, 4000
    streams = [
        [TOPOLOGIES["random"].out_peers(0, range(n), r, seed)[0] for r in range(num_rounds)]
        for seed in (1, 2, 2**63 - 1)
    ]
    pairs = [(streams[0], streams[1]), (streams[1], streams[2]), (streams[0][1:], streams[0][:-1])]
    for a, b in pairs:
        equal = np.mean(np.array(a) == np.array(b))
        assert abs(equal - 1 / 8) < 4 * np.sqrt(1 / 8 * 7 / 8 / num_rounds)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_exponential_gives_the_exact_mean_in_log2_n_rounds(n: int, start: int) -> None:
    product = np.eye(n)
    for round_ in range(start, start + n.bit_length() - 1):
        product = mixing_matrix("exponential", list(range(n)), round_) @ product
    np.testing.assert_allclose(product, 1 / n, atol=1e-15)


@pytest.mark.parametrize("n", [3, 5, 6, 13, 100])
def test_exponential_visits_every_power_of_two_below_n(n: int) -> None:
    offsets = [TOPOLOGIES["exponential"].out_peers(0, range(n), round_, seed=0)[0] for round_ in range(20)]
    period = (n - 1).bit_length()
    assert offsets[:period] == [1 << k for k in range(period)] and offsets[period - 1] < n
    assert offsets == (offsets[:period] * 20)[:20]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 16, 32])
def test_ring_contracts_with_the_cosine_of_pi_over_n(n: int) -> None:
    singular_values = np.linalg.svd(mixing_matrix("ring", list(range(n)), 0), compute_uv=False)
    assert singular_values[0] == pytest.approx(1)
    assert singular_values[1] == pytest.approx(np.cos(np.pi / n), abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_complete_gives_the_exact_mean_in_one_round(n: int) -> None:
    np.testing.assert_allclose(mixing_matrix("complete", list(range(n)), 0), 1 / n)


@pytest.mark.parametrize("n", [3, 5, 8, 16])
@pytest.mark.slow
def test_random_halves_the_variance_in_expectation(n: int) -> None:
    """A cyclic shift by d has the Fourier modes as eigenvectors: (I + P_d)/2 multiplies mode k by (1 + w^kd)/2.

    The mean of |(1 + w^kd)/2|^2 = (1 + cos(2 pi k d/n))/2 over d = 1 ... n-1 is (1 - 1/(n-1))/2 for every k != 0, as
    the cosines sum to -1. So it holds for every vector with mean zero.
    """
    expected = 0.5 * (1 - 1 / (n - 1))
    per_offset = np.array([0.5 * (1 + np.cos(2 * np.pi * np.arange(1, n) * d / n)) for d in range(1, n)])
    np.testing.assert_allclose(per_offset.mean(axis=0), expected, atol=1e-12)

    x = np.random.default_rng(n).normal(size=n)
    x -= x.mean()
    ratios = [
        np.sum((mixing_matrix("random", list(range(n)), round_, seed=5) @ x) ** 2) / np.sum(x**2)
        for round_ in range(2000)
    ]
    assert np.mean(ratios) == pytest.approx(expected, abs=4 * np.std(ratios) / np.sqrt(len(ratios)) + 1e-12)


def hops(origin: int, living: list[int], deaf: int | None = None) -> dict[int, int]:
    """Rank -> hops until it hears a piece of news that everyone passes on once, except one rank that does not."""
    heard, queue = {origin: 0}, deque([origin])
    while queue:
        rank = queue.popleft()
        for peer in broadcast_peers(rank, living):
            if peer not in heard and peer != deaf:
                heard[peer] = heard[rank] + 1
                queue.append(peer)
    return heard


@pytest.mark.parametrize("n", [*SIZES, 31, 32, 33, 100])
def test_a_broadcast_reaches_everyone_in_log2_n_hops(n: int) -> None:
    everyone = list(range(n))
    for living in (everyone, [rank for rank in everyone if rank != n // 2] or everyone):
        for origin in living[:4] + living[-2:]:
            heard = hops(origin, living)
            assert set(heard) == set(living)
            assert max(heard.values()) <= (len(living) - 1).bit_length()
            assert len(broadcast_peers(origin, living)) == (len(living) - 1).bit_length()


@pytest.mark.parametrize("n", [5, 8, 13, 16, 33])
def test_a_broadcast_goes_around_one_rank_whose_death_nobody_knows_of(n: int) -> None:
    """From five ranks on, everybody has at least three successors: one may fail."""
    for deaf in range(1, n):
        heard = hops(0, list(range(n)), deaf)
        assert set(heard) == set(range(n)) - {deaf}
        assert max(heard.values()) <= (n - 1).bit_length() + 1


def test_an_unknown_topology_is_an_error() -> None:
    with pytest.raises(KeyError):
        TOPOLOGIES["star"].out_peers(0, range(3), 0, 0)


def test_the_configuration_offers_every_topology_mixing_rule_and_codec() -> None:
    hints = typing.get_type_hints(ExchangeConfig)
    assert set(typing.get_args(hints["topology"])) == {"auto", *TOPOLOGIES}
    assert typing.get_args(hints["mixing"]) == tuple(RULES)
    assert typing.get_args(hints["compression"]) == tuple(CODECS)
