"""One rank of a job: it trains, or is a spare, sleeps, and takes the place of a rank that dies.

A spare that sleeps has loaded no torch, made no environments and has no model. It polls for messages and deaths ten
times a second, as every data proxy does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from pala.comm.base import Communicator
from pala.config import Config
from pala.exchange.gossip.sleeping import SleepingGossip
from pala.exchange.sleeping import Beginning, Sleeping
from pala.gorila.sleeping import SleepingGorila
from pala.run.job import Briefing, Job
from pala.run.records import note_failure
from pala.run.request import Request
from pala.run.result import Result
from pala.system.errors import CollectiveError, EndError
from pala.system.interrupt import Interrupt
from pala.system.output import tell
from pala.system.resources import loading

_SLEEPING: dict[str, Callable[[Communicator, Config, Beginning, Interrupt], Sleeping]] = {  # collective
    "a2c": SleepingGossip, "gorila": SleepingGorila,
}  # fmt: skip


def run_rank(comm: Communicator, request: Request, interrupt: Interrupt | None = None) -> Result:
    """Train on all ranks of `comm`, of which the last `run.spares` sleep until they are needed. Collective.

    `interrupt`: in place of the process's signals.
    """
    job = Job(comm, request.config, request.resume)
    if job.trainers is None:
        with (interrupt or Interrupt()).installed() as interrupt:
            comm.watch_signals(interrupt)
            return _stand_by(job, request, interrupt)
    with loading():
        from pala.run.start import train  # before signals are caught: until it is loaded there is nothing to keep

    with (interrupt or Interrupt()).installed() as interrupt:
        comm.watch_signals(interrupt)
        job.trainers.watch_signals(interrupt)
        return train(job, request, interrupt)


def _stand_by(job: Job, request: Request, interrupt: Interrupt) -> Result:
    """Sleep until this rank is needed, then train to the end; or until training ends."""
    briefing = job.brief(None)
    if briefing is None:
        raise CollectiveError("The ranks that train did not start.")
    began_s = time.perf_counter() - briefing.time_s
    sleeping = _SLEEPING[request.config.algorithm](job.comm, request.config, briefing.exchange, interrupt)
    try:
        with _noting_the_end(job, briefing):
            is_needed = sleeping.until_needed()
        if is_needed:
            with loading():
                from pala.run.start import take_place  # torch, environments: now they are needed

            result = take_place(job, request, briefing, began_s, sleeping, interrupt)
            if result is not None:
                return result
        if not interrupt.leave_requested:
            with _noting_the_end(job, briefing):
                sleeping.close(job.patience_s)
    except BaseException:
        sleeping.transport.abandon()  # nothing else may call MPI before
        raise
    job.comm.depart()
    return Result(briefing.segment.run, "spared", sleeping.global_steps, None, False, 0)


def evaluate_and_draw(result: Result, config: Config, interrupt: Interrupt) -> Result:
    """How training from the command line and `pala.fit` conclude."""
    try:
        from pala.run.conclusion import conclude  # torch: a spare that sleeps has not loaded it
    except Exception as error:  # an update of the code since training began: the next rank would meet it as well
        tell(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}")
        if result.signal is not None:
            return result
        said = f"failed ({type(error).__name__}: {error})"
        tell(f"      evaluation, learning curve: {said}")
        return replace(result, outcomes={"evaluation": said, "learning curve": said})

    return conclude(result, config, interrupt)


@contextmanager
def _noting_the_end(job: Job, briefing: Briefing) -> Iterator[None]:
    """Say in run.json why a job failed that ends inside the block."""
    try:
        yield
    except EndError as error:
        note_failure(briefing.segment, job.comm.rank, error)
        raise
