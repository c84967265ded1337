"""The doctor's report: tables of facts, and the advice. Plain text, 110 columns, for a log file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pala.doctor.checks import Advice, Findings
from pala.doctor.facts import Job
from pala.system.text import counted

_WIDTH = 110


def report(job: Job, findings: Findings) -> str:
    """Write the findings about a job as plain text."""
    columns = [row.name for row in findings.hosts[0]]
    return "\n".join(
        [
            _title(job),
            _table([], [(row.name, row.text) for row in findings.rows]),
            "HOSTS",
            _table(columns, [[row.text for row in host] for host in findings.hosts]),
            "ADVICE",
            *(_wrapped(advice) for advice in findings.advice),
            *([] if findings.advice else ["  None: nothing stands in the way of training."]),
        ]
    )


def _title(job: Job) -> str:
    if job.launcher.processes and job.mpi_fault:
        return f"PALA doctor: {job.launcher.processes} processes that are not ranks of one job"
    return f"PALA doctor: {counted(len(job.ranks), 'rank')} on {counted(len(job.hosts), 'host')}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write columns; text that is too long is folded inside its column."""
    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    for name in header or [""] * len(rows[0]):
        table.add_column(name, overflow="fold", header_style="")
    for row in rows:
        table.add_row(*row)
    console = Console(
        file=io.StringIO(), width=_WIDTH - 2, color_system=None, markup=False, highlight=False, emoji=False
    )
    with console.capture() as capture:
        console.print(table)
    return "".join(f"  {line.rstrip()}\n" for line in capture.get().splitlines())


def _wrapped(advice: Advice) -> str:
    """Write an advice below its mark; a path is not broken, so that it can be copied."""
    wrapper = textwrap.TextWrapper(_WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    lines = [part for line in advice.text.splitlines() for part in wrapper.wrap(line)]
    text = textwrap.indent("\n".join(lines), " " * 8)
    return ("  STOP  " if advice.stops else "  -     ") + text[8:]
