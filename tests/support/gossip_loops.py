"""Training loops that count up, for tests of `pala.Gossip`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pala.gossip import Gossip
from pala.testing.memory import MemoryCommunicator, run_ranks


def add(model: nn.Module, step: float = 1.0) -> None:
    """Let an update add this to every parameter, and nothing else happen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(step)


def zeros() -> nn.Module:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def train(
    comm: MemoryCommunicator | None, total_steps: int, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, Gossip, int]:
    """Count up until the ranks have made their steps; return the model, its gossip and this rank's updates."""
    model, updates = model if model is not None else zeros(), 0
    with Gossip(model, total_steps=total_steps, comm=comm, **settings) as gossip:
        while gossip.goes_on:
            add(model)
            updates += 1
            gossip.after_update(steps=1)
    return model, gossip, updates


def on_ranks(size: int, main: Callable[[MemoryCommunicator], Any], *faults: Any) -> list[Any]:
    results = run_ranks(size, main, faults)
    for result in results:
        if isinstance(result, BaseException) and not faults:
            raise result
    return results
