"""One rank of a job: it trains, or is a spare, sleeps, and takes the place of a rank that dies.

A spare that sleeps has loaded no torch, made no environments and has no model. It polls for messages and deaths ten
times a second, as every data proxy does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pala.algorithms import ALGORITHMS
from pala.comm.base import Communicator
from pala.job.job import Job, RunInfo
from pala.job.request import Request, Result
from pala.run.run import note_failure
from pala.system.errors import CollectiveError, EndError
from pala.system.resources import loading


def run_rank(comm: Communicator, request: Request) -> Result:
    """Train on all ranks of `comm`, of which the last `run.spares` sleep until they are needed. Collective."""
    return run_in(Job(comm, request.config, request.resume), request)


def run_in(job: Job, request: Request) -> Result:
    """Do this rank's part of a job. Collective."""
    if job.trainers is None:
        with job.comm.interrupt.installed():
            return _serve_as_spare(job, request)
    with loading():
        from pala.job.start import start  # before signals are caught: until it is loaded there is nothing to keep

    with job.comm.interrupt.installed():
        return start(job, request)


def _serve_as_spare(job: Job, request: Request) -> Result:
    """Sleep until this rank is needed, then train to the end; or until training ends."""
    info = job.tell_run(None)
    if info is None:
        raise CollectiveError("The ranks that train did not start.")
    began_s = time.perf_counter() - info.time_s
    sleeping = ALGORITHMS[request.config.algorithm].sleep(job.comm, request.config, info.exchange)
    try:
        with _noting_the_end(job, info):
            is_needed = sleeping.until_needed()
        if is_needed:
            with loading():
                from pala.job.start import start_spare  # torch, environments: now they are needed

            result = start_spare(job, request, info, began_s, sleeping)
            if result is not None:
                return result
        if not job.comm.interrupt.leave_requested:
            with _noting_the_end(job, info):
                sleeping.close(job.patience_s)
    except BaseException:
        sleeping.transport.abandon()  # nothing else may call MPI before
        raise
    job.comm.detach()
    return Result(info.folder, "spared", sleeping.global_steps, None, False, 0)


@contextmanager
def _noting_the_end(job: Job, info: RunInfo) -> Iterator[None]:
    """Note in run.json why the job failed, if it ends inside the block."""
    try:
        yield
    except EndError as error:
        note_failure(info.folder, info.segment.name, job.comm.rank, error)
        raise
