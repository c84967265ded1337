"""The benchmark's request to one job of ranks, as a file between the program and its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pala.system.errors import PalaError
from pala.system.text import counted


@dataclass(frozen=True)
class JobRequest:
    """Measurements that one job is to make."""

    ranks: int
    exchanges: tuple[str, ...]
    precisions: tuple[str, ...]  # empty: those that the device has instructions for
    rounds: int
    seconds: float  # of one training measurement
    slowdown: float  # of the last rank
    config: dict[str, Any]
    result: str  # file that rank 0 writes

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_request(arguments: list[str], ranks: int) -> JobRequest:
    """Return the request that the program was started with. Raises PalaError."""
    if len(arguments) != 1:
        raise PalaError("This is the part of the benchmark that ranks run; start `pala benchmark`.")
    table = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    request = JobRequest(**table | {"exchanges": tuple(table["exchanges"]), "precisions": tuple(table["precisions"])})
    if request.ranks != ranks:
        raise PalaError(
            f"The launcher started {counted(ranks, 'rank')}, not {request.ranks}; its command must say how "
            "many by '{ranks}', as in `--launcher 'mpirun -np {ranks}'`."
        )
    return request
