"""The learning rate of many learners that mix their models. Pure: no torch, no MPI."""

from __future__ import annotations

from pala.config import Config

ONE_LEARNER = 7e-4  # GALA's, released settings
_MOST_TIMES = 2.0


def learning_rate(config: Config, num_models: int) -> float:
    """Return `a2c.learning_rate`, or what its `auto` stands for where the ranks that train hold `num_models` models.

    `auto` is GALA's rate of one learner. Where N models are mixed, each is moved by steps that are divided by the size
    of a noisy gradient; synchronous A2C divides by that of the mean, so its model goes further at the same rate.
    Momentum makes up for a part of that, and N/2 times the rate for another. At more than 2 times the rate, policies
    that differ too much learn less. Rates and momentum were swept with 2 to 16 ranks (results/mixing/minatar.md).
    """
    rate = config.a2c.learning_rate
    if rate != "auto":
        return rate
    mixes = config.exchange_kind.coupling == 1
    return ONE_LEARNER * (min(max(num_models / 2, 1.0), _MOST_TIMES) if mixes else 1.0)
