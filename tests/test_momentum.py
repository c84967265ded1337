"""Quasi-global momentum against a slow formula, and where it starts again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pala.config import Config
from pala.exchange.momentum import Momentum
from pala.exchange.none import NoExchange
from pala.system import blocks
from support.learning import BATCH, Run, configured
from support.memory_jobs import configure, train


def by_formula(own_steps: Tensor, exchanged: Tensor, momentum: float) -> Tensor:
    """All x_t [T + 1, P] from the steps of the rank and of the exchange [T, P each], each sum written out:
    x_{t+1} = x_t + own_t + exchanged_t + momentum m_t, with m_t the smoothed mean of x_{s+1} - x_s, s < t."""
    smoothing = 0.8
    x = [torch.zeros(own_steps.shape[1], dtype=own_steps.dtype)]
    for t, (own, moved) in enumerate(zip(own_steps, exchanged, strict=True)):
        terms = [(1 - smoothing) * smoothing ** (t - 1 - s) * (x[s + 1] - x[s]) for s in range(t)]
        x.append(x[t] + own + moved + momentum * sum(terms, torch.zeros_like(own)))
    return torch.stack(x)


def test_its_setting_is_that_of_the_configuration() -> None:
    momentum = Run(configured(BATCH, momentum=0.75)).a2c._momentum
    assert momentum is not None and momentum._momentum == 0.75


@pytest.mark.parametrize("block", [blocks._BLOCK, 2])
def test_the_model_moves_as_the_formula_says(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and in blocks of which the last is shorter."""
    monkeypatch.setattr(blocks, "_BLOCK", block)
    own, moved = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.zeros(5, dtype=torch.float64)
    momentum = Momentum(x, 0.75, torch.zeros_like(x))
    expected = by_formula(own, moved, 0.75)
    for t in range(30):
        momentum.push_()
        x += own[t] + moved[t]
        torch.testing.assert_close(x, expected[t + 1])


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_mean_goes_so_many_times_as_far(momentum: float) -> None:
    x = torch.zeros(1, dtype=torch.float64)
    push = Momentum(x, momentum, torch.zeros_like(x))
    for _ in range(1000):
        push.push_()
        x += 1
    before = x.clone()
    push.push_()
    x += 1
    assert float(x - before) == pytest.approx(1 / (1 - momentum), rel=1e-6)


def test_it_starts_anew_with_another_model() -> None:
    x = torch.zeros(3)
    momentum = Momentum(x, 0.9, torch.zeros_like(x))
    for _ in range(5):
        momentum.push_()
        x += 1
    x.fill_(1e6)  # a peer's model
    momentum.restart()
    for _ in range(2):
        momentum.push_()
        assert x.tolist() == [1e6] * 3


# ---- in training -----------------------------------------------------------------------------------------------------


def with_momentum(config: Config) -> Config:
    return replace(config, a2c=replace(config.a2c, momentum=0.75))


def test_without_it_nothing_changes_and_with_it_the_second_update_does() -> None:
    models = []
    for momentum in (0.0, 0.75):
        run, kept = Run(configured(3 * BATCH, momentum=momentum)), []
        run.save = lambda run=run, kept=kept: kept.append(run.flat.data.clone())
        run.go()
        models.append(kept)
    (plain_1, plain_2, *_), (pushed_1, pushed_2, *_) = models
    assert plain_1.equal(pushed_1)
    assert not plain_2.equal(pushed_2)


def test_a_healed_rank_forgets_how_it_came_here() -> None:
    class Healing(NoExchange):
        times = 0

        @property
        def heals(self) -> int:
            return self.times

        def after_update(self, steps: int, healthy: bool) -> bool:
            super().after_update(steps, True)
            if self.global_steps >= 4 * BATCH:
                self._parameters.fill_(100.0)
                self.times += 1
            return True

    run = Run(configured(4 * BATCH, momentum=0.75), exchange_class=Healing)
    run.go()
    mean_move = run.a2c.tensors["movement"]
    assert not mean_move.any()
    run.a2c._momentum.push_()
    assert bool((run.flat.data == 100).all())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("gossip", {"mixing": "paired"}), ("gossip", {"mixing": "uniform"}), ("allreduce", {}), ("shared_memory", {})],
    ids=["paired", "uniform", "allreduce", "shared_memory"],
)
def test_trainings_complete_and_keep_it_in_their_checkpoints(kind: str, settings: dict, tmp_path: Path) -> None:
    states = train(3, with_momentum(configure(tmp_path, kind, 600, **settings))).states()
    mean_moves = [state.tensors["movement"] for state in states]
    assert all(mean_move.any() and mean_move.isfinite().all() for mean_move in mean_moves)
    if kind == "allreduce":
        assert all(mean_move.equal(mean_moves[0]) for mean_move in mean_moves)
        assert all(state.tensors["parameters"].equal(states[0].tensors["parameters"]) for state in states)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_a_resumed_run_goes_on_with_it(ranks: int, tmp_path: Path) -> None:
    trained = train(2, with_momentum(configure(tmp_path, steps=300, mixing="paired")))
    before = torch.stack([state.tensors["movement"] for state in trained.states()])
    begun = [state.tensors["movement"] for state in trained.resume(ranks, 600).states(first=True)]
    torch.testing.assert_close(torch.stack(begun), before if ranks == 2 else before.mean(0).expand(3, -1))


def test_a_run_that_began_without_it_goes_on_with_it(tmp_path: Path) -> None:
    without = configure(tmp_path, steps=300)
    trained = train(2, replace(without, a2c=replace(without.a2c, momentum=0.0)))
    trained.config = with_momentum(trained.config)
    begun = trained.resume(2, 600).states(first=True)
    assert not any(state.tensors["movement"].any() for state in begun)
