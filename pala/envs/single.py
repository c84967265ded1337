"""One environment as vectors of them step it: what makes it, and what takes its place where it fails.

Its wrappers, the innermost first:

| wrapper | does |
|---|---|
| `env.wrappers` (`wrappers.py`) | what the user asks for |
| `ResetWith` (`wrappers.py`) | gives `env.reset_options` to each reset |
| `Checked` (`interface.py`) | holds what the environment returns to Gymnasium's interface |
| `TransformObservation` | makes of an observation what the network gets (`spaces.py`) |
| `TimeLimit` | truncates episodes |
| `Renewed` | reads masks and infos, refuses NaN, and puts another environment in the place of one that fails |
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from pala.config import EnvConfig
from pala.envs.failures import (
    FAILURES,
    EnvFaultError,
    FailedTooOftenError,
    Failure,
    error_of_start,
    failure_of,
    seed_after,
    told_if_it_takes_long,
)
from pala.envs.interface import Checked
from pala.envs.masks import KEY, MaskReader, an_action, missing
from pala.envs.spaces import Inputs, inputs_of
from pala.system.errors import PalaError

_MOST = float(np.finfo(np.float32).max)  # which rewards and observations become


class Factory:
    """Makes environments whose observations are what the network gets; knows what the first one is called."""

    def __init__(self, make_env: Callable[[], gymnasium.Env], config: EnvConfig, max_episode_steps: int | None) -> None:
        self._make_env = make_env
        self._layout = config.image_layout
        self._max_episode_steps = max_episode_steps
        self.episode_info = config.episode_info
        self.restarts = config.restarts
        self.name = ""
        self.inputs: Inputs | None = None
        self._spaces: tuple[gymnasium.Space, gymnasium.Space] | None = None
        self._made: list[gymnasium.Env] = []  # in this process; the user's

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to make its own environments."""
        return self.__dict__ | {"_made": []}

    def __call__(self, in_a_row: int = 0) -> Renewed:
        """Make an environment in whose place others are made as they fail; `in_a_row` others have failed before it."""
        return Renewed(self, in_a_row)

    def make(self, is_anew: bool) -> gymnasium.Env:
        """Make one environment; `is_anew`: in place of one that has failed. Raises PalaError."""
        try:
            env = self._make_env()
        except (PalaError, gymnasium.error.Error):
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise PalaError(
                f"The environment cannot be made ({type(error).__name__}: {error}; {at.filename}, line {at.lineno})."
            ) from error
        if not isinstance(env, gymnasium.Env):
            raise PalaError(f"'make_env' returns {env!r}, but must return a gymnasium.Env.")
        bare = env.unwrapped
        if any(bare is other.unwrapped for other in self._made):
            raise PalaError("'make_env' returns the same environment again, but must make a new one each time.")
        self._made.append(env)
        self.name = bare.spec.id if bare.spec is not None else type(bare).__name__
        for key in ("observation_space", "action_space"):  # gymnasium.Env declares both, and sets none
            if not isinstance(getattr(env, key, None), gymnasium.Space):
                raise PalaError(
                    f"The environment '{self.name}' has no '{key}' that is a gymnasium.Space; let it set one."
                )
        spaces = env.observation_space, env.action_space
        self._spaces = self._spaces or spaces
        if spaces != self._spaces:
            raise PalaError(
                f"Environments must have the same spaces, but the first one made has {self._spaces}, and another "
                f"{spaces}."
            )
        self.inputs = inputs = inputs_of(env.observation_space, self._layout)
        env = Checked(env, self.name, is_anew)
        if not inputs.is_identity:
            env = gymnasium.wrappers.TransformObservation(env, inputs.encode, inputs.space)
        limit = self._max_episode_steps
        return env if limit is None else gymnasium.wrappers.TimeLimit(env, limit)

    def discard(self, env: gymnasium.Env) -> None:
        """Close an environment that is not needed any more."""
        self._made = [made for made in self._made if made.unwrapped is not env.unwrapped]
        # If a failure was before, that is told.
        with contextlib.suppress(Exception, SystemExit), told_if_it_takes_long():
            env.close()

    def close(self) -> None:
        """Close what was made in this process, after a failure."""
        for env in list(self._made):
            self.discard(env)


