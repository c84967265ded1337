"""A rank of the benchmark, started by `pala benchmark`. It reads a request and writes a result."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pala.comm.agreement import collectively
from pala.comm.mpi_process import close_mpi
from pala.config import from_table
from pala.job import entry
from pala.job.job import Job
from pala.system.errors import PalaError
from pala.system.files import json_text, read_json, write_atomically
from pala.system.resources import loading, prepare
from pala.system.text import counted


def read_request(arguments: list[str], ranks: int) -> dict[str, Any]:
    """Return the file that `pala benchmark` wrote for a job of this number of ranks. Raises PalaError."""
    if len(arguments) != 1:
        raise PalaError("This is the part of the benchmark that ranks run; start `pala benchmark`.")
    request: dict[str, Any] = read_json(Path(arguments[0]))
    if request["ranks"] != ranks:
        raise PalaError(
            f"The launcher started {counted(ranks, 'rank')}, not {request['ranks']}; its command must say how "
            "many by '{ranks}', as in `--launcher 'mpirun -np {ranks}'`."
        )
    return request


def main() -> None:
    """Do what every rank of a benchmark's job does."""
    with entry.program() as comm:
        request = collectively(comm, lambda: read_request(sys.argv[1:], comm.size))
        config = collectively(comm, lambda: from_table(request["config"], "Request"))
        config = replace(config, run=replace(config.run, spares=0))  # all ranks are measured
        job = Job(comm, config)
        prepare(job.threads)
        with loading():
            from pala.lab.benchmark.rounds import Rounds

        result = Rounds(comm, request, config, job.threads).run()
        if comm.rank == 0:
            write_atomically(Path(request["result"]), json_text(result).encode())
    close_mpi(comm)(0)


if __name__ == "__main__":
    main()
