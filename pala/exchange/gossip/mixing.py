"""The mixing rules: weights of models in an average. Pure: numbers only; `codecs.py` does the arithmetic.

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

from pala.config.catalogue import MixingRule


def share(rule: MixingRule, own: float, copies: int) -> float:
    """Return what a model of weight `own`, and each of `copies` copies of it that leave now, weigh from then on."""
    return own / (copies + 1) if rule.of_whole_models else 1.0


def counted(rule: MixingRule, carried: float) -> float:
    """Return what a model that carries this weight counts: 1, whatever a run had before, where weights stay."""
    return carried if rule.of_whole_models else 1.0


def gained(rule: MixingRule, own: float, carried: float) -> float:
    """Return the weight `own` with that of models that were mixed into this rank's, or thrown away: none is lost."""
    return own + carried if rule.of_whole_models else own
