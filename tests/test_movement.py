"""Progress kept: what the exchange leaves of the ranks' own steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pala.a2c.movement import Movement
from pala.run.metrics import progress_kept
from support.helpers import slow_but_for


def play(taken_back: float, ranks: int = 3, updates: int = 40, size: int = 20_000) -> tuple[list, list]:
    """Ranks whose steps are partly alike, and an exchange that takes back a part of each."""
    draw = torch.Generator().manual_seed(1)
    own, moved = [], []
    common = torch.randn(size, generator=draw)
    for _ in range(ranks):
        parameters = torch.randn(size, generator=draw)
        movement = Movement(parameters)
        for update in range(updates):
            step = common + torch.randn(size, generator=draw)
            parameters += step
            movement.note_own_step()
            parameters -= taken_back * step
            movement.note_exchange()
            if update % 10 == 9:
                for sketches, sketch in zip((own, moved), movement.take(), strict=True):
                    sketches.append(sketch)
    return own, moved


@pytest.mark.parametrize("taken_back", slow_but_for([0.0, 0.2, 0.5], 0.2))
def test_what_is_taken_back_is_found(taken_back: float) -> None:
    assert progress_kept(*play(taken_back)) == pytest.approx(1 - taken_back, abs=1e-3)


def test_what_peers_gave_cancels_in_the_mean() -> None:
    """Two ranks that move towards each other keep everything, though neither goes where its own steps went."""
    draw = torch.Generator().manual_seed(2)
    models = [torch.zeros(5000) for _ in range(2)]
    movements = [Movement(model) for model in models]
    for _ in range(30):
        for model, movement in zip(models, movements, strict=True):
            model += torch.randn(5000, generator=draw)
            movement.note_own_step()
        mean = (models[0] + models[1]) / 2
        for model, movement in zip(models, movements, strict=True):
            model.copy_(mean)
            movement.note_exchange()
    own, moved = zip(*(movement.take() for movement in movements), strict=True)
    assert progress_kept(own, moved) == pytest.approx(1, abs=1e-4)
    assert np.linalg.norm(np.subtract(own[0], moved[0])) > 1


def test_another_model_is_no_movement() -> None:
    parameters = torch.zeros(100)
    movement = Movement(parameters)
    parameters += 5
    movement.restart()
    parameters += 1
    movement.note_own_step()
    movement.note_exchange()
    own, moved = movement.take()
    assert own == moved and any(own)
    assert progress_kept([[0.0] * 32], [[1.0] * 32]) is None
