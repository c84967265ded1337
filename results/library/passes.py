"""Measure the processor time of each pass over a model that an exchange makes, and of the copies that bound it.

    mpirun -np 2 python results/library/passes.py              # appends a JSON line a compression to passes.jsonl

`PYTHONPATH` says of which checkout. It is the processor time of the thread that makes the pass: other load on the
machine counts only in so far as it uses the same memory. `MPI` is rank 0's receipt of a model that rank 1 has just
written.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pala
from pala.comm.base import Received
from pala.comm.mpi import MpiCommunicator
from pala.comm.mpi_process import start_mpi
from pala.config import ExchangeConfig
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import make_codec
from pala.exchange.gossip.messages import Kind, gossip_sizes
from pala.exchange.gossip.models import SendBuffer, TensorModels
from pala.exchange.wire import Message, Wire

PARAMETERS, REPEATS = 10_000_000, 15
KINDS = (Kind.OFFER, Kind.ANSWER)


class Passes:
    """Milliseconds of processor time of each pass, as often as it was made."""

    def __init__(self) -> None:
        self.took_ms: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = action()
        self.took_ms[name].append(round(1e3 * (time.thread_time() - begin), 3))
        return result


class Rank:
    """One end of a pair."""

    def __init__(self, number: int, compression: str) -> None:
        self.parameters = torch.randn(PARAMETERS)
        codec = make_codec(ExchangeConfig(compression=compression), self.parameters)
        wire = Wire(2, PARAMETERS, 1, gossip_sizes(codec.sizes, KINDS))
        self.number, self.models = number, TensorModels(self.parameters, codec, wire)
        self.snapshot: SendBuffer = self.models.new_snapshot()

    def message(self, kind: Kind) -> Message:
        return Message(kind, self.number, 1, 1.0 if kind is Kind.OFFER else 0.5, Stop.NONE, np.zeros(2, np.uint64))

    def receive(self, sender: Rank, offer: SendBuffer | None = None) -> None:
        data = self.models.memory_for(len(sender.snapshot.data))
        assert data is not None
        data[:] = sender.snapshot.data
        assert self.models.open(Received(sender.number, data, True, 0.0), offer).refusal is None


def bounds(passes: Passes) -> None:
    """Copy and read vectors of this length: what the memory gives."""
    first, second = torch.randn(PARAMETERS), torch.randn(PARAMETERS)
    for _ in range(REPEATS):
        passes.time("read a vector", lambda: float(first.sum()))
        passes.time("copy a vector", lambda: second.copy_(first))
        passes.time("add to a vector", lambda: second.add_(first, alpha=1e-9))
        passes.time("write new memory", lambda: torch.empty(PARAMETERS).zero_())


def exchange(compression: str, passes: Passes) -> None:
    """Make the passes of an offer and its answer, without a network."""
    here, there = Rank(0, compression), Rank(1, compression)
    for number in range(REPEATS):
        passes.time("look at the own model", lambda: float(here.parameters.sum()))
        passes.time("snapshot", lambda: here.models.fill(here.snapshot, here.message(Kind.OFFER), True))
        passes.time("copy and check", lambda: there.receive(here))
        there.models.add(1.0)
        there.models.fill_answer(there.snapshot, there.message(Kind.ANSWER), 0)
        name, measure = ("move to an offer", False) if number % 3 else ("move to an offer, and measure", True)
        passes.time(name, lambda measure=measure: there.models.pull(0.5, measure))
        here.receive(there, here.snapshot)
        passes.time("keep an answer's difference", lambda: here.models.keep(here.snapshot))
        passes.time("move by it", lambda: here.models.move(here.snapshot, 0.5))


def receipt(comm: MpiCommunicator, compression: str, passes: Passes) -> None:
    """Receive a model by MPI. Collective."""
    rank = Rank(comm.rank, compression)
    for _ in range(REPEATS):
        comm.barrier()
        rank.models.fill(rank.snapshot, rank.message(Kind.OFFER), True)
        comm.barrier()
        if comm.rank == 1:
            request = comm.mpi.Issend(rank.snapshot.data, 0)
            while not request.Test():
                time.sleep(0.001)
            continue
        while (message := comm.mpi.Improbe(1)) is None:
            time.sleep(0.001)
        data = rank.models.memory_for(len(rank.snapshot.data))
        passes.time("MPI", lambda message=message, data=data: message.Irecv(data).Wait())


def main() -> None:
    """Measure both compressions on rank 0."""
    from bench import HERE, commit_of, facts  # after pala: it puts its own checkout's first

    torch.set_num_threads(1)
    comm = start_mpi()
    for compression in ("none", "bfloat16"):
        passes = Passes()
        if comm.rank == 0:
            bounds(passes)
            exchange(compression, passes)
        receipt(comm, compression, passes)
        if comm.rank == 0:
            line = {"compression": compression, "date": time.strftime("%FT%TZ", time.gmtime())}
            line |= {"load_1min_before": round(os.getloadavg()[0], 2)}
            line |= {"took_ms": passes.took_ms} | facts() | {"commit": commit_of(Path(pala.__file__).parent)}
            with (HERE / "passes.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
