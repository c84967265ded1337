"""Waiting without spinning a core."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.output import log
from pala.system.text import named

_PATIENCE_AFTER_SIGNAL_S = 30.0  # ranks may save at unlike speeds
_NAP_S = 0.2
_COMPLAIN_AFTER_S = 60.0
TELL_S, SAY_S = 2.0, 20.0
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

    def fault(self, timeout_s: float) -> str:
        """Return what to say when a wait of at most `timeout_s` is over."""
        return (
            f"The other ranks did not answer within {timeout_s:.0f} s; the job ends here. A run that is not complete "
            "continues from its newest checkpoint."
        )


class WaitForRanks(LongWait):
    """A rank's wait until all ranks have come. After a while it tells the others that it waits, and the lowest of those
    that wait names the ranks that have not come."""

    def __init__(self, rank: int, where: str | None) -> None:
        """`where`: the place in the code that all come to, or None if the wait is expected and nothing is said."""
        super().__init__()
        self._rank, self._where = rank, where
        self._has_told = False
        self._say_s = SAY_S

    @abstractmethod
    def tell(self) -> None:
        """Tell the other ranks that this one waits."""

    @abstractmethod
    def missing(self) -> Sequence[int]:
        """Return the living ranks that are not known to wait, sorted."""

    @abstractmethod
    def is_first(self) -> bool:
        """Return whether this rank is the lowest that is known to wait."""

    def look(self) -> None:
        super().look()
        if self.took_s > TELL_S and not self._has_told:
            self._has_told = True
            self.tell()
        if self.took_s > self._say_s:
            self._say_s *= 2
            if self._where is not None and (missing := self.missing()) and self.is_first():
                place = f" at {self._where}" if self._where else ""
                log(f"[rank {self._rank}] has waited {self.took_s:.0f} s{place} for {named(missing)}.")

    def fault(self, timeout_s: float) -> str:
        if not self._where or not (missing := self.missing()):
            return super().fault(timeout_s)
        return (
            f"[rank {self._rank}] has waited {timeout_s:.0f} s at {self._where}, to which {named(missing)} did not "
            "come: all living ranks must come to it. The job ends here."
        )


def nap(seconds: float) -> None:
    """Sleep in short pieces. A signal that comes as a sleep begins, after Python has looked for signals for the last
    time, is heard only when that sleep is over."""
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        time.sleep(min(rest, _NAP_S))


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
            raise EndError(wait.fault(timeout_s))
        if signalled_s is not None and wait.took_s > signalled_s + _PATIENCE_AFTER_SIGNAL_S:
            raise EndError(
                f"The other ranks did not end within {_PATIENCE_AFTER_SIGNAL_S:.0f} s of the signal; a run that is not "
                "complete continues from its newest checkpoint."
            )
        sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
