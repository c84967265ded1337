"""One job of a supervisor, from its start to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from pala.run import run_folder
from pala.run.end_watch import LINGER_S, EndWatch
from pala.system.jobs import MpiJob
from pala.system.output import ANNOUNCEMENT, log
from pala.system.text import named

GENTLY = signal.SIGUSR1  # after SIGTERM, Open MPI's mpirun gives ranks 0.2 s: too little for a checkpoint
_ARRIVAL_S = 1.0  # between two looks at a job whose ranks are coming up
_SAY_WHO_S = 20.0  # until ranks that are not up are named
_DEAF_S = 10.0  # for an mpirun to end that was told to before its ranks came up
_ANNOUNCED = re.compile(re.escape(ANNOUNCEMENT) + r" (begun|up) (\d+)")


class Arrivals:
    """The ranks of a job that have come up, from what they announce on the standard error that all share."""

    def __init__(self, ranks: int) -> None:
        self.all_up = False
        self._ranks = set(range(ranks))
        self._at: dict[str, set[int]] = {"begun": set(), "up": set()}

    def read(self, line: bytes) -> bool:
        """Take note of a line. Returns True if it is nothing but an announcement.

        Launchers put tags before lines, and join those of ranks."""
        text = line.decode(errors="replace")
        for stage, rank in _ANNOUNCED.findall(text):
            self._at[stage].add(int(rank))
        self.all_up = self._at["up"] >= self._ranks
        return bool(_ANNOUNCED.search(text)) and not _ANNOUNCED.sub("", text).strip()

    def missing(self) -> str:
        """Name the ranks that are not up; empty if all are."""
        absent = sorted(self._ranks - self._at["begun"])
        if absent:
            return f"{named(absent)} did not begin"
        waiting = sorted(self._ranks - self._at["up"])
        if not waiting:
            return ""
        return f"all ranks had begun, but {named(waiting)} did not come out of MPI's start"


class Attempt:
    """A job that makes or resumes a run: it is watched while it starts, trains and ends."""

    def __init__(self, run: Path, ranks: int, start_timeout_s: float) -> None:
        """`ranks`: of the job; `start_timeout_s`: the longest that they may take to come up."""
        self.said_mistake = False  # a mistake of the user's
        self.is_late = False  # its ranks did not come up in time
        self._run, self._segments = run, run_folder.num_segments(run)
        self._arrivals, self._start_timeout_s = Arrivals(ranks), start_timeout_s
        self._job: MpiJob | None = None
        self._is_told = False  # to end

    def train(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the job and wait for its end. Returns mpirun's status, or 128 + the signal that killed it."""
        self._job = job = MpiJob(words, environment, stderr=subprocess.PIPE)
        if self._is_told:  # before there was a job
            job.send_signal(GENTLY)
        relay = threading.Thread(target=self._relay, args=[job.launcher.stderr], daemon=True)
        relay.start()
        # Not by this thread: a file system that hangs must not keep signals from the job.
        watch = threading.Thread(target=self._watch, args=[job], daemon=True)
        watch.start()
        status = job.reap()
        watch.join()
        relay.join(2)  # ranks that outlive mpirun keep the pipe open
        if self.is_late:
            return status if status > 0 else 1
        return status if status >= 0 else 128 - status

    def tell(self, number: int) -> None:
        """Send the job a signal to end, at once or as soon as there is a job; none if it has ended."""
        self._is_told = True
        if self._job is not None:
            self._job.send_signal(number)

    def _relay(self, stderr: IO[bytes]) -> None:
        """Pass on to this process' standard error what ranks say, and notice a user's mistake.

        What cannot be written (a log on a full disk) is lost, but still read: ranks and mpirun would hang on a full
        pipe."""
        for line in stderr:
            if self._arrivals.read(line):
                continue
            self.said_mistake |= b"pala: error:" in line
            with suppress(OSError):
                os.write(sys.stderr.fileno(), line)

    def _watch(self, job: MpiJob) -> None:
        self._end_if_it_does_not_start(job)
        self._end_if_it_does_not_end(job)

    def _end_if_it_does_not_start(self, job: MpiJob) -> None:
        """Wait until all ranks are up, and end a job that does not get there, or that is told to end before.

        Where MPI is fault-tolerant, ranks wait in MPI_Init forever for one that ended before; and mpirun loses a
        signal that comes before it has started them. A job that has made its entry in the run's record has started,
        whatever became of the announcements."""
        latest_s = time.monotonic() + self._start_timeout_s
        say_s = time.monotonic() + _SAY_WHO_S
        while not self._arrivals.all_up and job.wait(_ARRIVAL_S) is None:
            if not (missing := self._arrivals.missing()):  # the last came up meanwhile
                break
            is_late = time.monotonic() > latest_s
            if time.monotonic() > say_s and not is_late:
                say_s += 2 * _SAY_WHO_S
                say(f"the job still starts: so far {missing}.")
            if not self._is_told and not is_late:
                continue
            if run_folder.num_segments(self._run) > self._segments:
                break
            if not self._is_told:
                self.is_late = True
                say(
                    f"after {self._start_timeout_s:g} s ('run.start_timeout_s') {missing}; the job is ended. "
                    "Look above for what these ranks or their hosts said, or run `pala doctor` in the same way."
                )
            _end(job)
            return
        if self._is_told:  # it may have come before the last of them
            job.send_signal(GENTLY)

    def _end_if_it_does_not_end(self, job: MpiJob) -> None:
        """Wait for mpirun's end, and end it if it outlives its ranks."""
        if job.outlives_its_ranks(EndWatch(self._run, self._segments).is_over):
            say(f"no rank has lived for {LINGER_S:g} s, but mpirun has not ended: it is ended.")
            _end(job)


def _end(job: MpiJob) -> None:
    if not job.end(signal.SIGINT, _DEAF_S):  # SIGTERM is blocked
        job.kill()


def say(text: str) -> None:
    """Report something of a job or its run."""
    log(f"pala train: {text}")
