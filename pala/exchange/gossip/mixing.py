"""What models weigh when they are averaged: the mixing rules. Pure: numbers only; `codecs.py` does the arithmetic.

A mix of a rank's own model x, whose weight is w, with models m that carry weights v is

    x <- (w x + sum of v m) / (w + sum of v).

| rule | a copy carries | w | |
|---|---|---|---|
| `uniform` | 1 | 1 | x <- (x + sum of k models) / (1 + k), the rule of GALA and PALA |
| `push_sum` | w / (k + 1), if k are sent | what it kept and got | the sum of all weights stays the number of ranks |
| `paired` | 1 | 1 | not averaged: both ranks of a pair move by the same amount (`paired.py`) |

Push-sum: Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", 2019, arXiv
1811.10792. Here the optimiser steps the de-biased model itself (there, the step is divided by the weight), so that a
rank's learning rate does not depend on how often it was sent to.
"""

from __future__ import annotations

import abc
from typing import ClassVar


class Mixing(abc.ABC):
    """The rule as one rank follows it. `weight`: of its own model."""

    of_whole_models: ClassVar[bool] = False
    """What models weigh belongs to whole models: no codec may send parts."""
    by_pairs: ClassVar[bool] = False
    """Ranks exchange two at a time: not with a topology that sends to several, but several times an update if asked."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    @abc.abstractmethod
    def send(self, copies: int) -> float:
        """The weight that each of so many copies of this rank's model carries; they leave now."""

    @abc.abstractmethod
    def receive(self, weight: float) -> float:
        """What a model that carries this weight counts in the next mix."""

    @abc.abstractmethod
    def reject(self, weight: float) -> None:
        """A model that carries this weight is thrown away."""

    @abc.abstractmethod
    def mixed(self, received: float) -> None:
        """Models that count so much together have been mixed into this rank's own."""


class Uniform(Mixing):
    """Every model counts the same, whatever weights a run had before."""

    def __init__(self, weight: float = 1.0) -> None:
        del weight
        super().__init__()

    def send(self, copies: int) -> float:
        return 1.0

    def receive(self, weight: float) -> float:
        return 1.0

    def reject(self, weight: float) -> None:
        pass

    def mixed(self, received: float) -> None:
        pass


class PushSum(Mixing):
    """A weight moves with every model, and none is lost: a rejected model's stays with the receiver."""

    of_whole_models = True

    def send(self, copies: int) -> float:
        self.weight /= copies + 1
        return self.weight

    def receive(self, weight: float) -> float:
        return weight

    def reject(self, weight: float) -> None:
        self.weight += weight

    def mixed(self, received: float) -> None:
        self.weight += received


class Paired(Uniform):
    """No weights: both ranks of a pair move by the same amount."""

    by_pairs = True


RULES: dict[str, type[Mixing]] = {"uniform": Uniform, "push_sum": PushSum, "paired": Paired}
