"""What the doctor prints: tables of facts, the ping, and the advice. Plain text, 110 columns, for a log file."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from pala.doctor.advice import Advice, is_mixed, pair_text
from pala.doctor.facts import Host, Job
from pala.doctor.ping import MODEL_BYTES
from pala.system.text import counted

_WIDTH = 110
_LARGEST_MATRIX = 8


def report(job: Job, advice: Sequence[Advice]) -> str:
    """All of it."""
    parts = [
        _title(job),
        _table([], _job_rows(job)),
        "HOSTS",
        _table(_HOST_HEADER, [_host_row(job, host) for host in job.hosts]),
    ]
    if job.pings:
        parts += [f"PING  8 bytes; {MODEL_BYTES / 2**20:.1f} MiB, as long as a model", _ping_text(job)]
    parts += ["ADVICE", _advice_text(advice)]
    return "\n".join(parts)


def _title(job: Job) -> str:
    hosts, ranks = len(job.hosts), len(job.ranks)
    if job.launcher.processes and (is_mixed(job) or job.alone or job.mpi_fault):
        return f"PALA doctor: {job.launcher.processes} processes that are not ranks of one job"
    return f"PALA doctor: {counted(ranks, 'rank')} on {counted(hosts, 'host')}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns; text that is too long is folded inside its column."""
    rows = list(rows)
    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    for name in header or [""] * len(rows[0]):
        table.add_column(name, overflow="fold", header_style="")
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=_WIDTH - 2, color_system=None, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return textwrap.indent("\n".join(lines), "  ") + "\n"


def _job_rows(job: Job) -> list[tuple[str, str]]:
    first, slurm = job.hosts[0], ", ".join(f"{name} {value}" for name, value in job.slurm.items())
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    rows = [
        ("MPI library", f"{job.library}, MPI standard {job.standard}" if job.library.name else "none that loads"),
        ("launcher", _launcher_text(job)),
        ("thread level", _thread_level(job)),
        ("outliving ranks", _fault_tolerance(job)),
        ("CUDA-aware MPI", f"{_yes_no_unknown({rank.cuda_aware for rank in job.ranks})} (PALA does not need it)"),
        ("runs", _runs_text(job)),
        ("versions", versions),
    ]  # fmt: skip
    return [*rows, ("Slurm", slurm)] if slurm else rows


def _launcher_text(job: Job) -> str:
    launcher = job.launcher
    if not launcher.command and not launcher.product.name:
        return "no mpirun in PATH"
    how = f"started {launcher.processes}" if launcher.processes else "in PATH; this job was started without it"
    if is_mixed(job) or job.alone:
        fits = "does not fit the library"
    elif len(job.ranks) > 1 or (job.trial is not None and job.trial.size == 2):
        fits = "fits the library"
    else:
        fits = "whether it fits was not seen"
    return f"{launcher.product}, {launcher.command or 'path unknown'} ({how}; {fits})"


def _thread_level(job: Job) -> str:
    levels = sorted({rank.thread_level for rank in job.ranks})
    return f"{', '.join(levels)} (enough)" if all(levels) else "not known"


def _fault_tolerance(job: Job) -> str:
    if job.fault_tolerant:
        return "on (--with-ft ulfm)"
    major = job.library.version.partition(".")[0]
    if job.library.name == "Open MPI" and major.isdigit() and int(major) >= 5:
        return "off, possible: `mpirun --with-ft ulfm`, as ./launch/train.sh does"
    return "off, possible with Open MPI 5 only"


def _runs_text(job: Job) -> str:
    blind = [host.name for host in job.hosts if host.sees_runs is False]
    if job.hosts[0].sees_runs is None:
        return f"'{job.runs}': not looked at"
    if job.hosts[0].name in blind:
        return f"'{job.runs}' cannot be written"
    seen = f"not seen by {', '.join(blind)}" if blind else "seen by all hosts" if len(job.hosts) > 1 else "writable"
    return f"'{job.runs}': {seen}"


