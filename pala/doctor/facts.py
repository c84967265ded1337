"""The facts about a job: its launcher, hosts and ranks. All are gathered here, except the ping's.

They come in three stages: before MPI starts, once it runs, and by a rank that loads torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import mpi4py

from pala.run.provenance import installed_versions
from pala.system.errors import PalaError
from pala.system.jobs import environment_of_jobs, run_job
from pala.system.launcher import Launch, launcher_process
from pala.system.resources import available_memory_bytes, most_cores, physical_cores

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
class Product:
    """A library or a launcher: "Open MPI" 5.0.11. Empty where it does not say."""

    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'unknown'} {self.version}".strip()

    @property
    def family(self) -> str:
        """The MPIs that can start each other's ranks; empty for Slurm and for what is unknown."""
        if self.name in ("MPICH", "Intel MPI", "MVAPICH"):
            return "MPICH"
        return "Open MPI" if self.name == "Open MPI" else ""

    @classmethod
    def read(cls, text: str) -> Product:
        """Read what `mpirun --version`, `srun --version` or MPI_Get_library_version says."""
        for name, pattern in (
            ("Open MPI", r"Open MPI\W+v?([\d.]+)"),
            ("Intel MPI", r"Intel\(R\) MPI Library\D*([\d.]+)"),
            ("MVAPICH", r"MVAPICH2?\D*([\d.]+)"),
            ("MPICH", r"(?:MPICH|HYDRA)\D*([\d.]+)"),
            ("Slurm", r"slurm\D*([\d.]+)"),
        ):
            if match := re.search(pattern, text):
                return cls(name, match[1])
        return cls()


@dataclass(frozen=True)
class Launcher:
    """The program that started this one, or, after a start by hand, the mpirun that would start training."""

    product: Product = field(default_factory=Product)
    command: str = ""  # its path, if there is any
    processes: int = 0  # that it says it has started; 0: this program was started by hand
    rank: int = 0  # of this process, as the launcher counts


@dataclass(frozen=True)
class Trial:
    """The outcome of starting jobs with mpirun. Only where this program was started by hand."""

    refuses_root: bool = False
    size: int = 0  # that a job of two ranks found; 0: it did not start
    beyond_cores: bool | None = None  # whether more processes than cores start; None: not tried
    failure: str = ""  # the job's words if it failed
    num_beyond: int = 0  # how many processes that were


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
    library: Product = field(default_factory=Product)
    thread_level: str = ""
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
    library: Product
    standard: str = ""  # version of the MPI standard
    trial: Trial | None = None
    slurm: dict[str, str] = field(default_factory=dict)
    local_ranks: int = 1  # on this host, as the launcher says
    fault_tolerant: bool = False
    mpi_fault: str = ""  # why MPI did not start
    alone: bool = False  # it did, but for each process of a job alone
    runs: str = "runs"
    python_in_path: str = ""
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
    return Launcher(Product(name), processes=launch.size, rank=launch.rank)


def launcher_command(launcher: Launcher) -> str:
    """Return the path of the launcher's program; of the mpirun in PATH if there was none."""
    if not launcher.processes or launcher.product.name == "Slurm":
        return shutil.which("srun" if launcher.processes else "mpirun") or ""
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{launcher_process()}/exe").readlink()
        mpirun = program.with_name("mpirun")  # which has become, or has started, another program
        return str(mpirun if mpirun.exists() else program)
    return ""


def library_here() -> tuple[Product, str]:
    """Return the MPI that mpi4py loads and its version of the standard; nothing if it loads none."""
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return Product(), ""
    return Product.read(MPI.Get_library_version()), ".".join(map(str, MPI.Get_version()))


def slurm_here() -> dict[str, str]:
    """Return Slurm's variables, if it has given any."""
    return {name: os.environ[name] for name in _SLURM if name in os.environ}


def python_in_path() -> str:
    """Return the `python` that a launcher would find, if it is not this one."""
    found = shutil.which("python") or "missing"
    return "" if Path(found).parent == Path(sys.executable).parent else found


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
    bound_alike = not launcher.processes or launcher.product.name == "Slurm"
    return sorted(os.sched_getaffinity(0 if bound_alike else launcher_process() or 0))


def _checksum_of_sources() -> str:
    """Return a checksum of pala's own files: a stale copy on another host has the same version."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]


# ---- once MPI runs ---------------------------------------------------------------------------------------------------


def with_mpi(rank: Rank, library: Product, threads: int) -> Rank:
    """Add what MPI tells of the rank."""
    from mpi4py import MPI  # `library_here` has seen to it that this does not start MPI

    levels = {MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED", MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE"}
    return replace(rank, threads=threads, library=library, thread_level=levels[MPI.Query_thread()])


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


_TRIAL_S = 60.0  # a job
# The working directory, which may be a run's folder from elsewhere, is taken off the path first.
_HELLO = "import sys; sys.path[:] = filter(None, sys.path); from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)"
_ROOT = ("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


# ---- the trial of mpirun, before this process itself has anything to do with MPI -------------------------------------


def identified(launcher: Launcher) -> Launcher:
    """Add what the launcher's `--version` says of it."""
    try:
        done = subprocess.run([launcher.command, "--version"], capture_output=True, text=True, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return launcher
    product = Product.read(done.stdout + done.stderr)
    trusted = not launcher.processes or product.family == launcher.product.family  # all ranks must see the same family
    return replace(launcher, product=product) if product.name and trusted else launcher


def try_mpirun(mpirun: str) -> Trial:
    """Start a job of two ranks, and one of more processes than cores."""
    said, fault = _attempt(mpirun, "-np", "2", sys.executable, "-c", _HELLO)
    refuses_root = "run as root" in said
    prefix = _ROOT if refuses_root else ()
    if refuses_root:  # what else is there to know?
        said, fault = _attempt(*prefix, mpirun, "-np", "2", sys.executable, "-c", _HELLO)
    size = re.search(r"^size (\d+)$", said, re.MULTILINE)
    many = physical_cores(os.sched_getaffinity(0)) + 1  # Open MPI counts cores, not their threads
    said_of_many, fault_of_many = _attempt(*prefix, mpirun, "-np", str(many), "true")
    is_broken = bool(fault and fault_of_many) and "slots" not in said_of_many  # whatever the number of ranks
    beyond_cores = None if is_broken else not fault_of_many
    if fault and beyond_cores is False and "slots" in said:  # one core: two ranks are too many
        said, fault = _attempt(*prefix, mpirun, "-np", "1", sys.executable, "-c", _HELLO)
        size = None
    return Trial(refuses_root, int(size[1]) if size and not fault else 0, beyond_cores, fault, many)


def _attempt(*words: str) -> tuple[str, str]:
    """Run a job as somebody who types mpirun would, without what PALA gives its own jobs. Returns what it said, and why
    it failed; empty if it did not."""
    added = environment_of_jobs().keys() - os.environ.keys()
    plain = ["env", *(word for name in sorted(added) for word in ("-u", name))]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            run_job([*plain, *words], log, _TRIAL_S)
            fault = ""
        except (PalaError, OSError) as error:
            fault = str(error).replace(f" ('{log}')", "")  # it will not be there
        return log.read_text(encoding="utf-8", errors="replace"), fault
