"""The beginning of a timeline: the clocks of all ranks against each other, and each rank's file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pala.comm.agreement import collectively
from pala.comm.base import Communicator
from pala.system.errors import PalaError, reason
from pala.system.trace import Trace, trace_path

_ROUNDS = 16


class Clock(NamedTuple):
    """A rank's clock against that of rank 0."""

    offset_s: float  # to be added to this rank's time
    error_s: float  # it is no further off


def compare_clocks(comm: Communicator, now_s: Callable[[], float] = time.perf_counter) -> Clock:
    """Compare this rank's clock with that of rank 0. Collective.

    Each round is one reduction of what the clocks show. No rank ends a reduction before every rank has begun it, which
    bounds the difference of two clocks from both sides; the narrowest bounds of all rounds count. Clocks whose
    difference may be 0 are one: those of ranks on one host.
    """
    begun, ended = np.zeros((_ROUNDS, comm.size)), np.zeros(_ROUNDS)
    for round_ in range(_ROUNDS):
        comm.barrier()  # asleep: a reduction would spin
        begun[round_, comm.rank] = now_s()
        comm.reduce(begun[round_], "sum")
        ended[round_] = now_s()
    ended_first = comm.bcast(ended)
    least = float((begun[:, 0] - ended).max())
    most = float((ended_first - begun[:, comm.rank]).min())
    if least <= 0 <= most:
        return Clock(0.0, 0.0)
    return Clock((least + most) / 2, (most - least) / 2)


def begin_trace(comm: Communicator, folder: Path) -> Trace:
    """Begin this rank's timeline in a folder, which is made. Collective. Raises CollectiveError if a rank cannot write
    there, or if the folder holds a timeline."""
    clock = compare_clocks(comm)
    return collectively(comm, lambda: open_trace(folder, comm.rank, comm.host, clock))


def open_trace(folder: Path, rank: int, host: str, clock: Clock | None) -> Trace:
    """Begin the timeline of one rank. `clock`: None for a rank that cannot compare its own: the time of day is taken
    for equal on all hosts. Raises PalaError if the folder holds a timeline, or none can be written. Not collective."""
    path = trace_path(folder, rank)
    offset_s, error_s = clock if clock is not None else (None, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Trace(
            path,
            format=1,
            rank=rank,
            host=host,
            offset_s=offset_s,
            error_s=error_s,
            clock_s=time.perf_counter(),
            unix_s=time.time(),
        )
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise PalaError(
                f"'{path}' exists already, and no timeline is written over: name another folder, or move it away."
            ) from None
        raise PalaError(f"No trace can be written into '{folder}': {reason(error)}.") from None
