"""The step length of many learners beside that of one, at the same learning rate. Pure: no torch, no MPI."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pala.config.catalogue import RULES, TOPOLOGIES, kind_of

if TYPE_CHECKING:
    from pala.config import ExchangeConfig

_MODEL_AGE_UPDATES = 0.5  # of a model when it is mixed, on one host; on slow links more, and less is kept


def kept_by_mixing(exchange: ExchangeConfig, ranks: int) -> float:
    """Return the share of the ranks' steps that mixing leaves them on one host: 1 / (1 + f d), where a mix takes the
    fraction f of models that are d updates old. Measured by `python -m pala.simulate progress` and by a run's *progress
    kept*.
    """
    if RULES[exchange.mixing].by_pairs:
        return 1.0
    others = TOPOLOGIES[exchange.graph].num_in_peers(ranks)
    return 1 / (1 + _MODEL_AGE_UPDATES * others / (1 + others))


def learning_rate_factor(exchange: ExchangeConfig, ranks: int, models: int | None = None) -> float:
    """Return the factor by which `ranks` learners step further than one alone, if `a2c.learning_rate_scaling` is
    `ranks`. `models`: how many models they hold, where groups of ranks hold one; None: one each.

    A batch of N learners allows steps √N times as long (Malladi et al. 2022, arXiv 2205.10287), and GALA multiplies by
    √N. RMSprop divides by the size of a rank's own gradient, which noise makes √N times that of the mean of N: so where
    every rank divides by itself, the same rate gives steps √N shorter, and mixing may take back a part of them. A group
    of n ranks divides by the size of its mean gradient: then they are √(N / n) shorter.
    """
    kind = kind_of(exchange)
    if kind.independent:
        return 1.0
    if kind.averages_gradients:
        return math.sqrt(ranks)
    models = models or ranks
    return math.sqrt(ranks / models) * models / kept_by_mixing(exchange, models)
