"""Gymnasium's interface, checked where PALA meets an environment.

The first reset and the first step of each environment are checked whole, before training can take a wrong value for a
right one. From then on a step is compared with what was right before: a microsecond, and the whole check where it
differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple

from pala.envs.failures import EnvFaultError
from pala.system.errors import PalaError

_LONGEST = 60  # characters of a value that are shown
_BOOLEANS = (bool, np.bool_)
_NUMBERS = (float, int, np.floating, np.integer, np.bool_)
_RESET = "(observation, info)"
_STEP = "(observation, reward, terminated, truncated, info)"


class _FaultError(Exception):
    """A value that is not as the interface wants it."""

    def __init__(self, expected: str, got: str, advice: str) -> None:
        super().__init__(expected, got, advice)
        self.expected, self.got, self.advice = expected, got, advice


class Checked(gymnasium.Wrapper):
    """Wrapper around the user's environment with its wrappers. Raises PalaError for a fault in the first reset or step,
    `EnvFaultError` for one after that, and for each of an environment that takes another's place."""

    def __init__(self, env: gymnasium.Env, name: str, is_anew: bool) -> None:
        super().__init__(env)
        self._name, self._is_anew = name, is_anew
        self._was_reset = self._was_stepped = False
        self._is_box = isinstance(env.observation_space, Box)
        self._form: tuple[Any, Any] = (None, None)  # shape and dtype of an observation of a Box that was right
        for layer in _layers(env):
            if isinstance(layer, gymnasium.wrappers.PassiveEnvChecker):  # it would warn of the same in other words
                layer.checked_reset = layer.checked_step = layer.checked_data_reuse = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and check what it returns."""
        result = self.env.reset(seed=seed, options=options)
        self._check("reset", not self._was_reset, lambda: _check_reset(result, self.env.observation_space))
        self._was_reset = True
        return result

    def step(self, action: Any) -> Any:
        """Step the environment, and check what it returns."""
        result = self.env.step(action)
        if not (self._was_stepped and self._looks_right(result)):
            self._check("step", not self._was_stepped, lambda: _check_step(result, self.env.observation_space))
            self._was_stepped = True
            if self._is_box:
                seen = np.asarray(result[0])
                self._form = (seen.shape, seen.dtype)
        return result

    def _looks_right(self, result: Any) -> bool:
        """Return whether a step's result is plainly right; False: the whole check tells."""
        if type(result) is not tuple or len(result) != 5:
            return False
        observation, reward, terminated, truncated, info = result
        if self._is_box:
            if type(observation) is not np.ndarray:
                return False
            shape, dtype = self._form
            if observation.shape != shape or observation.dtype != dtype:
                return False
        return (
            isinstance(reward, _NUMBERS)
            and isinstance(terminated, _BOOLEANS)
            and isinstance(truncated, _BOOLEANS)
            and isinstance(info, dict)
        )

    def _check(self, what: str, is_first: bool, check: Any) -> None:
        try:
            check()
        except _FaultError as fault:
            text = (
                f"'{what}' of the environment '{self._name}' breaks Gymnasium's interface: expected {fault.expected}, "
                f"but got {fault.got}. {fault.advice}"
            )
            raise (PalaError if is_first and not self._is_anew else EnvFaultError)(text) from None


