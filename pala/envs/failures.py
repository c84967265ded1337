"""Environments that fail: they are made anew, and their rank trains on (`env.restarts`).

An environment fails that raises an error, breaks the interface after its first step, or gives a reward or an
observation that is not finite; in a process of its own also one whose process dies or does not answer
(`processes.py`). A new one takes its place and begins an episode. The step in which it failed is no transition, and
the episode that it cut is in no return.
"""

from __future__ import annotations

import math
import traceback
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from pala.envs.interface import EnvFaultError
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


class Maker(Protocol):
    """A factory of environments that knows how to end them."""

    name: str

    def make(self) -> gymnasium.Env:
        """Make an environment."""

    def discard(self, env: gymnasium.Env) -> None:
        """Close an environment that has failed."""


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


def _check_finite(what: str, observation: Any) -> None:
    if math.isfinite(np.vdot(observation, observation)):  # a microsecond; where that overflows, the next line tells
        return
    if not np.isfinite(observation).all():
        raise EnvFaultError(f"'{what}' returned an observation that is not finite")


def seed_after(seed: int | None, renewals: int) -> int | None:
    """Return the seed of the environment that takes the place of one that had `seed`; None: by chance."""
    return None if seed is None else int(derive(seed, renewals, "environment made anew")[0])


class Renewed(gymnasium.Wrapper):
    """Outermost wrapper of an environment. Where the one inside fails, it makes another and begins an episode: such a
    step ends nothing, gives no reward, and has the failures in its info. Raises FailedTooOftenError after more than
    `restarts` failures without a whole episode in between, and PalaError for a mistake of the user's."""

    def __init__(self, maker: Maker, restarts: int, in_a_row: int = 0) -> None:
        """`in_a_row`: failures of environments in whose place this one is."""
        super().__init__(maker.make())
        self._maker = maker
        self._restarts = restarts
        self._in_a_row = in_a_row
        self._seed: int | None = None
        self._renewals = 0
        self._is_float = np.dtype(self.observation_space.dtype).kind == "f"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self._seed = seed
        try:
            return self._reset(seed, options)
        except PalaError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen
            return self._renew(failure_of("'reset'", error))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or begin an episode in a new environment."""
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if not math.isfinite(reward):
                raise EnvFaultError(f"'step' returned a reward that is not finite: {reward}")
            if self._is_float:
                _check_finite("step", observation)
        except PalaError:
            raise
        except (Exception, SystemExit) as error:
            observation, info = self._renew(failure_of("'step'", error))
            return observation, 0.0, False, False, info
        if terminated or truncated:
            self._in_a_row = 0
        return observation, reward, terminated, truncated, info

    def _reset(self, seed: int | None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        if self._is_float:
            _check_finite("reset", observation)
        return observation, info

    def _renew(self, failure: Failure) -> tuple[Any, dict[str, Any]]:
        """Return the first observation of a new environment, and the failures until there was one."""
        failures: list[Failure] = []
        while True:
            failures.append(failure)
            self._in_a_row += 1
            self._renewals += 1
            if self._in_a_row > self._restarts:
                raise FailedTooOftenError.after(failure, self._in_a_row, self._maker.name, self._restarts)
            self._maker.discard(self.env)
            try:
                self.env = self._maker.make()
                observation, info = self._reset(seed_after(self._seed, self._renewals))
            except (Exception, SystemExit) as error:
                failure = failure_of("a new one", error)
            else:
                return observation, info | {FAILURES: failures}
