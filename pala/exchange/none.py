"""Independent learners: every rank for itself, for comparison and as the machine's speed limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from pala.comm.base import Bytes, Communicator, Received, Receiver
from pala.exchange.base import ModelExchange, Setup, agree_on_end, model_of_first
from pala.exchange.budget import ExchangeState, Stop


class NoExchange(ModelExchange):
    """Every rank makes an equal share of the budget; one that dies takes its share along. The final policy is that of
    the lowest rank that lives and has trained; nothing is averaged."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        comm, _, config, start, *_ = setup
        self._start = start
        self._final_steps: np.ndarray | None = None
        self._deaths = comm.deaths()
        self._local_steps = start.steps_by_rank[comm.rank]
        self._share = math.ceil((config.total_steps - start.base_steps) / comm.size)
        self._stop = Stop.NONE
        self._bell: _Bell | None = None
        self._check_budget()

    @property
    def global_steps(self) -> int:
        """An estimate until the end: what there would be if all ranks were as fast as this one."""
        if self._final_steps is not None:
            return self._start.base_steps + int(self._final_steps.sum())
        return self._start.base_steps + self._local_steps * self._comm.size

    @property
    def living(self) -> list[int]:
        if self._bell is None:
            self._deaths.look()
        dead = self._deaths.ranks if self._bell is None else self._bell.dead
        return [rank for rank in range(self._comm.size) if rank not in dead]

    @property
    def stop(self) -> Stop:
        if self._bell is not None:
            self._bell.transport.raise_failure()
            if self._bell.has_rung:
                self.stop_now(Stop.CALLBACK)
        return self._stop

    def stop_now(self, reason: Stop) -> None:
        """End training on this rank, and on all if a callback does; the others get the launcher's signal themselves."""
        if self._stop is Stop.NONE:
            self._stop = reason
            if self._bell is not None and reason is Stop.CALLBACK:
                self._bell.ring(self.living)

    def listen(self) -> None:
        self._bell = _Bell(self._comm)

    def between_steps(self) -> None:
        if self._bell is not None:
            self._bell.transport.poll()

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._local_steps += steps
        self._check_budget()
        return healthy

    def close(self, timeout_s: float) -> Stop:
        """Wait for the slowest without a limit, except for a signal: ranks of unlike speed end at unlike times."""
        known = np.array(self._start.steps_by_rank, np.uint64)
        known[self._comm.rank] = self._local_steps
        if self._bell is not None:
            self._bell.transport.close(math.inf)
        end = agree_on_end(self._comm, self._stop, known, None)
        self._final_steps = end.steps_by_rank
        if self._bell is not None:  # which hears no more
            self._bell.dead |= set(range(self._comm.size)).difference(end.living)
        return end.stop

    def abandon(self) -> None:
        if self._bell is not None:
            self._bell.transport.abandon()

    def final_parameters(self, timeout_s: float) -> Tensor:
        has_trained = self._local_steps + self._start.base_steps > 0  # else the parameters are those of the seed
        return model_of_first(self._comm, self._parameters, has_trained, timeout_s)

    def state(self) -> ExchangeState:
        steps = list(self._start.steps_by_rank) if self._final_steps is None else self._final_steps.tolist()
        steps[self._comm.rank] = self._local_steps
        lost = sorted(set(range(self._comm.size)).difference(self.living))
        return ExchangeState(steps, self._start.base_steps, lost=lost)

    def _check_budget(self) -> None:
        if self._local_steps >= self._share:
            self.stop_now(Stop.BUDGET)


class _Bell(Receiver):
    """Tells all ranks, once, that a callback ends training. Any message is its ringing."""

    def __init__(self, comm: Communicator) -> None:
        """Open a transport. Collective."""
        self._rank = comm.rank
        self.has_rung = False
        self.dead = set[int]()
        self.transport = comm.open_transport()
        self.transport.start(self)

    def ring(self, ranks: Iterable[int]) -> None:
        """Let the others hear it."""
        for rank in set(ranks) - {self._rank} if not self.has_rung else ():
            self.transport.send(rank, Bytes(np.zeros(1, np.uint8)))

    def on_message(self, message: Received) -> None:
        self.has_rung = True

    def on_death(self, rank: int) -> None:
        self.dead.add(rank)
