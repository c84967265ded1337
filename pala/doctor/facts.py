"""The facts about a job: its launcher, hosts and ranks. All are gathered here, except the ping's.

They come in two stages: before MPI starts, and by a rank that loads torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mpi4py

from pala.run.provenance import installed_versions
from pala.system.errors import PalaError
from pala.system.jobs import environment_of_jobs, run_job
from pala.system.launcher import Launch, launcher_process
from pala.system.resources import available_memory_bytes, most_cores
from pala.system.search_path import refuse_another_pala

_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
)
# By a variable that only this launcher sets. An mpirun inside an allocation passes Slurm's on: its own come first.
_SIGNS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "MPI_LOCALNRANKS": "MPICH",
    "SLURM_STEP_NUM_TASKS": "Slurm",
    "PMI_SIZE": "",
}


@dataclass(frozen=True)
class Launcher:
    """The program that started this one, or, after a start by hand, the mpirun that `pala train -n` would start."""

    name: str = ""  # "Open MPI", "MPICH" or "Slurm", as far as its variables tell
    command: str = ""  # its path, if there is any
    processes: int = 0  # that it says it has started; 0: this program was started by hand
    rank: int = 0  # of this process, as the launcher counts


@dataclass(frozen=True)
class Host:
    """Facts that the ranks of a host have in common."""

    name: str
    python: str
    versions: dict[str, str]
    cores: list[int]  # that a launcher may give to its ranks
    most_cores: float  # cores' worth of time that a container or Slurm leaves the job; infinite if nothing says so
    memory_bytes: int  # that is available
    shm_bytes: int  # free in /dev/shm
    nvidia_driver: bool
    torch_cuda: str | None = None  # the CUDA that torch is built for
    gpus: list[str] = field(default_factory=list)
    bfloat16: bool | None = None
    atari_fault: str = ""
    sees_runs: bool | None = None  # what rank 0 writes where runs are to be


@dataclass(frozen=True)
class Rank:
    """Facts that each rank has of its own."""

    rank: int
    host: str
    cores: list[int]
    threads: int = 0  # 0: not known, as MPI did not start
    library: str = ""
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class PairPing:
    """Messages between two ranks, there and back."""

    ranks: tuple[int, int]
    round_trip_us: float
    megabytes_per_s: float


@dataclass(frozen=True)
class Job:
    """Facts of a job: all that the doctor knows."""

    launcher: Launcher
    hosts: list[Host]
    ranks: list[Rank]
    library: str  # the MPI that mpi4py loads: "Open MPI 5.0.11"
    standard: str = ""  # version of the MPI standard
    trial: str | None = None  # why a job of two ranks does not start; empty: it does; None: not tried
    slurm: dict[str, str] = field(default_factory=dict)
    local_ranks: int = 1  # on this host, as the launcher says
    fault_tolerant: bool = False
    mpi_fault: str = ""  # why MPI did not start
    runs: str = "runs"
    in_path: dict[str, str] = field(default_factory=dict)  # the `python`, say, that is found in place of this one's
    pings: list[PairPing] = field(default_factory=list)

    def ranks_of(self, host: Host) -> list[Rank]:
        """Return the host's ranks in the order of their numbers."""
        return [rank for rank in self.ranks if rank.host == host.name]


# ---- before MPI starts -----------------------------------------------------------------------------------------------


def launcher_here() -> Launcher:
    """Tell from the environment what started this process."""
    sign = next((sign for sign in _SIGNS if sign in os.environ), None)
    if sign is None:
        return Launcher()
    launch, name = Launch.detect(), _SIGNS[sign]
    # A shell of `srun --pty` is a step of one task.
    if name in ("Slurm", "") and os.environ.get("SLURM_STEP_NUM_TASKS") == "1" and launch.size == 1:
        return Launcher()
    return Launcher(name, processes=launch.size, rank=launch.rank)


