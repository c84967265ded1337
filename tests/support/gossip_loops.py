"""Training loops that count up, for tests of `pala.Gossip`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn

from pala.gossip import Gossip
from pala.testing.faults import Fault
from pala.testing.memory import MemoryCommunicator, run_ranks
from support.helpers import Together


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


def run_together(size: int, main: Callable[[MemoryCommunicator], Any], faults: Iterable[Fault] = ()) -> list[Any]:
    """As `run_ranks`, but no loop begins before all ranks are in their blocks."""
    together, enter = Together(size), Gossip.__enter__

    def enter_together(gossip: Gossip) -> Gossip:
        entered = enter(gossip)
        together.barrier()
        return entered

    with mock.patch.object(Gossip, "__enter__", enter_together):
        return run_ranks(size, main, faults)


def on_ranks(size: int, main: Callable[[MemoryCommunicator], Any], *faults: Fault) -> list[Any]:
    results = run_together(size, main, faults)
    for result in results:
        if isinstance(result, BaseException) and not faults:
            raise result
    return results
