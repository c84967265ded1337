"""The entry of a process into a job, for programs and scripts alike; and how an error there ends it.

facts ──▶ MPI ──▶ request ──▶ job (ranks, cores) ──▶ thread pools ──▶ training
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pala.comm.mpi_process import abort, check_slurm_tasks, has_started_mpi, start_mpi, start_mpi_or_exit
from pala.config import Config
from pala.job.job import Job
from pala.job.request import Request, Result
from pala.run.provenance import provenance
from pala.system.errors import CollectiveError
from pala.system.interrupt import Interrupt, note_leave
from pala.system.launcher import Launch, die_with_launcher
from pala.system.output import log, notify_supervisor, one_sentence_for_mistakes, print_result
from pala.system.resources import prepare

if TYPE_CHECKING:
    from pala.comm.mpi import MpiCommunicator


@cache
def facts() -> dict[str, Any]:
    """Return what run.json says of the first rank's command and versions; empty on other ranks. First called before MPI
    starts, since a process that has started MPI must start no others."""
    return provenance(may_start_processes=not has_started_mpi()) if Launch.detect().rank == 0 else {}


@contextmanager
def program() -> Iterator[MpiCommunicator]:
    """Start MPI for a program of PALA's, and give it all ranks. An error inside the block ends the process: with status
    2 where every rank has met it, else by `abort`."""
    die_with_launcher()
    notify_supervisor("begun")
    facts()  # which asks git, and must not once MPI runs
    comm = start_mpi_or_exit()
    notify_supervisor("up")
    try:
        yield comm
    except CollectiveError as error:  # every rank is here
        if comm.rank == 0:
            log(f"pala: error: {error}")
        sys.exit(2)
    except BaseException as error:
        if isinstance(error, SystemExit) and "pala.run.agent" not in sys.modules:  # `--help`, on all ranks
            raise
        abort(comm, error)  # of the user's code, say, on this rank: the others would wait for it


@contextmanager
def script() -> Iterator[MpiCommunicator]:
    """Start MPI for a script of the user's, if it has not, and give it all ranks. An error inside the block is raised;
    but with several ranks one that is this rank's own ends the process by `abort`."""
    if threading.current_thread() is threading.main_thread():
        note_leave()
    facts()  # as in `program`
    one_sentence_for_mistakes()
    comm = start_mpi()
    try:
        yield comm
    except CollectiveError:
        raise  # on every rank
    except BaseException as error:
        if comm.size > 1:
            abort(comm, error)  # the other ranks would wait forever
        raise


def train(comm: MpiCommunicator, request: Request, greet: Callable[[Job], None]) -> Result:
    """Train as requested on all ranks of MPI. `greet`: says the first words, on rank 0. Collective. Raises
    CollectiveError for a mistake that all ranks see."""
    job = Job(comm, request.config, request.resume)
    if comm.rank == 0:
        check_slurm_tasks(comm.size, job.spares)
        greet(job)
        _note_on_threads(job, request.config)
        if request.config.run.console != "none":
            job.notes.begin("loads torch and the algorithm")
    prepare(job.threads)
    try:
        # Here and no earlier: it loads torch and numpy, whose thread pools are sized when they load.
        from pala.job.rank import run_in

        return run_in(job, request)
    finally:
        job.notes.end()


def _note_on_threads(job: Job, config: Config) -> None:
    """Report that OMP_NUM_THREADS is not followed: ranks share out the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked and asked != str(job.threads) and not config.run.threads:
        log(
            f"OMP_NUM_THREADS is {asked}, but the ranks share out the cores: this one takes {job.threads}. "
            f"`--run.threads {asked}` sets their number."
        )


def evaluate_and_draw(result: Result, config: Config, interrupt: Interrupt) -> Result:
    """Conclude a training from the command line or `pala.fit`: see `conclusion.conclude`."""
    try:
        from pala.job.conclusion import conclude  # torch: a spare that sleeps has not loaded it
    except Exception as error:  # the code was changed since training began: the next rank would fail as well
        print_result(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}")
        if result.signal is not None:
            return result
        said = f"failed ({type(error).__name__}: {error})"
        print_result(f"      evaluation, learning curve: {said}")
        return replace(result, outcomes={"evaluation": said, "learning curve": said})

    return conclude(result, config, interrupt)
