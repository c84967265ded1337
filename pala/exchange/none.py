"""Independent learners: every rank for itself, for comparison and as the machine's speed limit."""

from __future__ import annotations

import math
from typing import Any

from mpi4py import MPI
from torch import Tensor

from pala.exchange.base import Exchange, ExchangeState
from pala.exchange.data_proxy import agree_on_end, wait_quietly
from pala.exchange.protocol import Stop
from pala.runtime import Interrupt


class NoExchange(Exchange):
    """Every rank makes an equal share of the budget. The final policy is rank 0's; nothing is averaged."""

    def __init__(
        self, comm: MPI.Comm, parameters: Tensor, budget_steps: int, start: ExchangeState, interrupt: Interrupt
    ) -> None:
        self._comm, self._parameters, self._start, self._interrupt = comm, parameters, start, interrupt
        self._final_steps: list[int] | None = None
        self._local_steps = start.local_steps[comm.rank]
        self._share = math.ceil((budget_steps - start.base_steps) / comm.size)
        self._stop = Stop.NONE
        self._check_budget()

    @property
    def global_steps(self) -> int:
        """An estimate until the end: what there would be if all ranks were as fast as this one."""
        if self._final_steps is not None:
            return self._start.base_steps + sum(self._final_steps)
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

    def close(self, timeout_s: float) -> Stop:
        """Ranks of unlike speed end at unlike times: waits for the slowest without a limit, but for a signal."""
        stop, self._final_steps = agree_on_end(self._comm, self._stop, self._local_steps, None, self._interrupt)
        return stop

    def final_parameters(self, timeout_s: float) -> Tensor:
        final = self._parameters.detach().cpu().clone()
        wait_quietly(self._comm.Ibcast(final.numpy(), root=0), timeout_s, self._interrupt)
        return final

    def metrics(self) -> dict[str, Any]:
        return {}

    def state(self) -> ExchangeState:
        steps = list(self._start.local_steps)
        steps[self._comm.rank] = self._local_steps
        return ExchangeState(steps, self._start.base_steps, 0, 1.0)

    def _check_budget(self) -> None:
        if self._local_steps >= self._share:
            self.stop_now(Stop.BUDGET)
