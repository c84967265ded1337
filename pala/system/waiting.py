"""Waiting without spinning a core."""

from __future__ import annotations

import time
from collections.abc import Callable

from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.output import log

_PATIENCE_AFTER_SIGNAL_S = 10.0
_COMPLAIN_AFTER_S = 60.0
_AWAY_S = 5.0  # looks are milliseconds apart: after a longer gap this process was stopped, perhaps with all others


class LongWait:
    """A rank's wait for `what`, from now on. If `what` is given, a line each minute tells of the wait. Time in which
    this process is stopped does not count."""

    def __init__(self, rank: int = 0, what: str = "") -> None:
        self._rank, self._what = rank, what
        self._last_look = time.monotonic()
        self._complain_s = _COMPLAIN_AFTER_S
        self.took_s = 0.0

    def look(self) -> None:
        """Count the time since the last look. To be called often."""
        now = time.monotonic()
        if now - self._last_look <= _AWAY_S:
            self.took_s += now - self._last_look
        self._last_look = now
        if self._what and self.took_s > self._complain_s:
            log(f"[rank {self._rank}] has waited {self.took_s:.0f} s for {self._what}")
            self._complain_s = self.took_s + _COMPLAIN_AFTER_S


def wait_asleep(
    done: Callable[[], bool],
    timeout_s: float | None,
    interrupt: Interrupt,
    longest_sleep_s: float = 0.01,
    wait: LongWait | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until `done()`; after a signal, not for long. Raises EndError when time is up.

    `wait`: says that it takes long. `sleep(seconds)`, if it is another one, returns early when `done()` is worth
    another look, so it sleeps long at once.
    """
    wait = wait or LongWait()
    sleep_s = 1e-4 if sleep is time.sleep else longest_sleep_s
    signalled_s: float | None = None
    while not done():
        wait.look()
        if interrupt.signal is not None and signalled_s is None:
            signalled_s = wait.took_s
        if timeout_s is not None and wait.took_s > timeout_s:
            raise EndError(
                f"The other ranks did not answer within {timeout_s:.0f} s; the job ends here. A run "
                "that is not complete goes on from the newest checkpoint by `--resume`."
            )
        if signalled_s is not None and wait.took_s > signalled_s + _PATIENCE_AFTER_SIGNAL_S:
            raise EndError(
                "The other ranks did not end within 10 s of the signal; a run that is not complete goes on from the "
                "last checkpoint by `--resume`."
            )
        sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
