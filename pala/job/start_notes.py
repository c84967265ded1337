"""Lines that say what a job does while it starts, where that takes long."""

from __future__ import annotations

import threading
import time

from pala.system.output import print_result

_FIRST_S, _EVERY_S = 4.0, 10.0


class StartNotes:
    """The stages of a start. Silent until `begin`; the lines come from a thread that sleeps."""

    def __init__(self) -> None:
        self._stage, self._began_s = "", 0.0
        self._is_over = threading.Event()

    def begin(self, stage: str) -> None:
        """Say from now on what is being done, after a while."""
        self._began_s = time.monotonic()
        self.stage(stage)
        threading.Thread(target=self._speak, name="pala-start", daemon=True).start()

    def stage(self, stage: str) -> None:
        """Name what is done next, as in `loads torch`."""
        self._stage = stage

    def end(self) -> None:
        """Say no more: training begins, or the start has failed."""
        self._is_over.set()

    def _speak(self) -> None:
        wait_s = _FIRST_S
        while not self._is_over.wait(wait_s):
            print_result(f"      after {time.monotonic() - self._began_s:.0f} s: {self._stage}")
            wait_s = _EVERY_S