class Renewed(gymnasium.Wrapper):
    """Outermost wrapper of an environment. Where the one inside fails, it makes another and begins an episode: such a
    step ends nothing, gives no reward, and has the failures in its info.

    Infos hold nothing else but the asked numbers of an episode's last one, and masks: of some (None beside a number,
    arrays of unlike lengths) no arrays can be made. Raises FailedTooOftenError after more than `env.restarts` failures
    without a whole episode in between, and PalaError for a mistake of the user's.
    """

    def __init__(self, factory: Factory, in_a_row: int) -> None:
        super().__init__(factory.make(is_anew=in_a_row > 0))
        self._factory = factory
        self._masks = MaskReader(self.env, factory.name)
        self.in_a_row = in_a_row
        """Failures without a whole episode in between, those of environments in whose place this one is included."""
        self._seed: int | None = None
        self._renewals = 0
        self._is_float = np.dtype(self.observation_space.dtype).kind == "f"

    def try_out(self, seed: int) -> np.ndarray:
        """Reset and step once, before all else; return the first observation. Raises PalaError for what fails: nothing
        takes its place."""
        what = "'reset'"
        try:
            first, info = self._reset(seed)
            first = np.array(first)  # a step may write into the same array
            what = "'step'"
            _, _, terminated, truncated, after = self._step(an_action(self.action_space, info.get(KEY)))
        except PalaError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen
            raise error_of_start(failure_of(what, error), self._factory.name) from None
        if (KEY in info) != (KEY in after) and not (terminated or truncated):
            raise missing(self._factory.name, KEY in info)
        return first

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
            self.in_a_row = 0
        return observation, reward, terminated, truncated, info

    def _reset(self, seed: int | None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        masks = self._masks.read(info)
        self._check_observation("reset", observation)
        return observation, masks

    def _step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and keep the last observation through the reset, though the environment writes all into one array."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:  # the next mask is that of the reset
            told: dict[str, Any] = {key: _number(key, info) for key in self._factory.episode_info}
        else:
            told = self._masks.read(info)
        if not abs(float(reward)) <= _MOST:
            raise EnvFaultError(f"'step' returned a reward that is not finite: {reward}")
        self._check_observation("step", observation)
        return (np.array(observation) if truncated else observation), reward, terminated, truncated, told

    def _check_observation(self, what: str, observation: Any) -> None:
        if np.shape(observation) != self.observation_space.shape:
            raise EnvFaultError(
                f"'{what}' returned an observation of shape {np.shape(observation)}, not {self.observation_space.shape}"
            )
        if self._is_float:
            _check_finite(what, observation)

    def _renew(self, failure: Failure) -> tuple[Any, dict[str, Any]]:
        """Return the first observation of a new environment, and the failures until there was one."""
        failures: list[Failure] = []
        factory = self._factory
        while True:
            failures.append(failure)
            self.in_a_row += 1
            self._renewals += 1
            if self.in_a_row > factory.restarts:
                raise FailedTooOftenError.after(failure, self.in_a_row, factory.name, factory.restarts)
            factory.discard(self.env)
            try:
                self.env = factory.make(is_anew=True)
                self._masks = MaskReader(self.env, factory.name)
                observation, info = self._reset(seed_after(self._seed, self._renewals))
            except (Exception, SystemExit) as error:
                failure = failure_of("a new one", error)
            else:
                return observation, info | {FAILURES: failures}


def _number(key: str, info: dict[str, Any]) -> float:
    try:
        return float(info[key])
    except (KeyError, TypeError, ValueError):
        there = f"is {info[key]!r}, no number" if key in info else f"is not there; there are {sorted(map(str, info))}"
        raise PalaError(f"'env.episode_info': '{key}' of an episode's last info {there}.") from None


def _check_finite(what: str, observation: Any) -> None:
    if np.vdot(observation, observation) <= _MOST:  # a microsecond; where that overflows, the next line tells
        return
    if not (np.abs(observation) <= _MOST).all():
        raise EnvFaultError(f"'{what}' returned an observation that is not finite")
