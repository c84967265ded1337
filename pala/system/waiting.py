"""Waiting without spinning a core."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pala.system.errors import EndError
from pala.system.runtime import Interrupt, say

_PATIENCE_AFTER_SIGNAL_S = 10.0
_COMPLAIN_AFTER_S = 60.0
_AWAY_S = 5.0  # between two looks, which are milliseconds apart: this process was stopped, perhaps with all others


def wait_quietly(
    done: Callable[[], bool], timeout_s: float | None, interrupt: Interrupt, longest_sleep_s: float = 0.01,
    what: str = "", sleep: Callable[[float], object] = time.sleep,
) -> None:  # fmt: skip
    """Wait until `done()`; after a signal, not for long. Raises EndError when time is up, of which none passes while
    this process is stopped.

    If it takes long, says again and again that it waits for `what`, if that is given. `sleep(seconds)` may return
    early, when `done()` is worth another look.
    """
    begin, sleep_s = time.monotonic(), 1e-4
    before = begin
    complain_at = begin + _COMPLAIN_AFTER_S if what else math.inf
    signalled_at: float | None = None
    while not done():
        now = time.monotonic()
        if (away_s := now - before) > _AWAY_S:
            begin, complain_at = begin + away_s, complain_at + away_s
            signalled_at = signalled_at + away_s if signalled_at is not None else None
        before = now
        if interrupt.signal is not None and signalled_at is None:
            signalled_at = now
        if now > complain_at:
            say(f"{what}: has waited for it for {now - begin:.0f} s")
            complain_at = now + _COMPLAIN_AFTER_S
        if timeout_s is not None and now > begin + timeout_s:
            raise EndError(
                f"The other ranks did not answer within {timeout_s:.0f} s; the job ends here. This rank's checkpoint "
                "is written: a run that is not complete goes on by `--resume`."
            )
        if signalled_at is not None and now > signalled_at + _PATIENCE_AFTER_SIGNAL_S:
            raise EndError(
                "The other ranks did not end within 10 s of the signal; a run that is not complete goes on from the "
                "last checkpoint by `--resume`."
            )
        sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