def _yes_no_unknown(values: set[bool | None]) -> str:
    return "unknown" if None in values else "yes" if values == {True} else "no"


_HOST_HEADER = ("host", "ranks", "cores", "threads", "binding", "memory", "/dev/shm", "GPUs", "bfloat16", "Atari")


def _host_row(job: Job, host: Host) -> tuple[str, ...]:
    ranks = job.ranks_of(host)
    sets = {tuple(rank.cores) for rank in ranks}
    bound = sets != {tuple(host.cores)}
    binding = "none" if not bound else "one set for all" if len(sets) == 1 < len(ranks) else "each its own"
    quota = "" if math.isinf(host.most_cores) else f" ({host.most_cores:g} to use)"
    return (
        host.name,
        str(len(ranks)),
        f"{len(host.cores)}{quota}",
        ", ".join(sorted({str(rank.threads or "?") for rank in ranks})) + " a rank",
        binding,
        f"{host.memory_bytes / 2**30:.1f} GiB",
        f"{host.shm_bytes / 2**20:,.0f} MiB",
        _gpus(host),
        {True: "yes", False: "no", None: "unknown"}[host.bfloat16],
        "unknown" if host.bfloat16 is None else "fails" if host.atari_fault else "Pong starts",
    )


def _gpus(host: Host) -> str:
    if host.gpus:
        return ", ".join(f"{host.gpus.count(name)} x {name}" for name in dict.fromkeys(host.gpus))
    return "none" if host.torch_cuda is None else f"none (torch for CUDA {host.torch_cuda})"


def _ping_text(job: Job) -> str:
    trips = [ping.round_trip_us for ping in job.pings]
    rates = [ping.megabytes_per_s for ping in job.pings]
    slowest = min(job.pings, key=lambda ping: ping.megabytes_per_s)
    figures = f"{pair_text(job, slowest)}: {slowest.round_trip_us:,.1f} µs, {slowest.megabytes_per_s:,.1f} MB/s"
    if len(job.pings) == 1:
        return f"  {figures}\n"
    spreads = [("round trip of 8 bytes, µs", *_spread(trips)), ("bandwidth, MB/s", *_spread(rates))]
    all_pairs = len(job.ranks) * (len(job.ranks) - 1) // 2
    few = len(job.ranks) <= _LARGEST_MATRIX
    return "\n".join([
        _table(("", "min", "median", "max"), spreads),
        f"  {len(job.pings):,} of {all_pairs:,} pairs; the slowest: {figures}\n",
        *([_matrix(job)] if few else []),
    ])  # fmt: skip


def _spread(values: list[float]) -> tuple[str, str, str]:
    return tuple(f"{pick(values):,.1f}" for pick in (min, statistics.median, max))  # type: ignore[return-value]


def _matrix(job: Job) -> str:
    """Bandwidth above the diagonal, round trips below it."""
    of = {ping.ranks: ping for ping in job.pings}
    ranks = range(len(job.ranks))

    def cell(row: int, column: int) -> str:
        if row == column:
            return "-"
        ping = of[min(row, column), max(row, column)]
        return f"{ping.megabytes_per_s:,.0f} MB/s" if row < column else f"{ping.round_trip_us:,.1f} µs"

    header = ("", *(f"rank {rank}" for rank in ranks))
    return _table(header, [(f"rank {row}", *(cell(row, column) for column in ranks)) for row in ranks])


def _advice_text(advice: Sequence[Advice]) -> str:
    if not advice:
        return "  None: nothing stands in the way of training."
    return "\n".join(
        "\n".join(
            textwrap.fill(
                line, _WIDTH, initial_indent=("  STOP  " if item.stops else "  -     ") if number == 0 else " " * 8,
                subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False,
            )
            for number, line in enumerate(item.text.splitlines())
        )
        for item in advice
    )  # fmt: skip
