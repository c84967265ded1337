"""The processes of a run's ranks on this host: how they are proven to be them, and signals that reach no other process.

Every rank that trains holds the lock of its run's folder (`pala/run/lock.py`), and the kernel says in `/proc` which
process holds which file's lock. A process number may pass to another process, so signals go to a descriptor of the
process (`pidfd_open`, Linux 5.3), which is opened before anything is proven.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pala.run.lock import LOCK
from pala.system.errors import PalaError, reason
from pala.system.launcher import outlives_ranks, rank_in


class RankProcess:
    """The process of a rank."""

    def __init__(self, descriptor: int, pid: int, rank: int, outlived: bool) -> None:
        """`descriptor`: of the process, from `pidfd_open`; `outlived`: its job continues when it dies."""
        self._descriptor = descriptor
        self.pid = pid
        self.rank = rank
        self.outlived = outlived
        self.is_stopped = False

    def lives(self) -> bool:
        """Return whether the process has not ended."""
        return not select.select([self._descriptor], [], [], 0)[0]

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._send(signal.SIGKILL)

    def stop(self, guard: Guard) -> None:
        """Stop the process by SIGSTOP, under a guard."""
        guard.watch(self._descriptor)
        self.is_stopped = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue, if `stop` has stopped it."""
        if self.is_stopped:
            self._send(signal.SIGCONT)
        self.is_stopped = False

    def close(self) -> None:
        """Close the descriptor, after which nothing reaches the process."""
        os.close(self._descriptor)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._descriptor, number)


class Guard:
    """A process that sends SIGCONT to all that was stopped as soon as this process ends, however it ends.

    SIGKILL to this process would else leave ranks stopped forever. The guard has a session of its own, which a
    terminal's signals do not reach."""

    def __init__(self) -> None:
        self._channel, others = socket.socketpair()
        self._watched: set[int] = set()
        with others:
            command = [sys.executable, "-I", "-c", _GUARD]
            self._process = subprocess.Popen(command, stdin=others.fileno(), start_new_session=True)

    def watch(self, descriptor: int) -> None:
        """Add a process to those that the guard resumes, before it is stopped for the first time."""
        if descriptor not in self._watched:
            socket.send_fds(self._channel, [b"+"], [descriptor])
            self._watched.add(descriptor)

    def close(self) -> None:
        """Resume all that is watched, and end the guard."""
        self._channel.close()
        self._process.wait()


_GUARD = """
import signal, socket
channel, watched = socket.socket(fileno=0), []
while True:
    word, descriptors, *_ = socket.recv_fds(channel, 1, 1)
    watched += descriptors
    if not word:
        break
for descriptor in watched:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
    except OSError:
        pass
"""


def find(run: Path, known: Mapping[int, RankProcess]) -> dict[int, RankProcess]:
    """Return the processes of a run's ranks on this host that are this user's, by rank; without ranks in `known`.

    A rank that is known never gets another process: it would be of a later job. A spare that sleeps holds no lock, so
    it is not found. Raises PalaError if the kernel is too old, or two processes claim to be one rank.
    """
    try:
        status = (run / LOCK).stat()
    except OSError as error:
        raise PalaError(f"The lock of run '{run}' cannot be looked at: {reason(error)}.") from None
    found: dict[int, RankProcess] = {}
    skipped = {process.pid for process in known.values() if process.lives()} | {os.getpid()}
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        process = None if pid in skipped else _open_if_rank(pid, (status.st_dev, status.st_ino))
        if process is None:
            continue
        if process.rank in known:
            process.close()
            continue
        if process.rank in found:
            raise PalaError(
                f"Processes {found[process.rank].pid} and {process.pid} both hold the lock of run '{run}' as rank "
                f"{process.rank}: which of them trains cannot be told, so none is touched."
            )
        found[process.rank] = process
    return found


def _open_if_rank(pid: int, lock: tuple[int, int]) -> RankProcess | None:
    """Return the process of this number if it is proven to be this user's, and a rank that holds the lock of this
    device and inode; otherwise None."""
    process = Path(f"/proc/{pid}")
    try:
        if process.stat().st_uid != os.getuid():
            return None
        environment = _environment_of(process)
        if (rank := rank_in(environment)) is None or not _holds(process, lock):
            return None
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except AttributeError:
        raise PalaError("This Python or its kernel has no descriptors of processes: Linux 5.3 is needed.") from None
    except OSError:  # it has ended, or is not to be looked into
        return None
    found = RankProcess(descriptor, pid, rank, outlives_ranks(environment))
    # Once more: the number may have passed to another process since. If this one lives, all was read of it.
    with contextlib.suppress(OSError):
        if rank_in(_environment_of(process)) == rank and _holds(process, lock) and found.lives():
            return found
    found.close()
    return None


def _environment_of(process: Path) -> dict[str, str]:
    """Return the environment variables that a process was started with. Raises OSError."""
    entries = (process / "environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def _holds(process: Path, lock: tuple[int, int]) -> bool:
    """Return whether a process holds the lock of the file of this device and inode. Raises OSError."""
    for descriptor in _descriptors_of_locks(process):
        status = descriptor.stat()
        is_it = (status.st_dev, status.st_ino) == lock
        if is_it and "\nlock:" in (process / "fdinfo" / descriptor.name).read_text():
            return True
    return False


def _descriptors_of_locks(process: Path) -> Iterator[Path]:
    """Yield the descriptors of a process that lead to a file named as a run's lock. Raises OSError."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if descriptor.readlink().name == LOCK:
                yield descriptor