def launcher_command(launcher: Launcher) -> str:
    """Return the path of the launcher's program; if there was none, of the mpirun that PALA would start."""
    if not launcher.processes:
        return shutil.which("mpirun", path=environment_of_jobs()["PATH"]) or ""
    if launcher.name == "Slurm":
        return shutil.which("srun") or ""
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{launcher_process()}/exe").readlink()
        mpirun = program.with_name("mpirun")  # which has become, or has started, another program
        return str(mpirun if mpirun.exists() else program)
    return ""


def library_here() -> tuple[str, str]:
    """Return the MPI that mpi4py loads and its version of the standard; nothing if it loads none."""
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return "", ""
    name, version = MPI.get_vendor()
    return f"{name} {_dotted(version)}", _dotted(MPI.Get_version())


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def slurm_here() -> dict[str, str]:
    """Return Slurm's variables, if it has given any."""
    return {name: os.environ[name] for name in _SLURM if name in os.environ}


def others_in_path() -> dict[str, str]:
    """Return the `python` and `mpirun` that a shell finds in place of those beside this Python, or "missing"."""
    own = Path(sys.executable).parent
    found = {name: shutil.which(name) or "missing" for name in ("python", "mpirun") if (own / name).exists()}
    return {name: path for name, path in found.items() if Path(path).parent.resolve() != own.resolve()}


def host_here(launcher: Launcher) -> Host:
    """Describe this host, without what torch and ale-py tell of it."""
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    cores = _cores_of_launcher(launcher)
    return Host(
        name=platform.node(),
        python=sys.executable,
        versions=installed_versions() | {"pala's files": _checksum_of_sources()},
        cores=cores,
        most_cores=most_cores(set(cores)),
        memory_bytes=available_memory_bytes(),
        shm_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        nvidia_driver=Path("/dev/nvidiactl").exists(),
    )


def rank_here() -> Rank:
    """Describe this process as rank 0, without what MPI tells of it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Rank(0, platform.node(), sorted(os.sched_getaffinity(0)), visible_gpus=visible)


def _cores_of_launcher(launcher: Launcher) -> list[int]:
    """Return the cores that the launcher may give to ranks.

    It binds ranks, not itself. Slurm's runs outside of the job, and may use more than it gives."""
    bound_alike = not launcher.processes or launcher.name == "Slurm"
    return sorted(os.sched_getaffinity(0 if bound_alike else launcher_process() or 0))


def _checksum_of_sources() -> str:
    """Return a checksum of pala's own files: a stale copy on another host has the same version."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]


# ---- with torch ------------------------------------------------------------------------------------------------------


def with_torch(host: Host) -> Host:
    """Add what torch and ale-py tell of the host. To load them takes seconds, so one rank of a host does, and late."""
    import torch

    from pala.system.device import has_bfloat16

    return replace(
        host,
        torch_cuda=torch.version.cuda,
        # As training asks: a driver that is too old for torch is counted, but its name raises.
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        bfloat16=has_bfloat16(torch.device("cpu")),
        atari_fault=_atari_fault(),
    )


def _atari_fault() -> str:
    """Return why no game of Pong can be begun; empty if one was."""
    from pala.config import EnvConfig
    from pala.envs.vector import make_envs

    try:
        make_envs(EnvConfig(num_envs=1)).close()
    except (PalaError, ImportError, OSError, RuntimeError) as error:
        return str(error)
    return ""


# ---- the trial of mpirun, before this process itself has anything to do with MPI -------------------------------------

_TRIAL_S = 60.0


def try_mpirun(mpirun: str) -> str:
    """Let two ranks begin as they do in training. Returns why they do not; empty if they do."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            refuse_another_pala()
            run_job([mpirun, "-np", "2", sys.executable, "-m", "pala.train", "--help"], log, _TRIAL_S)
        except (PalaError, OSError) as error:
            return str(error).replace(f" ('{log}')", "")  # it will not be there
    return ""
