"""The cores and the memory that a rank may use, and how its thread pools and its memory are set for them.

Nothing here loads torch: `prepare()` must run before torch and numpy are imported, since thread pools are sized when
they load.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUP, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def physical_cores(cpus: set[int]) -> int:
    """Return the number of cores that these processors belong to: a core may have two processors or more."""

    def core(cpu: int) -> str:
        try:
            return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
        except OSError:
            return str(cpu)

    return len(set(map(core, cpus)))


def share_of_cores(mine: set[int], on_this_host: list[set[int]], most: float = math.inf) -> int:
    """Return the threads of a rank that may run on the cores `mine`. The ranks of its host have the sets
    `on_this_host`, its own too, and may use `most` cores' worth of time together.

    Every core is divided by the ranks that may use it: right for ranks bound to cores of their own, for ranks that
    share the host or a part of it, and for anything between.
    """
    share = sum(1 / sum(core in cores for cores in on_this_host) for core in mine)
    return max(1, int(min(share, most / len(on_this_host)) + 1e-6))


def most_cores(seen: set[int]) -> float:
    """Return how many cores' worth of time a job may use whose ranks here may run on the cores `seen`.

    It is a container's or a job's quota, or Slurm's allocation where Slurm does not confine jobs to their cores;
    infinite without either."""
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    confined = len(seen) < (os.cpu_count() or 1)
    return min(cpu_quota() or math.inf, int(allocated) if allocated.isdecimal() and not confined else math.inf)


def usable_cores() -> int:
    """Return as many threads as this process alone can use."""
    return share_of_cores(mine := os.sched_getaffinity(0), [mine], most_cores(mine))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Let this thread, and those that it starts, run on these cores inside the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cgroup_numbers(controller: str, *names: str) -> Iterator[list[int]]:
    """Yield the numbers in these files of this process's control group and of each above it that sets a limit: a job's
    limit may be in any of them. `controller`: a hierarchy of version 1; "" for version 2's."""
    for folder in _own_groups(controller):
        with suppress(OSError, ValueError):
            yield [int(word) for name in names for word in (folder / name).read_text(encoding="ascii").split()]


def _own_groups(controller: str) -> Iterator[Path]:
    """Yield control groups from the innermost to the outermost that can be seen, as a container's own."""
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
    """Return the cores' worth of time that a container's or a job's control group may use; None without a limit."""
    found = (_cgroup_numbers("", "cpu.max"), _cgroup_numbers("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min((quota / period for limits in found for quota, period in limits if quota > 0), default=None)


def available_memory_bytes() -> int:
    """Return the machine's available memory, or what a container's or a job's limit leaves if that is less."""
    table = Path("/proc/meminfo").read_text(encoding="ascii")
    available = int(re.findall(r"MemAvailable:\s+(\d+) kB", table)[0]) * 1024
    version_2 = _left_by_limits("", "memory.max", "memory.current", "inactive_file")
    version_1 = _left_by_limits("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min([available, *version_2, *version_1])


def _left_by_limits(controller: str, limit: str, used: str, idle_files: str) -> Iterator[int]:
    """Yield the bytes that this process's control group, and each above it, may still take, where it sets a limit. The
    kernel gives up what it keeps of files that are not in use."""
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
    trim_threshold = -1
    top_pad = -2
    mmap_threshold = -3
    if not mallopt(mmap_threshold, 1 << 30):
        mallopt(mmap_threshold, 32 << 20)  # the most that glibc before 2.35 takes
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)


@contextmanager
def loading() -> Iterator[None]:
    """Keep Python's garbage collector from the objects that an import of torch inside the block makes.

    They stay for good. To go through them again and again took 40 % of the processor time of a rank's start and end,
    and a part of each later collection. Nothing happens where torch is loaded: what a user's program has made since
    then may be garbage one day.
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
