"""The benchmark of the protocol runs the driver, with every message bringing its credit back."""

from __future__ import annotations

from collections import deque

import pytest

from pala.benchmark.protocol import _driver, _num_sent, _play, protocol_cost_us
from pala.transport.base import Received


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_round_every_rank_sends_and_mixes_one_model(num_ranks: int) -> None:
    post: deque[tuple[int, Received]] = deque()
    ranks = [_driver(rank, num_ranks, post) for rank in range(num_ranks)]
    _play(ranks, post, rounds=7)
    assert _num_sent(ranks) == 7 * num_ranks
    for rank in ranks:
        assert rank.counts["models_mixed"] in (6, 7), "the last round's may not be mixed yet"
        assert rank.protocol.budget.local_steps.min() >= 80 * 3 and rank.protocol.counts["models_received"] == 7
        assert rank.protocol.counts["models_refused"] == rank.protocol.counts["models_stale"] == 0


def test_a_cost_is_a_time() -> None:
    assert 0 < protocol_cost_us(4, messages=200) < 1e5
