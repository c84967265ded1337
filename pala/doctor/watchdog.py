"""A limit for everything that may hang: MPI's start, a message, a library on a file system that does not answer.

A process of its own keeps the time, since mpi4py holds the interpreter's lock while MPI starts: no thread would run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

# Reads lines "seconds sentence"; ends with its parent. What it has said, it makes true.
_KEEPER = """
import os, select, signal, sys
seconds, sentence = None, ""
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
while True:
    if not select.select([0], [], [], seconds)[0]:
        sys.stderr.write(sentence + "\\n")
        sys.stderr.flush()
        os.kill(int(sys.argv[1]), signal.SIGKILL)
        sys.exit()
    lines = os.read(0, 65536).decode().splitlines()
    if not lines:
        sys.exit()
    seconds, _, sentence = lines[-1].partition(" ")
    seconds = float(seconds)
"""
_STAGGER_S = 0.2  # a rank: the first to speak ends the job, before all have said the same


class Watchdog:
    """A process that kills this one, with an error message, if a step takes too long. Begin before MPI starts."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> Watchdog:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid())], stdin=subprocess.PIPE, text=True
        )
        return self

    def expect(self, what: str, limit_s: float, remedy: str) -> None:
        """Set the limit of this rank's next step, `what`, in place of the last one's."""
        assert self._keeper.stdin is not None
        limit_s += _STAGGER_S * self._rank
        sentence = f"pala: error: rank {self._rank}: {what} was not done after {limit_s:.0f} s. {remedy}"
        print(limit_s, sentence, file=self._keeper.stdin, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
