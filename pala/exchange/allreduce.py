"""Synchronous A2C: the ranks' gradients are averaged before every update, so all hold one model and go in step.

What GALA is compared with in its paper (Assran et al. 2019, arXiv 1906.04585, section 5): each update waits for the
slowest rank, and the death of one ends the job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pala.exchange.base import ModelExchange, Setup, agree_on_end, model_of_first
from pala.exchange.budget import ExchangeState, Stop
from pala.system.output import log
from pala.system.waiting import LongWait, wait_asleep

_LONGEST_SLEEP_S = 2e-4


class AllReduce(ModelExchange):
    """One reduction an update, of the flat gradient and some words more: whether a rank ends training, whether by a
    signal, and which ranks' gradients are not finite."""

    num_models = 1

    def __init__(self, setup: Setup) -> None:
        """Average gradients from now on. The parameters must be equal on all ranks. Collective."""
        super().__init__(setup)
        comm, parameters, config, start, *_ = setup
        numbers = parameters.numel() + 2 + comm.size
        self._buffer = torch.zeros(numbers, dtype=torch.float32, device="cpu", pin_memory=parameters.is_cuda)
        self._gradient, self._words = self._buffer.split((parameters.numel(), 2 + comm.size))
        self._ends, self._signals, self._not_finite = self._words.split((1, 1, comm.size))
        self.message_bytes = self._buffer.nbytes
        self._steps_by_rank, self._base_steps = np.array(start.steps_by_rank, np.uint64), start.base_steps
        self._budget_steps = config.total_steps
        self._stop, self._all_know = Stop.NONE, False
        self._deaths = comm.deaths()
        self._check_budget()

    @property
    def global_steps(self) -> int:
        return self._base_steps + int(self._steps_by_rank.sum())

    @property
    def living(self) -> range:
        """All ranks: if one dies, the job ends."""
        return range(self._comm.size)

    @property
    def stop(self) -> Stop:
        return self._stop

    def stop_now(self, reason: Stop) -> None:
        """End training; the others learn of it by the next reduction, which `close` takes part in."""
        if self._stop is Stop.NONE:
            self._stop = reason

    def average_gradient(self, gradient: Tensor) -> bool:
        self._gradient.copy_(gradient)
        self._words.zero_()
        self._not_finite[self._comm.rank] = not math.isfinite(float(self._gradient.norm()))
        self._reduce(timeout_s=None)
        if self._all_know:
            return False
        if gradient.is_cuda:  # the sum is on the host
            gradient.copy_(self._gradient).div_(self._comm.size)
        else:
            torch.div(self._gradient, self._comm.size, out=gradient)
        guilty = self._not_finite.nonzero().flatten().tolist()
        self.culprits = () if self._comm.rank in guilty else guilty
        return True

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._steps_by_rank += np.uint64(steps)
        self._check_budget()
        return healthy

    def close(self, timeout_s: float) -> Stop:
        if self._stop is not Stop.BUDGET and not self._all_know:
            self._buffer.zero_()
            self._reduce(timeout_s)  # the others are in theirs, or will be
        return agree_on_end(self._comm, self._stop, self._steps_by_rank, timeout_s).stop

    def final_parameters(self, timeout_s: float) -> Tensor:
        """Return the parameters of rank 0. That all ranks have the same is checked, and a difference is reported."""
        mine = self._parameters.detach().cpu()
        final = model_of_first(self._comm, mine, True, timeout_s)
        distance = float((final - mine).norm())
        if not distance <= 1e-4 * float(final.norm()):
            log(f"[rank {self._comm.rank}] its model is {distance:.3g} from rank 0's, which is exported.")
        return final

    def state(self) -> ExchangeState:
        return ExchangeState(self._steps_by_rank.tolist(), self._base_steps)

    def _reduce(self, timeout_s: float | None) -> None:
        """Sum the buffer over all ranks. The barrier before is waited for asleep: a reduction would spin a core.

        The reduction blocks: MPI's non-blocking one, or a thread that does it, is slower, which its ranks would pay."""
        self._ends.fill_(self._stop is not Stop.NONE)
        self._signals.fill_(self._stop is Stop.SIGNAL)
        begin, barrier = time.perf_counter(), self._comm.ibarrier()
        wait = LongWait(self._comm.rank, "a gradient of every rank")
        wait_asleep(lambda: self._are_here(barrier), timeout_s, self.interrupt, _LONGEST_SLEEP_S, wait)
        self._waited_since(begin)
        self._comm.reduce(self._buffer.numpy(), "sum")
        if float(self._ends) > 0:
            self._stop, self._all_know = Stop.SIGNAL if float(self._signals) > 0 else Stop.CALLBACK, True

    def _are_here(self, barrier: Callable[[], bool]) -> bool:
        self._deaths.end_if_any()
        return barrier()

    def _check_budget(self) -> None:
        """Stop when the budget is met: every rank counts every update, so all stop after the same."""
        if self.global_steps >= self._budget_steps:
            self.stop_now(Stop.BUDGET)
