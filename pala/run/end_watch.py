"""The sign that the job of a run is over, though its launcher has not ended (`MpiJob.outlives_its_ranks`)."""

from __future__ import annotations

from pathlib import Path

from pala.run import run_folder
from pala.run.lock import is_locked
from pala.system.jobs import LOOK_S

LINGER_S = 180.0  # without a rank: they may need two minutes to leave MPI


class EndWatch:
    """A watch on the folder of the run that a job makes or resumes."""

    def __init__(self, run: Path, earlier_segments: int) -> None:
        """Watch from now on. `earlier_segments`: number of segments of jobs before this one."""
        self._run, self._segments = run, earlier_segments
        self._over_s = 0.0
        self._was_locked = False
        self._written_s = 0.0

    def is_over(self) -> bool:
        """Return True if no rank has lived for `LINGER_S`. Must be asked every `LOOK_S`."""
        if run_folder.num_segments(self._run) > self._segments:  # before, who looks at a lock that nobody has, has it
            self._was_locked = self._was_locked or is_locked(self._run) is True
        before_s, self._written_s = self._written_s, run_folder.last_written_s(self._run)  # a lock may be of one host
        is_quiet = before_s == self._written_s and run_folder.is_over(self._run, self._segments, self._was_locked)
        self._over_s = self._over_s + LOOK_S if is_quiet else 0.0
        return self._over_s >= LINGER_S
