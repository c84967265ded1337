"""Output of a process: single lines to standard error, results to standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import TracebackType

from pala.system.errors import CollectiveError, PalaError, reason
from pala.system.launcher import Launch, speaks

SUPERVISED, ANNOUNCEMENT = "PALA_SUPERVISED", "pala-announcement:"


def notify_supervisor(stage: str) -> None:
    """Tell the supervisor (`pala train -n`) how far this rank's start has come; the supervisor does not show it.

    Where MPI is fault-tolerant, a rank that ends before MPI_Init leaves the others waiting in it forever."""
    if os.environ.get(SUPERVISED):
        log(f"{ANNOUNCEMENT} {stage} {Launch.detect().rank}")


def open_closed_streams() -> None:
    """Open what this process was started without (`<&-`, `2>&-`) to nowhere. The next file would get that number, and
    what is meant for standard error would go there."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False, encoding="utf-8"))


_divert: Callable[[str], bool] | None = None


def divert(show: Callable[[str], bool] | None) -> None:
    """Give the lines for standard error to `show`, which returns False if it cannot show one; None ends this."""
    global _divert
    _divert = show


def log(message: str) -> None:
    """Print one line to the job's standard error, at once and whole, so that lines of ranks do not mix.

    A line that cannot be written (a full disk, a launcher that is gone) is lost: no reason to stop training.
    """
    message = printable(message.rstrip("\n"))
    if (_divert is not None and _divert(message)) or sys.stderr is None:  # of a script begun without it (`2>&-`)
        return
    with suppress(OSError):
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


def say_death(rank: int, dead: int, num_living: int, host: str = "") -> None:
    """Print that the rank `dead` has died; one rank says it, the lowest that lives."""
    log(f"[rank {rank}] rank {dead}{f' on {host}' if host else ''} has died; {num_living} continue.")


_lost: list[str] = []  # why results could not be printed


def check_printed() -> None:
    """Raise PalaError if results could not be printed, other than to a reader that is gone."""
    if _lost:
        raise PalaError(f"Not all results could be printed: {_lost[0]}.")


def print_result(message: str) -> None:
    """Print lines to standard output, at once and whole, so that lines of ranks do not mix.

    Lines that cannot be written (a full disk, a reader that is gone) are lost, with all after them: no reason to stop
    training."""
    if sys.stdout is None:  # of a script begun without it (`>&-`)
        return
    lines = printable(message) + "\n"  # one write, also under PYTHONUNBUFFERED, where `print` makes two
    try:
        try:
            sys.stdout.write(lines)
        except UnicodeEncodeError:  # in an ASCII or Latin-1 locale
            encoding = sys.stdout.encoding
            sys.stdout.write(lines.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _lost.append(reason(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again at the end


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {10: "\n", 9: "\t", 13: "\\r"}


def printable(message: str) -> str:
    """Return a text with its control characters written out, except line ends and tabs: a run from elsewhere could
    control the terminal by them."""
    return message.translate(_CONTROLS)


@cache
def one_sentence_for_mistakes() -> None:
    """Print only the error message, without a traceback, for a PalaError that is not caught from now on. One that all
    ranks raise is printed by rank 0 alone."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, PalaError):
            before(kind, error, traceback)
        elif not isinstance(error, CollectiveError) or speaks():
            log(f"pala: error: {error}")

    sys.excepthook = hook