def _layers(env: Any) -> Iterator[Any]:
    """Yield the environment's wrappers from the outside, and the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _check_reset(result: Any, space: gymnasium.Space) -> None:
    if not isinstance(result, tuple) or len(result) != 2:
        advice = f"End it with `return observation, info`; without infos `info` is {{}}.{_of_old_gym()}"
        raise _FaultError(_RESET, _shown(result), advice)
    _check_observation(result[0], space, "observation")
    _check_info(result[1])


def _check_step(result: Any, space: gymnasium.Space) -> None:
    if not isinstance(result, tuple):
        raise _FaultError(_STEP, _shown(result), f"End it with `return {_STEP[1:-1]}`.")
    if len(result) != 5:
        advice = f"End it with `return {_STEP[1:-1]}`.{_of_old_gym() * (len(result) == 4)}"
        raise _FaultError(_STEP, f"{len(result)} values", advice)
    observation, reward, terminated, truncated, info = result
    _check_observation(observation, space, "observation")
    if not isinstance(reward, _NUMBERS) and not (_is_single(reward) and np.asarray(reward).dtype.kind in "fiub"):
        raise _FaultError("a reward that is one number", _shown(reward), "Return `float(reward)`.")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        is_boolean = isinstance(value, _BOOLEANS) or (_is_single(value) and np.asarray(value).dtype.kind in "biu")
        if not is_boolean or value not in (0, 1):
            raise _FaultError(f"a '{name}' that is True or False", _shown(value), f"Return `bool({name})`.")
    _check_info(info)


def _check_info(info: Any) -> None:
    if not isinstance(info, dict):
        raise _FaultError("an info that is a dict", _shown(info), "Without infos return {}.")


def _check_observation(observation: Any, space: gymnasium.Space, name: str) -> None:
    if isinstance(space, Dict):
        if not isinstance(observation, Mapping) or observation.keys() != space.spaces.keys():
            keys = list(observation) if isinstance(observation, Mapping) else _shown(observation)
            raise _FaultError(f"an {name} with the keys {list(space.spaces)}", str(keys), _AS_ITS_SPACE)
        for key, part in space.spaces.items():
            _check_observation(observation[key], part, f"{name}[{key!r}]")
    elif isinstance(space, Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space.spaces):
            raise _FaultError(f"an {name} of {len(space.spaces)} parts", _shown(observation), _AS_ITS_SPACE)
        for i, part in enumerate(space.spaces):
            _check_observation(observation[i], part, f"{name}[{i}]")
    elif isinstance(space, Box):
        _check_box(observation, space, name)
    elif not space.contains(observation):
        raise _FaultError(f"an {name} in {space}", _shown(observation), _AS_ITS_SPACE)


def _check_box(observation: Any, space: Box, name: str) -> None:
    expected = f"an {name} of shape {space.shape} and type {space.dtype}"
    try:
        array = np.asarray(observation)
    except Exception:  # it is the user's: anything may happen
        raise _FaultError(expected, _shown(observation), _AS_ITS_SPACE) from None
    if array.shape != space.shape:
        raise _FaultError(expected, _shown(observation), _AS_ITS_SPACE)
    if not _is_kept_by(np.dtype(space.dtype), array.dtype):
        advice = f"Return `observation.astype(np.{space.dtype})`, or give the space the type of the observations."
        raise _FaultError(expected, _shown(observation), advice)
    if array.dtype.kind in "iu" and not (array >= space.low).all() * (array <= space.high).all():
        bounds = f"[{space.low.min()}, {space.high.max()}]"
        raise _FaultError(f"an {name} within the bounds {bounds} of its space", _shown(observation), _AS_ITS_SPACE)


def _is_kept_by(wanted: np.dtype, given: np.dtype) -> bool:
    """Return whether numbers of the type `given` stay what they are in the type `wanted`, up to rounding."""
    if wanted.kind == "f":
        return given.kind in "fiub"
    wide = wanted.kind in "iu" and given.kind in "iu" and wanted.itemsize >= 4  # of which the bounds tell
    return wide or np.can_cast(given, wanted, "safe")


def _is_single(value: Any) -> bool:
    """Return whether this is one number, perhaps of an array library."""
    return isinstance(value, int) or getattr(value, "shape", None) == ()


def _shown(value: Any) -> str:
    """Return a value as a message shows it, with its type."""
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}: {text}"
    return f"{text} (of type {type(value).__name__})"


def _of_old_gym() -> str:
    return " Where it is written for Gym before 0.26, port it or wrap it (the package shimmy has wrappers)."


_AS_ITS_SPACE = "Return observations as 'observation_space' says, or let that say what they are."
