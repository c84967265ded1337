"""Environments that fail: they are made again, and their rank trains on (`env.restarts`).

An environment fails that raises an error, breaks the interface after its first step, or gives a reward or an
observation that is not finite; in a process of its own also one that raises another exception, or whose process dies
or does not answer (`processes.py`). A new one takes its place and begins an episode. The step in which it failed is no
transition, and the episode that it cut is in no return.

Before a training begins, each rank tries out its first environment by a reset and a step. A failure there is a mistake
of the start, which making it again does not mend.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from pala.system.errors import PalaError
from pala.system.output import log
from pala.system.seeding import derive

FAILURES = "failures"  # key of an info: list of the failures since the last answer
CLOSE_S = 30.0  # what closing environments may take without a word
_FRAMES = 3  # of a traceback
_ADVICE = {
    "daemonic processes are not allowed to have children": (
        "an environment in a process of its own cannot start others by multiprocessing: take 'env.vectorization' "
        "'sync', or start them by subprocess"
    ),
    "not enough values to unpack (expected 5, got 4)": (  # of Gymnasium's wrappers, of which `make` adds some
        "'step' must return (observation, reward, terminated, truncated, info)"
    ),
    "reset() got an unexpected keyword argument": "define it as `def reset(self, *, seed=None, options=None):`",
}  # by what an exception says


class Failure(NamedTuple):
    """One failure of an environment."""

    text: str
    """Account of it, as the second half of a sentence."""
    trace: str = ""
    """The last lines of the traceback, if an exception tells more than the text."""


class EnvFaultError(Exception):
    """A fault in what an environment returns, as one sentence; it counts as if the environment had raised it."""


class FailedTooOftenError(PalaError):
    """The failure of an environment after which its rank gives up."""

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.trace = trace

    @classmethod
    def after(cls, failure: Failure, times: int, name: str, restarts: int) -> FailedTooOftenError:
        """Make the error for the last of `times` failures in a row of the environment `name`."""
        if restarts == 0:
            return cls(f"The environment '{name}' has failed: {failure.text.rstrip('.')}.", failure.trace)
        text = (
            f"The environment '{name}' has failed {times} times without a whole episode in between, and 'env.restarts' "
            f"is {restarts}; the last time {failure.text}"
        )
        return cls(text if text.endswith(".") else f"{text}.", failure.trace)


def failure_of(what: str, error: BaseException) -> Failure:
    """Return the failure that an exception in `what` is; the text names its place."""
    advice = "".join(f"; {advice}" for said, advice in _ADVICE.items() if said in str(error))
    if isinstance(error, (EnvFaultError, PalaError)):  # it says all
        return Failure(str(error).rstrip(".") + advice)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES, chain=False))
    words = " ".join(str(error).split())
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return Failure(f"{what} raised {said}{place}{advice}", trace)


def error_of_start(failure: Failure, name: str) -> PalaError:
    """Make the error for a failure of the environment `name` when it is tried out."""
    return PalaError(f"The environment '{name}' fails at the start: {failure.text.rstrip('.')}.")


def seed_after(seed: int | None, renewals: int) -> int | None:
    """Return the seed of the environment that takes the place of one that had `seed`; None: by chance."""
    return None if seed is None else int(derive(seed, renewals, "environment made anew")[0])


@contextlib.contextmanager
def told_if_it_takes_long() -> Iterator[None]:
    """Report that `close` of the user's environments, inside the block, takes long."""
    waits = f"'close' of the environments has not returned for {CLOSE_S:g} s; this process still waits for it."
    notice = threading.Timer(CLOSE_S, log, [waits])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
