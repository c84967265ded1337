"""The launcher of this process's job, and the terminal that reads it. Loads neither torch nor MPI."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "prterun",
    "prted",
    "orted",
    "hydra_pmi_proxy",
    "srun",
    "slurmstepd",
)


_VARIABLES = r"OMPI_COMM_WORLD_\w+|PMIX?_\w+|MPI_LOCAL\w+|SLURM_(?:PROCID|LOCALID|STEP_NUM_TASKS)"
_ANSWER_S = 2.0


def _environment_int(*names: str, environment: Mapping[str, str] | None = None) -> int | None:
    environment = os.environ if environment is None else environment
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def rank_in(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that the launcher has given a process, by its environment variables; None without a launcher.
    `environment`: None for this process's."""
    return _environment_int("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", environment=environment)


def _tasks_of_step_here() -> int | None:
    """Return how many tasks of srun's step run on this node: srun tells `2(x3),1` and the node's number in the step."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    of_nodes = [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
    node = _environment_int("SLURM_NODEID")
    return of_nodes[node] if node is not None and node < len(of_nodes) else None


@dataclass(frozen=True)
class Launch:
    """Facts that the launcher gives in the environment before MPI starts: Open MPI's, one that speaks PMI, or srun.

    An mpirun inside a task of srun is the nearer one. `SLURM_NTASKS` would be the allocation's. Only a task of srun has
    `SLURM_STEP_NUM_TASKS`: a batch script and the ranks of its mpirun on that node lack it.
    """

    rank: int
    size: int
    local_rank: int | None = None  # among the ranks of this host; None: the launcher does not tell
    local_size: int = 1

    @classmethod
    def detect(cls) -> Launch:
        """Return the facts of this process; alone without a launcher."""
        return cls(
            rank=rank_in() or 0,
            size=_environment_int("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS") or 1,
            local_rank=_environment_int("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
            local_size=_environment_int("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") or _tasks_of_step_here() or 1,
        )


@cache
def can_survive() -> bool:
    """Return True if this process's job outlives its ranks. Found once: Gymnasium's AsyncVectorEnv takes the launcher's
    variables away while it starts its processes."""
    return outlives_ranks(os.environ)


def outlives_ranks(environment: Mapping[str, str]) -> bool:
    """Return True if a job was started so that it outlives its ranks: `mpirun --with-ft ulfm` of Open MPI 5.
    `environment`: a rank's environment variables."""
    return environment.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


_LIBC = ctypes.CDLL(None)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send it this signal, when the thread ends that started it."""
    parent_death_signal = 1
    _LIBC.prctl(parent_death_signal, number)


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher ends, even if the rank is stopped: a launcher that gives up a
    job does not wait for stopped ranks. Nothing is changed without a launcher."""
    launch = Launch.detect()
    if launch.size > 1 and launch.local_size < 32:  # PRRTE starts 32 and more by threads of their own
        die_with_parent()


def _ancestors() -> Iterator[tuple[int, str]]:
    """Return the processes above this one and their names, the nearest first. Raises OSError."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
        yield pid, before.partition("(")[2]
        pid = int(after.split()[1])


def launcher_process() -> int | None:
    """Return the nearest process above this one that belongs to a launcher, or None."""
    with suppress(OSError):
        return next((pid for pid, name in _ancestors() if name in _LAUNCHERS), None)
    return None


def speaks() -> bool:
    """Return True if this process is to say what all ranks would say: it is rank 0, or its launcher's variables are not
    to be believed."""
    return Launch.detect().rank == 0 or launcher_process() is None or rank_above() is not None


def rank_above() -> int | None:
    """Return the process, between this one and its launcher, that has loaded MPI: a rank that has started this program,
    and has passed its variables on. None if there is none."""
    if rank_in() is None:
        return None
    rank = None
    with suppress(OSError):
        for pid, name in _ancestors():
            if name in _LAUNCHERS:
                return rank
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                if any("/libmpi" in line for line in file):
                    rank = pid
    return None


def left_over() -> list[str]:
    """Return the names of the launcher's variables that this process has though its launcher is gone, as in a shell
    that a job opened; empty if it may be there.

    Without a launcher above, as in a container, Open MPI's may be outside, and then its port answers."""
    if launcher_process() is not None:
        return []
    names = [name for name in os.environ if re.fullmatch(_VARIABLES, name)]
    servers = {os.environ[name].rpartition("//")[2] for name in names if name.startswith("PMIX_SERVER_URI")}
    return [] if any(_answers(server) for server in servers) else sorted(names)


def _answers(server: str) -> bool:
    """Return True if something listens at `host:port`."""
    host, _, port = server.rpartition(":")
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
        return True
    return False


def terminal_size(stream: int = 1) -> tuple[int, int] | None:
    """Return (columns, lines) of the terminal that the job's output (2: its standard error) reaches, or None if it goes
    to a file or pipe.

    `isatty` cannot tell: Open MPI gives every rank a pseudo-terminal even when its own output goes to a file, and
    MPICH gives every rank a pipe even on a terminal. The launcher's own output decides, so this walks up to it.
    """
    owner = os.getpid()
    try:
        for pid, name in _ancestors():
            if name not in _LAUNCHERS:
                break
            owner = pid
        descriptor = os.open(f"/proc/{owner}/fd/{stream}", os.O_WRONLY | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        size = os.get_terminal_size(descriptor) if os.isatty(descriptor) else (0, 0)
        return (size[0], size[1]) if all(size) else None  # a terminal may not know its size
    except OSError:
        return None
    finally:
        os.close(descriptor)


def process_age_s() -> float:
    """Return the seconds since this process was started."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:  # a name that was cut within a letter
        start_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    # Not /proc/uptime: in a container that may be the container's, and these ticks are the host's.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
