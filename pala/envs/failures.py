"""Environments that fail: they are made anew, and their rank trains on (`env.restarts`).

An environment fails that raises an error, breaks the interface after its first step, or gives a reward or an
observation that is not finite; in a process of its own also one whose process dies or does not answer
(`processes.py`). A new one takes its place and begins an episode. The step in which it failed is no transition, and
the episode that it cut is in no return. A failure in the first reset is a mistake of the start.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from pala.system.errors import PalaError
from pala.system.seeding import derive

FAILURES = "failures"  # key of an info: list of the failures since the last answer
_FRAMES = 3  # of a traceback
_DAEMON = "daemonic processes are not allowed to have children"
_NO_CHILDREN = (
    "; an environment in a process of its own cannot start others by multiprocessing: take 'env.vectorization' 'sync', "
    "or start them by subprocess"
)


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
        often = "once" if times == 1 else f"{times} times without a whole episode in between"
        text = (
            f"The environment '{name}' has failed {often}, and 'env.restarts' is {restarts}; the last time "
            f"{failure.text}"
        )
        return cls(text if text.endswith(".") else f"{text}.", failure.trace)


def failure_of(what: str, error: BaseException) -> Failure:
    """Return the failure that an exception in `what` is; the text names its place."""
    advice = _NO_CHILDREN if _DAEMON in str(error) else ""
    if isinstance(error, (EnvFaultError, PalaError)):  # it says all
        return Failure(str(error).rstrip(".") + advice)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES, chain=False))
    words = " ".join(str(error).split())
    return Failure(f"{what} raised {type(error).__name__}: {words}{place}{advice}", trace)


def error_of_first_reset(failure: Failure, name: str) -> PalaError:
    """Make the error for a failure in the first reset of the environment `name`: a mistake of the start, which making
    it anew does not mend."""
    return PalaError(f"The environment '{name}' fails in its first reset: {failure.text.rstrip('.')}.")


def seed_after(seed: int | None, renewals: int) -> int | None:
    """Return the seed of the environment that takes the place of one that had `seed`; None: by chance."""
    return None if seed is None else int(derive(seed, renewals, "environment made anew")[0])
