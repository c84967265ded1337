"""GALA-A2C as its authors' code does it: learners of one host mix through shared memory.

Assran et al. 2019, arXiv 1906.04585, algorithm 1, and the released code's use of buffers and events, which are counts
here: each learner has one broadcast buffer. After an update it

1. writes its model there, unless an out-peer has not read the last one;
2. mixes, x <- (x + sum of in-peers' models) / (1 + k), if every in-peer has written since it was last read; if one has
   not and this would be more than `max_staleness` updates since the last mix, it waits, and does 1 as soon as it can.
   (The last is ours: without it, learners of the complete graph that have all left out 1 would wait for one another
   forever.)

So it never sends what nobody takes, and no model is overwritten while it is read. A rank whose parameters are not
finite takes its turns all the same, but its buffer then says that it holds no model (ours): peers leave it out, and it
takes theirs. If it took no turn, it and a peer could wait for each other forever. The graph is a directed ring, or
complete. Training cannot continue without a rank that died, or whose buffer is not on this host.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.comm.agreement import collectively
from pala.comm.base import Communicator
from pala.config.catalogue import TOPOLOGIES
from pala.exchange.base import End, ModelExchange, Setup, agree_on_end, average_of_ranks
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.gossip.driver import MIXES_A_MEASUREMENT
from pala.system.errors import EndError, PalaError
from pala.system.waiting import LongWait, wait_asleep

_LONGEST_SLEEP_S = 5e-4
_NAP_S = 0.01  # of a rank without a model whose peers have none either
_HEALING_S = 300.0  # peers write when their updates end


def check_one_host(comm: Communicator) -> None:
    """Raise PalaError if the ranks are on several hosts. Collective."""
    hosts = dict.fromkeys(comm.allgather(comm.host))
    if len(hosts) > 1:
        raise PalaError(
            f"'exchange.kind' is 'shared_memory', which is for ranks of one host, but they are on "
            f"{', '.join(hosts)}. Start all on one, or use 'gossip', which goes between hosts."
        )


class BroadcastBuffers:
    """Memory that all ranks of a host see: of each some counts, which it alone writes, and its broadcast buffer."""

    def __init__(self, comm: Communicator, num_parameters: int, steps: int) -> None:
        """Share the block of memory, and write this rank's number of `steps` into it. Collective. Raises PalaError if
        there is not as much shared memory."""
        columns = 4 + comm.size
        sizes = (comm.size * columns * 8, comm.size * num_parameters * 4)
        self._block = collectively(comm, lambda: comm.share_memory(sum(sizes), range(comm.size)))
        memory = self._block.data
        counts = memory[: sizes[0]].view(np.int64).reshape(comm.size, columns)
        self.models = torch.from_numpy(memory[sizes[0] :].view(np.float32).reshape(comm.size, num_parameters))
        self.steps, self.stop, self.written, self.has_model = (counts[:, column] for column in range(4))
        self.read = counts[:, 4:]
        self.steps[comm.rank] = steps
        self.fence()
        comm.barrier()

    def fence(self) -> None:
        """Let others see what was written before earlier than what is written after."""
        self._block.fence()


class SharedMemory(ModelExchange):
    """One broadcast buffer a rank; whoever reads it says so before it is written again."""

    def __init__(self, setup: Setup) -> None:
        """Exchange among ranks that are all on one host. Collective."""
        super().__init__(setup)
        comm, parameters, config, start, _, num_exact = setup
        self._num_measured = parameters.numel() - num_exact
        self._rank = comm.rank
        self._max_staleness = config.exchange.max_staleness
        self._budget_steps = config.total_steps
        self._base_steps = start.base_steps
        everybody = range(comm.size)
        graph = TOPOLOGIES[config.exchange.graph]
        self._out = list(graph.out_peers(comm.rank, everybody, 0, 0))
        self._in = [rank for rank in everybody if comm.rank in graph.out_peers(rank, everybody, 0, 0)]
        self._buffers = BroadcastBuffers(comm, parameters.numel(), start.steps_by_rank[self._rank])
        self._deaths = comm.deaths()
        self.message_bytes = parameters.nbytes
        self._staleness = 0
        self._has_trained = start.global_steps > 0  # else the parameters are those of the seed
        self._healthy = True  # the parameters, as the last update left them
        self._is_owed = False  # what this update made is still to be written
        self._counts: Counter[str] = Counter()
        self._distances: list[Tensor] = []
        self._num_mixes = 0  # whose records have been written, too
        self._final: End | None = None

    @property
    def global_steps(self) -> int:
        return self._base_steps + int(self._steps.sum())

    @property
    def living(self) -> range:
        """All ranks: if one dies, the job ends."""
        return range(self._comm.size)

    @property
    def stop(self) -> Stop:
        if self._final is not None:
            return self._final.stop
        if self.global_steps >= self._budget_steps:
            self.stop_now(Stop.BUDGET)
        return Stop(int(self._buffers.stop.max()))

    def stop_now(self, reason: Stop) -> None:
        if self._final is None and not self._buffers.stop.any():
            self._buffers.stop[self._rank] = reason

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._deaths.end_if_any()
        self._buffers.steps[self._rank] += steps
        self._has_trained = True
        self._healthy = healthy
        self._is_owed = True
        if not self._write():
            self._counts["sends_without_buffer"] += healthy
        if not healthy:
            return self._heal()
        self._mix()
        return True

    def close(self, timeout_s: float) -> Stop:
        known = np.array(self._buffers.steps, np.uint64)
        end = agree_on_end(self._comm, self.stop, known, timeout_s)
        self._final = end
        return end.stop

    def final_parameters(self, timeout_s: float) -> Tensor:
        return average_of_ranks(self._comm, self._parameters, 1.0, self._has_trained, timeout_s)

    def metrics(self) -> dict[str, Any]:
        counts, self._counts = self._counts, Counter()
        distances, self._distances = self._distances, []
        consensus = float(torch.stack(distances).mean()) if distances else None
        return {"consensus_distance": consensus} | {key: counts[key] for key in _COUNTS}

    def state(self) -> ExchangeState:
        return ExchangeState(self._steps.tolist(), self._base_steps)

    @property
    def _steps(self) -> np.ndarray:
        """Steps of every rank, int64 or uint64 [ranks]."""
        return self._buffers.steps if self._final is None else self._final.steps_by_rank

    def _write(self) -> bool:
        """Take this rank's turn at its broadcast buffer, if it has not: put its model there, or say that it has none.
        False if an out-peer has not read the last."""
        buffers, rank = self._buffers, self._rank
        if not self._is_owed:
            return True
        if any(buffers.read[peer, rank] < buffers.written[rank] for peer in self._out):
            return False
        if self._healthy:
            buffers.models[rank].copy_(self._parameters)
            self._counts["models_sent"] += len(self._out)
        buffers.has_model[rank] = self._healthy
        buffers.fence()
        buffers.written[rank] += 1
        self._is_owed = False
        return True

    def _mix(self) -> None:
        """Mix if every in-peer has written; wait for that if this rank's model is too stale."""
        if not self._in:
            return
        if self._staleness >= self._max_staleness:
            self._wait_for_peers(self._long_wait(), math.inf)
        self._staleness += 1
        self._counts["staleness_updates"] = max(self._counts["staleness_updates"], self._staleness)
        if self._all_written():
            self._read()

    def _heal(self) -> bool:
        """Take in-peers' models in the place of this rank's. True if one came, False if training ends. Raises EndError
        if none comes."""
        wait = self._long_wait()
        while self._in:
            self._wait_for_peers(wait, _HEALING_S)
            if self._all_written() and self._read():
                return True
            if self.interrupt.signal is not None:
                self.stop_now(Stop.SIGNAL)
            if self.stop is not Stop.NONE:
                break
            if wait.took_s > _HEALING_S:
                raise EndError(
                    f"[rank {self._rank}] its parameters are not finite and no peer has sent finite ones for "
                    f"{_HEALING_S:.0f} s. Resume from the last checkpoint with a smaller learning rate."
                )
            self._is_owed = True  # the next turn: it has read those of peers that have none either
            self._write()
            time.sleep(_NAP_S)
            wait.look()
        return False

    def _read(self) -> bool:
        """Take every in-peer's turn, and mix with the models among them. False if there is none."""
        self._buffers.fence()
        models = [self._buffers.models[peer] for peer in self._in if self._buffers.has_model[peer]]
        if models:
            self._mix_with(reduce(torch.add, models).to(self._parameters.device), len(models))
        self._buffers.fence()
        for peer in self._in:
            self._buffers.read[self._rank, peer] += 1
        self._staleness = 0  # as if it had mixed, if no peer has a model
        return bool(models)

    def _mix_with(self, total: Tensor, k: int) -> None:
        """Mix, x <- (x + sum of k in-peers) / (1 + k), or replace a model that is not finite."""
        x = self._parameters
        if self._healthy and self._num_mixes % MIXES_A_MEASUREMENT == 0:
            self._distances.append((total / k - x)[: self._num_measured].norm())
        if self._healthy and k == 1:
            x.lerp_(total, 0.5)  # one pass
        elif self._healthy:
            x.add_(total).mul_(1 / (1 + k))
        else:
            torch.mul(total, 1 / k, out=x)
        self._num_mixes += 1
        self._counts["mixes"] += 1
        self._counts["models_mixed"] += k

    def _all_written(self) -> bool:
        buffers, rank = self._buffers, self._rank
        return all(buffers.written[peer] > buffers.read[rank, peer] for peer in self._in)

    def _long_wait(self) -> LongWait:
        return LongWait(self._rank, f"the model of rank {', '.join(map(str, self._in))}")

    def _wait_for_peers(self, wait: LongWait, most_s: float) -> None:
        """Wait until every in-peer has written, training ends, or `wait` took `most_s` seconds."""
        if self._all_written():
            return
        begin = time.perf_counter()

        def may_go_on() -> bool:
            self._deaths.end_if_any()
            if self.interrupt.signal is not None:
                self.stop_now(Stop.SIGNAL)
            self._write()
            return self._all_written() or self.stop is not Stop.NONE or wait.took_s > most_s

        wait_asleep(may_go_on, None, self.interrupt, _LONGEST_SLEEP_S, wait)
        self._waited_since(begin)


_COUNTS = ("staleness_updates", "mixes", "models_sent", "models_mixed", "sends_without_buffer")
