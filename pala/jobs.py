"""Jobs of MPI that a program starts from outside, and of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from pala.errors import PalaError

_TAIL_LINES = 25
_JOB_VARIABLE = "PALA_JOB"


def job_environment() -> dict[str, str]:
    """Ours; the mpirun beside this Python wins, as it belongs to the same mpi4py."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}


def run_job(words: list[str], log: Path, limit_s: float) -> None:
    """Run a job to its end, its output in `log`. Raises PalaError with the output's tail if it fails or takes too long;
    whatever happens, none of its processes on this machine is left."""
    token = uuid.uuid4().hex
    with open(log, "wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=job_environment() | {_JOB_VARIABLE: token},
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PalaError(f"`{shlex.join(words)}` was not done after {limit_s:.0f} s.{tail_of(log)}") from None
        finally:
            _end(process, token)
    if status != 0:
        raise PalaError(f"`{shlex.join(words)}` failed with status {status}.{tail_of(log)}")


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """The launcher gets time to end its ranks; what is left then of those that carry the job's token is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{_JOB_VARIABLE}={token}".encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
    process.wait()


def tail_of(log: Path) -> str:
    """The last lines that a job wrote, for a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return f" The end of its output ('{log}'):\n" + "\n".join(f"    {line}" for line in lines)
