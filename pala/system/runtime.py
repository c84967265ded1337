"""The process a rank runs in: threads, memory, the launcher, its terminal, and signals. Nothing here loads torch or
initialises MPI.

`prepare()` must run before torch and numpy are imported: thread pools are sized when they load.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import math
import os
import re
import signal
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

from pala.system.errors import CollectiveError, PalaError

_CGROUP, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
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


def _environment_int(*names: str) -> int | None:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


SUPERVISED, ANNOUNCEMENT = "PALA_SUPERVISED", "pala-announcement:"


@dataclass(frozen=True)
class Launch:
    """What the launcher says in the environment, before MPI itself is asked: Open MPI's, one that speaks PMI, or srun.

    An mpirun inside a task of srun is the nearer one. `SLURM_NTASKS` would be the allocation's; only a task of srun has
    `SLURM_STEP_NUM_TASKS`, a batch script and what its mpirun starts on that node have not.
    """

    rank: int
    size: int
    local_rank: int | None = None  # among those of this host; None: it does not say
    local_size: int = 1

    @classmethod
    def detect(cls) -> Launch:
        return cls(
            rank=_environment_int("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") or 0,
            size=_environment_int("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS") or 1,
            local_rank=_environment_int("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
            local_size=_environment_int("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") or 1,
        )


def announce(stage: str) -> None:
    """Tell the supervisor (`launch/supervise.py`) how far this rank's start has come; it shows nobody. A rank that ends
    before MPI_Init leaves the others waiting in it for ever where MPI is fault-tolerant."""
    if os.environ.get(SUPERVISED):
        say(f"{ANNOUNCEMENT} {stage} {Launch.detect().rank}")


def can_survive() -> bool:
    """True if the job was started so that it outlives its ranks: `mpirun --with-ft ulfm` of Open MPI 5."""
    value = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 - that is its name
    return value.lower() in ("1", "true", "yes", "enabled")


def die_with_launcher() -> None:
    """Have the kernel kill this rank when what started it ends, even if the rank is stopped: a launcher that gives up a
    job does not wait for that. Nothing is changed without a launcher."""
    launch = Launch.detect()
    # The signal comes when the thread ends that started the process. PRRTE starts 32 and more by threads of their own.
    if launch.size > 1 and launch.local_size < 32:
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def physical_cores(cpus: set[int]) -> int:
    """How many cores these processors are, of which one may be two or more."""

    def core(cpu: int) -> str:
        try:
            return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
        except OSError:
            return str(cpu)

    return len(set(map(core, cpus)))


def share_of_cores(mine: set[int], on_this_host: list[set[int]], most: float = math.inf) -> int:
    """Threads for a rank that may run on the cores `mine`, when the ranks of its host have these sets (its own too) and
    may use `most` cores' worth of time between them.

    Every core is divided by the ranks that may use it: right for ranks bound to cores of their own, for ranks that
    share the host or a part of it, and for anything between.
    """
    share = sum(1 / sum(core in cores for cores in on_this_host) for core in mine)
    return max(1, int(min(share, most / len(on_this_host)) + 1e-6))


def most_cores(seen: set[int]) -> float:
    """How many cores' worth of time a job may use here whose ranks may run on these cores between them: a container's
    or a job's quota, or what Slurm has allocated where it does not confine jobs to their cores. Infinite if nothing
    says so."""
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    confined = len(seen) < (os.cpu_count() or 1)
    return min(cpu_quota() or math.inf, int(allocated) if allocated.isdecimal() and not confined else math.inf)


def usable_cores() -> int:
    """As many threads as this process alone can make use of."""
    return share_of_cores(mine := os.sched_getaffinity(0), [mine], most_cores(mine))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Inside the block this thread, and those that it starts, may run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cgroup_numbers(controller: str, *names: str) -> Iterator[list[int]]:
    """Numbers in these files of this process's control group and of each above it, where they set a limit: a job's may
    stand in any. `controller`: of the hierarchies of version 1; "" for that of version 2."""
    for folder in _own_groups(controller):
        with suppress(OSError, ValueError):
            yield [int(word) for name in names for word in (folder / name).read_text(encoding="ascii").split()]


def _own_groups(controller: str) -> Iterator[Path]:
    """From the innermost to the outermost that can be seen, as a container's own."""
    root, path = _CGROUP / controller, ""
    with suppress(OSError, ValueError):
        for line in _OWN_GROUP.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controller in controllers.split(",") and ".." not in group:
                path = group.strip("/")
    folder = root / path
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def cpu_quota() -> float | None:
    """Cores' worth of time that a container's or a job's control group may use; None: as much as there is."""
    found = (cgroup_numbers("", "cpu.max"), cgroup_numbers("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min((quota / period for limits in found for quota, period in limits if quota > 0), default=None)


def available_memory_bytes() -> int:
    """Available memory of the machine, or what a container's or a job's limit leaves if that is less."""
    table = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"MemAvailable:\s+(\d+) kB", table)
    available = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([
        available, *_left_by_limits("", "memory.max", "memory.current", "inactive_file"),
        *_left_by_limits("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ])  # fmt: skip


def _left_by_limits(controller: str, limit: str, used: str, idle_files: str) -> Iterator[int]:
    """Bytes that this process's control group, and each above it, may still take, where they set a limit. What the
    kernel keeps of files that are not in use, it gives up."""
    for folder in _own_groups(controller):
        with suppress(OSError, ValueError):
            limit_bytes, used_bytes = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
            table = (folder / "memory.stat").read_text(encoding="ascii")
            idle = re.search(rf"^{idle_files} (\d+)$", table, re.MULTILINE)
            yield max(limit_bytes - used_bytes + (int(idle[1]) if idle else 0), 0)


def prepare(threads: int) -> None:
    """Size the thread pools and tune malloc.

    Idle threads sleep instead of spinning: on a machine with other work, spinning cost up to 20 times the time.
    glibc gives large freed blocks back to the kernel and faults them in again at every update; keeping them made
    training about 15 % faster with autograd, and about 1 % with the hand-written passes.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: a matter of speed only
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    if not mallopt(mmap_threshold, 1 << 30):
        mallopt(mmap_threshold, 32 << 20)  # the most that glibc before 2.35 takes
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)


@contextmanager
def loading() -> Iterator[None]:
    """Around an import that loads torch: Python's garbage collector never looks at what that makes.

    It stays for good. To go through it again and again took 40 % of the processor time of a rank's start and end, and a
    part of each later collection. Nothing happens where torch is loaded: what a user's program has made since then may
    be garbage one day.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _ancestors() -> Iterator[tuple[int, str]]:
    """The processes above this one and their names, the nearest first. Raises OSError."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
        yield pid, before.partition("(")[2]
        pid = int(after.split()[1])


def launcher_process() -> int | None:
    """The nearest process above this one that belongs to a launcher; None if there is none."""
    with suppress(OSError):
        return next((pid for pid, name in _ancestors() if name in _LAUNCHERS), None)
    return None


def terminal_size(stream: int = 1) -> tuple[int, int] | None:
    """(columns, lines) of the terminal that the job's output (2: its standard error) reaches, or None if it goes to a
    file or pipe.

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
    """Seconds since this process was started."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        start_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    # Not /proc/uptime: in a container that may be the container's, and these ticks are the host's.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


_SECOND_S = 5.0  # after the first ^C another one does not wait for training to end
LEAVE = signal.SIGUSR2  # asks a rank to leave a job that goes on


def hangup() -> tuple[signal.Signals, ...]:
    """SIGHUP, which a terminal sends when it is closed; nothing where it is ignored, as under nohup."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class Interrupt:
    """Set by SIGTERM, SIGINT, SIGUSR1 or SIGHUP; training looks at it every step and ends with a checkpoint. A second
    SIGINT, some seconds later, raises KeyboardInterrupt: perhaps an environment does not come back. SIGUSR2 asks this
    rank alone to leave; training looks at that after every update.

    Open MPI's mpirun kills its ranks 0.2 s after it passed on the first two. SIGUSR1 it passes on, and no more.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.leave_requested = False
        self._raises = False
        self._since_s = 0.0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == LEAVE:
            self.leave_requested = True
            return
        if number != self.signal:
            self._since_s = time.monotonic()
        again = number == signal.SIGINT and time.monotonic() - self._since_s > _SECOND_S
        self.signal = signal.Signals(number)
        if self._raises or again:
            raise KeyboardInterrupt

    @contextmanager
    def raised_at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt where a signal meets the block, or at its begin if one has come before; for what does
        not look."""
        try:
            self._raises = True
            if self.signal is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    @contextmanager
    def installed(self) -> Iterator[Interrupt]:
        """Catch the signals inside the block and restore the previous handlers after it."""
        if threading.current_thread() is not threading.main_thread():  # which alone may catch signals
            yield self
            return
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup(), LEAVE)
        previous = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


_divert: Callable[[str], bool] | None = None


def divert(show: Callable[[str], bool] | None) -> None:
    """Give what this process says to `show`, which returns whether it could; None: to nobody any more."""
    global _divert
    _divert = show


def say(message: str) -> None:
    """One line to the job's standard error, written at once and whole, so that lines of ranks do not mix.

    Where it cannot be written (a log on a full disk, a launcher that is gone) it is lost: no reason to stop training.
    """
    if _divert is not None and _divert(message.rstrip("\n")):
        return
    with suppress(OSError):
        sys.stderr.write(message.rstrip("\n") + "\n")
        sys.stderr.flush()


def wait_until_read(most_s: float = 2.0) -> None:
    """Wait until whoever reads this process's standard output and error has all of it, if they are pipes.

    Before an abort: MPICH's launcher drops what it has not read by then, and with it the sentence that says why.
    """
    end_s = time.monotonic() + most_s
    while any(_bytes_unread(stream) for stream in (1, 2)) and time.monotonic() < end_s:
        time.sleep(0.01)


def _bytes_unread(descriptor: int) -> int:
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        (number,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # closed
        return 0
    return int(number)


@cache
def one_sentence_for_mistakes() -> None:
    """From here on a mistake that nobody catches is printed as its sentence, one that all ranks raise by rank 0
    alone."""
    before, rank = sys.excepthook, Launch.detect().rank

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, PalaError):
            before(kind, error, traceback)
        elif rank == 0 or not isinstance(error, CollectiveError):
            say(f"pala: error: {error}")

    sys.excepthook = hook


def tell(message: str) -> None:
    """Some lines to standard output, written at once. Where they cannot be written (a full disk, a reader that is gone)
    they are lost, and all after them: no reason to stop training."""
    try:
        try:
            print(message, flush=True)
        except UnicodeEncodeError:  # in an ASCII or Latin-1 locale
            encoding = sys.stdout.encoding
            print(message.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again at the end
