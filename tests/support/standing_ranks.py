"""Ranks that stand by: one MPI job that has loaded torch and PALA, and runs the cases that tests send to it.

A rank takes one to two CPU seconds to start, nearly all of them to load torch. Tests whose subject is not the start
share these ranks: a case begins within milliseconds, on a communicator of its own of the first ranks of the job, in a
folder of its own. A rank that waits for a case sleeps. Each rank runs `python tests/support/standing_ranks.py SOCKET`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import cloudpickle

from pala.system.jobs import MpiJob

if TYPE_CHECKING:  # a rank starts MPI before it loads the rest
    from pala.comm.base import Communicator

_START_S = 120.0
_MEET_S = 5.0
_OTHERS_S = 5.0  # for the others, after a case has failed on one rank: then they are waiting for it


class CaseError(AssertionError):
    """A case raised, did not end in time or ended its rank; with what its ranks wrote."""


@dataclass(frozen=True)
class Ended:
    """A case that has ended on all of its ranks."""

    values: list[Any]
    """What it returned, by rank."""
    output: str
    """What the ranks wrote, one rank after the other."""

    @property
    def status(self) -> int:
        """The exit status that a job which trained so would have had."""
        return max(self.values)


class Running:
    """A case that has begun."""

    def __init__(self, job: StandingRanks, connections: list[Connection], folder: Path) -> None:
        self._job, self._connections, self._folder = job, connections, folder
        self.pids = job.pids[: len(connections)]

    def wait(self, timeout_s: float = 240) -> Ended:
        """Until it has ended on every rank. Raises CaseError; the ranks are then started again for the next case."""
        deadline, values, fault = time.monotonic() + timeout_s, dict[int, Any](), ""
        while len(values) < len(self._connections):
            waiting = [connection for rank, connection in enumerate(self._connections) if rank not in values]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                fault = fault or f"the case did not end within {timeout_s:.0f} s"
                break
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    said, values[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    said, values[rank] = "the rank has ended", None
                if said:
                    fault = fault or f"rank {rank}: {said}"
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
        files = [self._folder / f"output-{rank}" for rank in range(len(self._connections))]
        output = "".join(file.read_text(errors="replace") for file in files if file.exists())
        if fault:
            self._job.close()
            raise CaseError(f"{fault}\n{output}")
        self._job._is_busy = False
        return Ended([values[rank] for rank in range(len(values))], output)


class StandingRanks:
    """A job of `size` ranks, started with the first case and again after one that broke it."""

    def __init__(self, mpirun: Sequence[str], python: Path, environment: dict[str, str], size: int) -> None:
        """`mpirun`: the launcher with its options, but for the number of ranks."""
        self._mpirun, self._python, self._environment, self.size = mpirun, python, environment, size
        self._mpi_job: MpiJob | None = None
        self._connections: list[Connection] = []
        self._is_busy = False  # with a case; one that a test has given up would get in the way of the next
        self.pids: list[int] = []

    def start(self, ranks: int, case: Callable[..., Any], *arguments: Any, cwd: Path) -> Running:
        """Begin `case(communicator, *arguments)` on each of the first `ranks` ranks, in folder `cwd`."""
        assert 1 <= ranks <= self.size
        if self._is_busy or self._mpi_job is None or self._mpi_job.wait(0) is not None:
            self.close()
            self._start_job()
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        module = sys.modules[case.__module__]
        by_value = module.__name__ != __name__
        if by_value:  # tests cannot be imported everywhere
            cloudpickle.register_pickle_by_value(module)
        try:
            message = cloudpickle.dumps((ranks, str(cwd), str(folder), case, arguments))
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        for connection in self._connections[:ranks]:
            connection.send_bytes(message)
        self._is_busy = True
        return Running(self, self._connections[:ranks], folder)

    def run(self, ranks: int, case: Callable[..., Any], *arguments: Any, cwd: Path) -> Ended:
        """The same, to its end."""
        return self.start(ranks, case, *arguments, cwd=cwd).wait()

    def start_train(self, ranks: int, *arguments: str, cwd: Path) -> Running:
        """Begin what `mpirun -np RANKS python -m pala.train ARGUMENTS` does, but for the evaluation at the end."""
        return self.start(ranks, train, arguments, cwd=cwd)

    def train(self, ranks: int, *arguments: str, cwd: Path) -> Ended:
        """The same, to its end."""
        return self.start_train(ranks, *arguments, cwd=cwd).wait()

    def close(self) -> None:
        """End the ranks, also in the middle of a case."""
        self._is_busy = False
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._mpi_job is not None:
            if self._mpi_job.wait(_OTHERS_S) is None:  # ranks that wait for a case end by themselves
                for pid in self.pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
            if not self._mpi_job.end(signal.SIGTERM, _OTHERS_S):
                # prterun was once seen to wait for itself in PMIx_server_finalize (Open MPI 5.0.11).
                self._mpi_job.kill()
            self._mpi_job.reap()
            self._mpi_job, self.pids = None, []
            self._folder.cleanup()

    def _start_job(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pala-standing-")
        address, log = f"{self._folder.name}/socket", Path(self._folder.name) / "log"
        with socket.socket(socket.AF_UNIX) as server, open(log, "wb") as output:
            server.bind(address)
            server.listen(self.size)
            server.settimeout(1.0)
            self._mpi_job = MpiJob(
                [*self._mpirun, "-np", str(self.size), str(self._python), __file__, address],
                self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                hears_sigterm=True,
            )
            try:
                accepted = [self._accept(server, time.monotonic() + _START_S) for _ in range(self.size)]
            except CaseError as error:
                said = log.read_text(errors="replace")
                self.close()
                raise CaseError(f"{error}\n{said}") from None
        ranks = dict(accepted)
        self._connections = [ranks[rank][0] for rank in range(self.size)]
        self.pids = [ranks[rank][1] for rank in range(self.size)]

    def _accept(self, server: socket.socket, deadline_s: float) -> tuple[int, tuple[Connection, int]]:
        """The next rank that has started: (rank, (connection, process)). Raises CaseError."""
        assert self._mpi_job is not None
        while True:
            try:
                connection = Connection(server.accept()[0].detach())
                rank, pid = connection.recv()
                return rank, (connection, pid)
            except TimeoutError:
                if self._mpi_job.wait(0) is not None or time.monotonic() > deadline_s:
                    raise CaseError("the ranks did not start:") from None
            except (EOFError, ConnectionError):
                raise CaseError("a rank has ended in its start:") from None


# ---- on a rank -------------------------------------------------------------------------------------------------------


def train(
    comm: Communicator, arguments: Sequence[str], make_env: Callable[[], Any] | None = None, callbacks: Any = None
) -> int:
    """Train on the ranks of `comm` with a command line of `pala.train`. Returns the exit status. Collective.

    No rank begins before all are there: one that begins late on a busy machine would find the steps made by others.
    """
    from pala.comm.agreement import collectively
    from pala.job.rank import run_rank
    from pala.job.request import Request
    from pala.run.hooks import NO_CALLBACKS, UserCode
    from pala.run.loop import Loop
    from pala.system.errors import CollectiveError
    from pala.system.output import log
    from pala.train import parse

    try:
        command = collectively(comm, lambda: parse(list(arguments)))
        preset = command.preset.stem if command.preset else ""
        config = command.config
        together = comm.bcast(tempfile.mkdtemp(prefix="begun-") if comm.rank == 0 else None)
        run, trainers = Loop.run, comm.size - config.run.spares

        def run_together(loop: Loop, *given: Any) -> Any:
            _meet(Path(together), comm.rank, trainers)
            return run(loop, *given)

        with mock.patch.object(Loop, "run", run_together):
            request = Request(
                config, UserCode(make_env), callbacks=callbacks or NO_CALLBACKS, resume=command.resume, preset=preset
            )  # fmt: skip
            result = run_rank(comm, request)
    except CollectiveError as error:
        if comm.rank == 0:
            log(f"pala: error: {error}")
        return 2
    return 0 if result.signal is None else 128 + result.signal


def _meet(folder: Path, rank: int, ranks: int) -> None:
    """Wait until so many ranks are here, or for a while: perhaps one has died."""
    deadline = time.monotonic() + _MEET_S
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < ranks and time.monotonic() < deadline:
        time.sleep(0.005)


@contextmanager
def _in_folder(folder: str, log: str) -> Iterator[None]:
    """Work in `folder` and write standard output and error to the file `log`, also from C."""
    before = Path.cwd()
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in (1, 2):
            os.dup2(file, number)
        os.chdir(folder)
        yield
    finally:
        os.chdir(before)
        for number, stream, copy in zip((1, 2), (sys.stdout, sys.stderr), kept, strict=True):
            stream.flush()
            os.dup2(copy, number)
            os.close(copy)
        os.close(file)


def _serve(world: Any, connection: Connection) -> None:
    """Run cases until the tests have ended; after one that raises, this rank ends."""
    from pala.comm.mpi import MpiCommunicator

    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            ranks, folder, logs, case, arguments = cloudpickle.loads(message)
            comm = world.Create_group(world.group.Incl(list(range(ranks))))
            with _in_folder(folder, f"{logs}/output-{world.rank}"):
                value = case(MpiCommunicator(comm), *arguments)
            comm.Free()
        except BaseException:
            connection.send((traceback.format_exc(), None))
            os._exit(1)
        connection.send(("", value))


def main() -> None:
    """What each rank runs."""
    from pala.comm.mpi_process import start_mpi
    from pala.system.launcher import die_with_launcher
    from pala.system.resources import loading, prepare

    die_with_launcher()
    world = start_mpi().mpi
    prepare(1)
    with loading():
        from pala.job import start  # noqa: F401 - loaded now, not by the first case

    own = socket.socket(socket.AF_UNIX)
    own.connect(sys.argv[1])
    connection = Connection(own.detach())
    connection.send((world.rank, os.getpid()))
    _serve(world, connection)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # functions of test modules are sent by their names
    main()
