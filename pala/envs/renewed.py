"""One environment as vectors of them step it: in place of one that fails there is another."""

from __future__ import annotations

import math
from typing import Any, Protocol

import gymnasium
import numpy as np

from pala.envs.failures import (
    FAILURES,
    EnvFaultError,
    FailedTooOftenError,
    Failure,
    error_of_first_reset,
    failure_of,
    seed_after,
)
from pala.system.errors import PalaError


class Maker(Protocol):
    """A factory of environments that knows how to end them."""

    name: str

    def make(self) -> gymnasium.Env:
        """Make an environment."""

    def discard(self, env: gymnasium.Env) -> None:
        """Close an environment that has failed."""


class Renewed(gymnasium.Wrapper):
    """Outermost wrapper of an environment. Where the one inside fails, it makes another and begins an episode: such a
    step ends nothing, gives no reward, and has the failures in its info. Raises FailedTooOftenError after more than
    `restarts` failures without a whole episode in between, and PalaError for a failure in the first reset or another
    mistake of the user's."""

    def __init__(self, maker: Maker, restarts: int, in_a_row: int = 0) -> None:
        """`in_a_row`: failures of environments in whose place this one is."""
        super().__init__(maker.make())
        self._maker = maker
        self._restarts = restarts
        self._in_a_row = in_a_row
        self._has_begun = in_a_row > 0  # this one, or one in whose place it is
        self._seed: int | None = None
        self._renewals = 0
        self._is_float = np.dtype(self.observation_space.dtype).kind == "f"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self._seed = seed
        try:
            observation, info = self._reset(seed, options)
        except PalaError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen
            failure = failure_of("'reset'", error)
            if not self._has_begun:
                raise error_of_first_reset(failure, self._maker.name) from None
            return self._renew(failure)
        self._has_begun = True
        return observation, info

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


def _check_finite(what: str, observation: Any) -> None:
    if math.isfinite(np.vdot(observation, observation)):  # a microsecond; where that overflows, the next line tells
        return
    if not np.isfinite(observation).all():
        raise EnvFaultError(f"'{what}' returned an observation that is not finite")
