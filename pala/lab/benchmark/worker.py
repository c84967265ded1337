"""What a rank of the benchmark runs; `python -m pala.benchmark` starts it. It reads a request and writes a result."""

from __future__ import annotations

import sys
from pathlib import Path

from pala.comm.agreement import collectively, cores_per_rank
from pala.comm.mpi_process import abort, leave_mpi, start_mpi_or_exit
from pala.config import from_table
from pala.lab.benchmark.request import read_request
from pala.system.errors import CollectiveError
from pala.system.files import json_text, write_atomically
from pala.system.output import say
from pala.system.resources import loading, prepare


def main() -> None:
    """What every rank of a benchmark's job runs."""
    comm = start_mpi_or_exit()
    try:
        request = collectively(comm, lambda: read_request(sys.argv[1:], comm.size))
        config = collectively(comm, lambda: from_table(request.config, "Request"))
        threads = config.run.threads or cores_per_rank(comm)
        prepare(threads)
        with loading():
            from pala.lab.benchmark.rounds import Rounds

        result = Rounds(comm, request, config, threads).run()
        if comm.rank == 0:
            write_atomically(Path(request.result), json_text(result).encode())
    except CollectiveError as error:  # every rank is here
        if comm.rank == 0:
            say(f"pala: error: {error}")
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        abort(comm, error)
    leave_mpi(comm)(0)


if __name__ == "__main__":
    main()
