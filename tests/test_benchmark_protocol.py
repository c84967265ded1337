"""The benchmark of the protocol runs the driver, with every message bringing its credit back."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pala.lab.benchmark import protocol
from pala.lab.benchmark.protocol import _Job, protocol_cost_us


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_round_every_rank_sends_and_mixes_one_model(num_ranks: int) -> None:
    job = _Job(num_ranks)
    job.play(rounds=7)
    assert job.num_sent() == 7 * num_ranks
    for rank in job.ranks:
        assert rank.counts["models_mixed"] in (6, 7), "the last round's may not be mixed yet"
        assert rank.state.budget.steps_by_rank.min() >= 80 * 3 and rank.state.counts["models_received"] == 7
        assert rank.state.counts["models_refused"] == rank.state.counts["models_stale"] == 0


def test_a_cost_is_the_median_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 50 rounds of 4 models each, which take 1, 9 and 2 ms of a clock that stands still between them."""
    looks_ns = iter([0, 1_000_000, 1_000_000, 10_000_000, 10_000_000, 12_000_000])
    clock = SimpleNamespace(process_time_ns=lambda: next(looks_ns), monotonic=time.monotonic)
    monkeypatch.setattr(protocol, "time", clock)
    assert protocol_cost_us(4, messages=200) == 2000 / 200
    assert next(looks_ns, None) is None
