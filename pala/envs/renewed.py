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
    error_of_start,
    failure_of,
    seed_after,
)
from pala.envs.masks import KEY, an_action, missing
from pala.system.errors import PalaError


class Maker(Protocol):
    """A factory of environments that knows how to end them."""

    name: str

    def make(self, is_anew: bool) -> gymnasium.Env:
        """Make an environment; `is_anew`: in place of one that has failed."""

    def discard(self, env: gymnasium.Env) -> None:
        """Close an environment that has failed."""


class Renewed(gymnasium.Wrapper):
    """Outermost wrapper of an environment. Where the one inside fails, it makes another and begins an episode: such a
    step ends nothing, gives no reward, and has the failures in its info. Raises FailedTooOftenError after more than
    `restarts` failures without a whole episode in between, and PalaError for a mistake of the user's."""

    def __init__(self, maker: Maker, restarts: int, in_a_row: int = 0) -> None:
        """`in_a_row`: failures of environments in whose place this one is."""
        super().__init__(maker.make(is_anew=in_a_row > 0))
        self._maker = maker
        self._restarts = restarts
        self._in_a_row = in_a_row
        self._seed: int | None = None
        self._renewals = 0
        self._is_float = np.dtype(self.observation_space.dtype).kind == "f"

    def try_out(self, seed: int) -> None:
        """Reset and step once, before all else. Raises PalaError for what fails: nothing takes its place."""
        what = "'reset'"
        try:
            _, info = self._reset(seed)
            what = "'step'"
            _, _, terminated, truncated, after = self._step(an_action(self.action_space, info.get(KEY)))
        except PalaError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen
            raise error_of_start(failure_of(what, error), self._maker.name) from None
        if (KEY in info) != (KEY in after) and not (terminated or truncated):
            raise missing(self._maker.name, KEY in info)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self._seed = seed
        try:
            return self._reset(seed, options)
        except PalaError:
            raise
        except (Exception, SystemExit) as error:
            return self._renew(failure_of("'reset'", error))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or begin an episode in a new environment."""
        try:
            observation, reward, terminated, truncated, info = self._step(action)
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

    def _step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not math.isfinite(reward):
            raise EnvFaultError(f"'step' returned a reward that is not finite: {reward}")
        if self._is_float:
            _check_finite("step", observation)
        return observation, reward, terminated, truncated, info

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
                self.env = self._maker.make(is_anew=True)
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
