"""Independent learners: every rank for itself, for comparison and as the machine's speed limit."""

from __future__ import annotations

import math
from typing import Any

from mpi4py import MPI
from torch import Tensor

from pala.exchange.base import Exchange, ExchangeState
from pala.exchange.data_proxy import wait_quietly
from pala.exchange.protocol import Stop


class NoExchange(Exchange):
    """Every rank makes an equal share of the budget. The final policy is rank 0's; nothing is averaged."""

    def __init__(self, comm: MPI.Comm, parameters: Tensor, budget_steps: int, start: ExchangeState) -> None:
        self._comm, self._parameters, self._start = comm, parameters, start
        self._local_steps = start.local_steps[comm.rank]
        self._share = math.ceil((budget_steps - start.base_steps) / comm.size)
        self._stop = Stop.NONE
        self._check_budget()

    @property
    def global_steps(self) -> int:
        """An estimate: what there would be if all ranks were as fast as this one."""
        return self._start.base_steps + self._local_steps * self._comm.size

    @property
    def stop(self) -> Stop:
        return self._stop

    def stop_now(self, reason: Stop) -> None:
        """End training on this rank; the others get the launcher's signal themselves."""
        if self._stop is Stop.NONE:
            self._stop = reason

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._local_steps += steps
        self._check_budget()
        return healthy

    def finish(self, timeout_s: float) -> Tensor:
        final = self._parameters.detach().cpu().clone()
        wait_quietly(self._comm.Ibcast(final.numpy(), root=0), timeout_s)
        return final

    def close(self, timeout_s: float) -> None:
        """Nothing is under way."""

    def metrics(self) -> dict[str, Any]:
        return {}

    def state(self) -> ExchangeState:
        steps = list(self._start.local_steps)
        steps[self._comm.rank] = self._local_steps
        return ExchangeState(steps, self._start.base_steps, 0, 1.0)

    def _check_budget(self) -> None:
        if self._local_steps >= self._share:
            self.stop_now(Stop.BUDGET)
