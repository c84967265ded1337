"""`pala doctor`: what stands in the way of training here, and what to do about it.

    this machine, and whether mpirun works    pala doctor
    a job as it would train                   mpirun -np 4 python -m pala.doctor
    under Slurm                               srun python -m pala.doctor
    all facts, for a bug report               mpirun -np 4 python -m pala.doctor --json doctor.json

Ends with status 0 if nothing stops training, 1 if something would, 2 after a mistake. docs/doctor.md explains
the advice.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.comm.agreement import cores_per_rank
from pala.comm.mpi_process import abort, close_mpi, start_mpi
from pala.doctor import facts
from pala.doctor.checks import before_start, examine
from pala.doctor.facts import Host, Job, Launcher, try_mpirun
from pala.doctor.ping import ping
from pala.doctor.report import report
from pala.doctor.watchdog import Watchdog
from pala.run.provenance import provenance
from pala.system.command_line import read_command
from pala.system.errors import PalaError
from pala.system.files import write_json
from pala.system.launcher import Launch, can_survive, die_with_launcher, speaks
from pala.system.output import log, open_closed_streams, print_result
from pala.system.resources import prepare

if TYPE_CHECKING:
    from pala.comm.mpi import MpiCommunicator

_PROGRAM = "python -m pala.doctor"
_LIMIT_S, _LOADING_S = 120.0, 300.0  # a network file system may be slow
_HEAD_START_S = 3.0
_TOGETHER = "Look whether all hosts reach each other (firewalls, several networks: docs/doctor.md)."
_ALONE = "Look at what this host is waiting for: a file system, a GPU's driver."


@dataclass(frozen=True)
class Command:
    """Find out what a user must know of this machine, or of this job, before training."""

    json: Path | None = None
    """File for all facts and the advice, as for a bug report."""
    runs: Path = Path("runs")
    """Folder that runs are to be made in: must be seen by all hosts."""


def main() -> None:
    """Run `pala doctor` on a rank."""
    open_closed_streams()
    try:
        _advise()
    except KeyboardInterrupt:
        sys.exit(130)


def _advise() -> None:
    die_with_launcher()
    launcher = facts.launcher_here()
    if not launcher.processes:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a trial is ended, too
    try:
        command = read_command(_PROGRAM, sys.argv[1:], Command())
    except PalaError as error:
        _leave_to_first()
        log(f"pala: error: {error}")
        sys.exit(2)
    known = provenance() if launcher.rank == 0 else {}
    with Watchdog(launcher.rank) as watchdog:
        job = _alone(launcher, command, watchdog)
        comm, job = _started(job, watchdog)
        if comm is None:
            _leave_to_first()
            sys.exit(_conclude(job, command, known))
        try:
            job = _together(comm, job, watchdog)
        except (Exception, KeyboardInterrupt) as error:
            abort(comm, error)
        status = _conclude(job, command, known) if comm.rank == 0 else 0
        watchdog.expect("the end of MPI", _LIMIT_S, _TOGETHER)
        leave = close_mpi(comm)
    leave(status)


def _leave_to_first() -> None:
    """End all processes except the first, which alone speaks; their status must not make mpirun kill it."""
    if not speaks():
        sys.exit(0)


def _alone(launcher: Launcher, command: Command, watchdog: Watchdog) -> Job:
    """Gather what this process knows before MPI starts."""
    library, standard = facts.library_here()
    launcher = replace(launcher, command=facts.launcher_command(launcher))
    trial = None
    if launcher.command and not launcher.processes:
        watchdog.expect("mpirun's trial", _LOADING_S, _ALONE)
        trial = try_mpirun(launcher.command)
    return Job(
        launcher=launcher,
        hosts=[facts.host_here(launcher)],
        ranks=[facts.rank_here()],
        library=library,
        standard=standard,
        trial=trial,
        slurm=facts.slurm_here(),
        local_ranks=Launch.detect().local_size,
        fault_tolerant=can_survive(),
        runs=str(command.runs),
        in_path=facts.others_in_path(),
    )


def _started(job: Job, watchdog: Watchdog) -> tuple[MpiCommunicator | None, Job]:
    """Start MPI. Returns the communicator, if there is one, and the job with why there is none."""
    for advice in before_start(job):
        if not Launch.detect().local_rank:
            log(f"pala: {advice.text}")  # perhaps the last words,
        else:
            time.sleep(_HEAD_START_S)  # which must not come too late
    watchdog.expect("MPI's start", _LIMIT_S, _TOGETHER)
    try:
        return start_mpi(), job
    except PalaError as error:
        return None, replace(job, mpi_fault=str(error))


def _together(comm: MpiCommunicator, job: Job, watchdog: Watchdog) -> Job:
    """Gather on every rank what all ranks know. Collective."""

    def expect(what: str) -> None:
        watchdog.expect(what, (2 if what.startswith("waiting") else 1) * _LIMIT_S, _TOGETHER)

    expect("waiting for all ranks")
    threads = cores_per_rank(comm)
    rank = replace(job.ranks[0], rank=comm.rank, threads=threads, library=job.library)
    ranks = comm.allgather(rank)
    host = _with_runs(comm, job)
    if rank.rank == min(other.rank for other in ranks if other.host == rank.host):
        prepare(threads)
        watchdog.expect("loading torch and Atari", _LOADING_S, _ALONE)
        host = facts.with_torch(host)  # in threads of this number
    watchdog.expect("waiting for torch and Atari on other hosts", 2 * _LOADING_S, _TOGETHER)
    hosts: dict[str, Host] = {}
    for found in comm.allgather(host):
        hosts.setdefault(found.name, found)  # the first of a host has seen most
    if job.launcher.name == "Slurm":  # which tells a task of its own cores alone
        for name in hosts:
            given = {core for rank in ranks if rank.host == name for core in rank.cores}
            hosts[name] = replace(hosts[name], cores=sorted(given))
    pings = ping(comm, [rank.host for rank in ranks], expect)
    return replace(job, hosts=list(hosts.values()), ranks=ranks, pings=pings)


def _with_runs(comm: MpiCommunicator, job: Job) -> Host:
    """Find out whether this host sees what rank 0 writes where runs are to be. Collective."""
    file = None
    if comm.rank == 0:
        folder = Path(job.runs)
        while not os.path.lexists(folder):  # a link to nothing is no folder that a run could make
            folder = folder.parent
        try:
            descriptor, name = tempfile.mkstemp(prefix=".pala-doctor-", dir=folder)
            os.close(descriptor)
            file = Path(name)
        except OSError:
            pass
    file = comm.bcast(file)
    host = replace(job.hosts[0], sees_runs=file is not None and os.path.exists(file))  # noqa: PTH110
    comm.barrier()
    if comm.rank == 0 and file is not None:
        file.unlink()
    return host


def _conclude(job: Job, command: Command, known: dict[str, Any]) -> int:
    """Print the report and write the facts. Returns the exit status."""
    findings = examine(job)
    print_result(report(job, findings))
    if command.json is not None:
        table = {"format": 1} | known | {"job": asdict(job), "advice": [asdict(item) for item in findings.advice]}
        try:
            write_json(command.json, table, indent=1)
        except OSError as error:
            why = error.strerror or error
            log(f"pala: error: '--json': '{command.json}' cannot be written ({why}); name another file.")
            return 2
    return 1 if any(advice.stops for advice in findings.advice) else 0


if __name__ == "__main__":
    main()
