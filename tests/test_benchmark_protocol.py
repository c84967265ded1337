"""The cost of the protocol is measured on rounds in which everything is exchanged."""

from __future__ import annotations

import pytest

from pala.benchmark.protocol import _play, _Rank, protocol_cost_us


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_all_messages_are_sent_mixed_and_counted(num_ranks: int) -> None:
    ranks = [_Rank(rank, num_ranks) for rank in range(num_ranks)]
    assert _play(ranks, 10) == 10 * num_ranks
    for rank in ranks:
        assert rank.protocol.staleness == 0
        assert all(rank.protocol.lock.is_free(peer) for peer in range(num_ranks))
        assert rank.protocol.local_steps.min() > 0  # everybody knows of everybody
    assert protocol_cost_us(num_ranks, messages=200) > 0
