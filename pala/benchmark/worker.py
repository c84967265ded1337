"""What a rank of the benchmark runs; `python -m pala.benchmark` starts it. It reads a request and writes a result."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pala.config import from_table
from pala.system.errors import CollectiveError, PalaError
from pala.system.files import write_atomically
from pala.system.runtime import prepare, say
from pala.transport.agreement import collectively, cores_per_rank
from pala.transport.mpi_process import abort, start_mpi


@dataclass(frozen=True)
class Request:
    """What is to be measured in one job."""

    ranks: int
    exchanges: tuple[str, ...]
    precisions: tuple[str, ...]  # empty: those that the device has instructions for
    rounds: int
    seconds: float  # of one training measurement
    slowdown: float  # of the last rank
    config: dict[str, Any]
    result: str  # file that rank 0 writes

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_request(arguments: list[str], ranks: int) -> Request:
    """The request that the program was started with. Raises PalaError."""
    if len(arguments) != 1:
        raise PalaError("This is the part of the benchmark that ranks run; start `python -m pala.benchmark`.")
    table = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    request = Request(**table | {"exchanges": tuple(table["exchanges"]), "precisions": tuple(table["precisions"])})
    if request.ranks != ranks:
        raise PalaError(
            f"The launcher started {ranks} rank{'s' * (ranks != 1)}, not {request.ranks}; its command must say how "
            "many by '{ranks}', as in `--launcher 'mpirun -np {ranks}'`."
        )
    return request


def main() -> None:
    """What every rank of a benchmark's job runs."""
    try:
        comm = start_mpi()
    except PalaError as error:
        say(f"pala: error: {error}")
        sys.exit(2)
    try:
        request = collectively(comm, lambda: read_request(sys.argv[1:], comm.size))
        config = collectively(comm, lambda: from_table(request.config, "Request"))
        threads = config.run.threads or cores_per_rank(comm)
        prepare(threads)
        from pala.benchmark.rounds import Rounds

        result = Rounds(comm, request, config, threads).run()
        if comm.rank == 0:
            write_atomically(Path(request.result), json.dumps(result).encode())
    except CollectiveError as error:  # every rank is here
        if comm.rank == 0:
            say(f"pala: error: {error}")
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        abort(comm, error)
    from mpi4py import MPI

    MPI.Finalize()


if __name__ == "__main__":
    main()
