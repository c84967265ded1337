"""Whole trainings on threads: what the paired exchange, the default, has of its own. All else: `test_memory.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pala.config import Config
from pala.exchange.gossip.messages import Kind
from pala.testing.faults import Fault, OnTheWay, fail_at
from support.helpers import slow_among, slow_but_for
from support.memory_jobs import configure, parameters, train

_KIND_AT = 6  # where a message says of which kind it is


@pytest.mark.slow
def test_paired_ranks_stay_together(tmp_path: Path) -> None:
    """Nothing that a rank learns makes it leave the others, as it does without an exchange."""

    def apart(config: Config) -> float:
        models = parameters(train(3, config).states())
        return float((models - models.mean(0)).norm())

    alone = apart(configure(tmp_path / "alone", "none", 1500))
    assert apart(configure(tmp_path / "paired", steps=1500, max_staleness=0)) < 0.5 * alone


def test_when_ranks_that_send_parts_die_the_living_make_the_rest(tmp_path: Path) -> None:
    dead = [0, 3]
    faults = [fail_at(rank, update=5 + 3 * rank) for rank in dead]
    trained = train(4, configure(tmp_path, steps=800, patience_s=0.5, compression="top_k"), faults)
    assert trained.ended_well(but_for=dead)
    assert [lost["rank"] for lost in trained.segment["lost_ranks"]] == dead
    assert trained.results[1].global_steps >= 800
    assert bool(parameters([trained.states()[rank] for rank in (1, 2)]).isfinite().all())


def meet_the_first(
    number: int, kind: Kind, sender: int, receiver: int, becomes: Callable[[np.ndarray], np.ndarray | None]
) -> list[Fault]:
    """Something happens to so many offers, or answers, of those that are the first from one rank to the other."""
    met = itertools.count()

    def meet(data: np.ndarray) -> np.ndarray | None:
        return becomes(data) if data[_KIND_AT] == kind and next(met) < number else data

    return [OnTheWay(sender, receiver, n, meet) for n in range(1, 100)]


@pytest.mark.parametrize("kind", [Kind.OFFER, Kind.ANSWER], ids=str)
@pytest.mark.parametrize("lost", slow_but_for([(0, 1), (1, 0)], (0, 1)), ids=str)
@pytest.mark.slow
def test_after_a_lost_offer_or_answer_two_ranks_go_on_to_exchange(
    lost: tuple[int, int], kind: Kind, tmp_path: Path
) -> None:
    """By the offers of the other: the lock of who lost it stays held."""
    trained = train(
        2, configure(tmp_path, steps=1000, patience_s=0.1), meet_the_first(1, kind, *lost, lambda data: None)
    )
    assert trained.ended_well() and trained.total("models_mixed") > 10


@pytest.mark.parametrize(
    ("compression", "kind"),
    slow_among([("none", Kind.OFFER), ("none", Kind.ANSWER), ("bfloat16", Kind.OFFER), ("top_k", Kind.ANSWER)], "none"),
)
@pytest.mark.slow
def test_damaged_offers_and_answers_are_refused_and_leave_nobody_waiting(
    compression: str, kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """On a ring, where rank 1 offers to rank 2."""
    sender, receiver = (1, 2) if kind is Kind.OFFER else (2, 1)
    config = configure(tmp_path, steps=900, topology="ring", compression=compression, max_staleness=1)
    trained = train(3, config, meet_the_first(3, kind, sender, receiver, np.invert))
    assert trained.ended_well()
    said = [line for line in capsys.readouterr().err.splitlines() if "rejected" in line]
    assert any(line.startswith(f"[rank {receiver}] rejected a message from rank {sender}: it begins") for line in said)
    assert trained.total("models_refused", rank=receiver) == 3 and trained.total("models_mixed") > 10
    assert bool(parameters(trained.states()).isfinite().all())
