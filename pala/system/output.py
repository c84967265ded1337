"""Output of a process: single lines to standard error, results to standard output."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import TracebackType

from pala.system.errors import CollectiveError, PalaError
from pala.system.launcher import Launch

SUPERVISED, ANNOUNCEMENT = "PALA_SUPERVISED", "pala-announcement:"


def announce(stage: str) -> None:
    """Tell the supervisor (`launch/supervise.py`) how far this rank's start has come; it shows nobody. A rank that ends
    before MPI_Init leaves the others waiting in it for ever where MPI is fault-tolerant."""
    if os.environ.get(SUPERVISED):
        say(f"{ANNOUNCEMENT} {stage} {Launch.detect().rank}")


_divert: Callable[[str], bool] | None = None


def divert(show: Callable[[str], bool] | None) -> None:
    """Give what this process says to `show`, which returns whether it could; None: to nobody any more."""
    global _divert
    _divert = show


def say(message: str) -> None:
    """One line to the job's standard error, written at once and whole, so that lines of ranks do not mix.

    Where it cannot be written (a log on a full disk, a launcher that is gone) it is lost: no reason to stop training.
    """
    if _divert is not None and _divert(message.rstrip("\n")):
        return
    with suppress(OSError):
        sys.stderr.write(message.rstrip("\n") + "\n")
        sys.stderr.flush()


def tell(message: str) -> None:
    """Some lines to standard output, written at once. Where they cannot be written (a full disk, a reader that is gone)
    they are lost, and all after them: no reason to stop training."""
    try:
        try:
            print(message, flush=True)
        except UnicodeEncodeError:  # in an ASCII or Latin-1 locale
            encoding = sys.stdout.encoding
            print(message.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again at the end


def wait_until_read(most_s: float = 2.0) -> None:
    """Wait until whoever reads this process's standard output and error has all of it, if they are pipes.

    Before an abort: MPICH's launcher drops what it has not read by then, and with it the sentence that says why.
    """
    end_s = time.monotonic() + most_s
    while any(_bytes_unread(stream) for stream in (1, 2)) and time.monotonic() < end_s:
        time.sleep(0.01)


def _bytes_unread(descriptor: int) -> int:
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        (number,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # closed
        return 0
    return int(number)


@cache
def one_sentence_for_mistakes() -> None:
    """From here on a mistake that nobody catches is printed as its sentence, one that all ranks raise by rank 0
    alone."""
    before, rank = sys.excepthook, Launch.detect().rank

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, PalaError):
            before(kind, error, traceback)
        elif rank == 0 or not isinstance(error, CollectiveError):
            say(f"pala: error: {error}")

    sys.excepthook = hook
