"""The exchange of a learner whose models the simulation passes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pala.exchange.base import ModelExchange
from pala.exchange.budget import ExchangeState, Stop


class PassiveExchange(ModelExchange):
    """An exchange that sends nothing, and never ends."""

    global_steps = 0  # whoever passes models on counts
    living: Sequence[int] = ()
    stop = Stop.NONE

    def __init__(self, ranks: int) -> None:
        """`ranks`: number of ranks in the simulation."""
        self.living = range(ranks)

    def stop_now(self, reason: Stop) -> None:
        raise NotImplementedError("whoever drives the learner ends it")

    def after_update(self, steps: int, healthy: bool) -> bool:
        return healthy

    def close(self, timeout_s: float) -> Stop:
        return Stop.BUDGET

    def final_parameters(self, timeout_s: float) -> Tensor:
        raise NotImplementedError("whoever drives the learner has its parameters")

    def state(self) -> ExchangeState:
        return ExchangeState([0])
