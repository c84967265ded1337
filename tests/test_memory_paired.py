"""Whole trainings by the paired exchange on threads, with deaths, stops, lost and damaged messages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pala.config import (
    Config,
)
from pala.exchange.gossip.messages import Kind
from pala.testing.faults import (
    Fault,
    OnTheWay,
    fail_at,
    fail_at_message,
    stop_at,
)
from pala.testing.memory import Killed, MemoryCommunicator
from support.helpers import slow_among, slow_but_for
from support.memory_jobs import (
    BATCH,
    configure,
    parameters,
    saved_steps,
    train,
)

slow = pytest.mark.slow
_KIND_AT = 6  # where a message says of which kind it is


def paired(folder: Path, steps: int = 600, **settings: Any) -> Config:
    return configure(folder, steps=steps, mixing="paired", **settings)


@pytest.mark.parametrize(
    ("ranks", "compression"), [
        (2, "none"), pytest.param(2, "bfloat16", marks=slow), (2, "top_k"), pytest.param(8, "none", marks=slow),
    ],
)  # fmt: skip
def test_paired_training_completes_with_the_budget_met(compression: str, ranks: int, tmp_path: Path) -> None:
    trained = train(ranks, paired(tmp_path, 200 * ranks, compression=compression, max_staleness=2))
    assert trained.ended_well()
    states = trained.states()
    made, asked = sum(saved_steps(states)), trained.config.total_steps
    assert asked <= made < asked + 10 * ranks * BATCH and trained.results[0].global_steps == made
    assert trained.total("models_mixed") > 3 * ranks
    assert trained.total("models_refused") == 0
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())


@slow
def test_paired_ranks_stay_together(tmp_path: Path) -> None:
    """Nothing that a rank learns makes it leave the others, as it does without an exchange."""

    def apart(config: Config) -> float:
        models = parameters(train(3, config).states())
        return float((models - models.mean(0)).norm())

    alone = apart(configure(tmp_path / "alone", "none", 1500))
    assert apart(paired(tmp_path / "paired", 1500, max_staleness=0)) < 0.5 * alone


@pytest.mark.parametrize(("compression", "dead"), [("none", [1]), ("top_k", [0, 3])])
def test_when_paired_ranks_die_the_living_make_the_rest(compression: str, dead: list[int], tmp_path: Path) -> None:
    faults = [fail_at(rank, update=5 + 3 * rank) for rank in dead]
    trained = train(4, paired(tmp_path, 800, patience_s=0.5, compression=compression), faults)
    assert trained.ended_well(but_for=dead)
    assert [lost["rank"] for lost in trained.segment["lost_ranks"]] == dead
    living = [rank for rank in range(4) if rank not in dead]
    assert trained.results[living[0]].global_steps >= 800
    assert bool(parameters([trained.states()[rank] for rank in living]).isfinite().all())


@pytest.mark.parametrize("n", slow_but_for([1, 3], 1))
def test_a_paired_rank_may_die_in_the_middle_of_its_messages(n: int, tmp_path: Path) -> None:
    """As it makes an offer, as it answers one, as it refuses one."""

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        comm.on_count(updates)
        if comm.rank != 1 and 1 not in comm.world.dead:  # else they might meet the budget before it sends so much
            time.sleep(0.05)

    trained = train(3, paired(tmp_path, patience_s=0.5), [fail_at_message(1, n)], on_count=on_count)
    assert isinstance(trained.results[1], Killed) and trained.ended_well(but_for=[1])


@slow
def test_a_paired_rank_that_was_stopped_takes_its_peers_model(tmp_path: Path) -> None:
    config = paired(tmp_path, 6000, patience_s=0.1)
    paced = replace(config, env=replace(config.env, id="Paced-v0"))
    trained = train(3, paced, [stop_at(1, update=10, seconds=3.0)])
    assert trained.ended_well()
    assert trained.total("models_stale", rank=1) + trained.total("waits_given_up") > 0
    assert bool(parameters(trained.states()).isfinite().all())


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
def test_after_a_lost_offer_or_answer_two_ranks_go_on_to_exchange(
    lost: tuple[int, int], kind: Kind, tmp_path: Path
) -> None:
    """By the offers of the other: the lock of who lost it stays held."""
    trained = train(2, paired(tmp_path, 1000, patience_s=0.1), meet_the_first(1, kind, *lost, lambda data: None))
    assert trained.ended_well() and trained.total("models_mixed") > 10


@pytest.mark.parametrize(
    ("compression", "kind"),
    slow_among([("none", Kind.OFFER), ("none", Kind.ANSWER), ("bfloat16", Kind.OFFER), ("top_k", Kind.ANSWER)], "none"),
)
def test_damaged_offers_and_answers_are_refused_and_leave_nobody_waiting(
    compression: str, kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """On a ring, where rank 1 offers to rank 2."""
    sender, receiver = (1, 2) if kind is Kind.OFFER else (2, 1)
    config = paired(tmp_path, 900, topology="ring", compression=compression, max_staleness=1)
    trained = train(3, config, meet_the_first(3, kind, sender, receiver, np.invert))
    assert trained.ended_well()
    said = [line for line in capsys.readouterr().err.splitlines() if "rejected" in line]
    assert any(line.startswith(f"[rank {receiver}] rejected a model from rank {sender}: it begins") for line in said)
    assert trained.total("models_refused", rank=receiver) == 3 and trained.total("models_mixed") > 10
    assert bool(parameters(trained.states()).isfinite().all())


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=slow)])
def test_a_paired_run_is_resumed(ranks: int, tmp_path: Path) -> None:
    trained = train(3, paired(tmp_path))
    before, mixed = trained.states(), trained.total("models_mixed")
    resumed = trained.resume(ranks, 1200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 1200
    assert resumed.total("models_mixed") > mixed > 0
    begun = parameters(resumed.states(first=True))
    expected = parameters(before) if ranks == 3 else parameters(before).mean(0).expand(5, -1)
    torch.testing.assert_close(begun, expected)
