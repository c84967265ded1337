"""Gymnasium wrappers by name, as `env.wrappers` lists them, the innermost first; and what resets are given.

| written | is |
|---|---|
| `FlattenObservation` | a wrapper of `gymnasium.wrappers` |
| `RescaleObservation(min_obs=-1, max_obs=1)` | the same with arguments: keywords and plain values |
| `my_package.wrappers:Mine` | a wrapper of one's own, or a function from an environment to an environment |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from pala.system.errors import PalaError, nearest
from pala.system.names import import_named, named_call, parse_call

Wrap = Callable[[gymnasium.Env], gymnasium.Env]
_SOURCE = "'env.wrappers'"
_FORGETFUL = {
    "NormalizeObservation": ("normalize_observations", "RescaleObservation"),
    "NormalizeReward": ("normalize_rewards", "TransformReward in a wrapper of your own"),
}  # what to take in its place: a setting, a fixed scale


def wrapped(make_env: Callable[[], gymnasium.Env], names: Sequence[str]) -> Callable[[], gymnasium.Env]:
    """Return a factory of wrapped environments. Raises PalaError for an unknown wrapper."""
    wraps = [(name, _wrap(name)) for name in names]

    def make() -> gymnasium.Env:
        env = make_env()
        for name, wrap in wraps:
            try:
                env = wrap(env)
            except Exception as error:  # it is the user's code: anything may happen
                raise PalaError(
                    f"{_SOURCE}: '{name}' fails to wrap {env} ({type(error).__name__}: {error})."
                ) from error
            if not isinstance(env, gymnasium.Env):
                raise PalaError(f"{_SOURCE}: '{name}' gives {env!r}, but must give a gymnasium.Env.")
        return env

    return make if wraps else make_env


class ResetWith(gymnasium.Wrapper):
    """Wrapper that hands `options` to each reset that is given none: an episode's end resets without."""

    def __init__(self, env: gymnasium.Env, options: dict[str, Any]) -> None:
        super().__init__(env)
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        return self.env.reset(seed=seed, options=options or copy.deepcopy(self._options))


def with_options(make_env: Callable[[], gymnasium.Env], text: str) -> Callable[[], gymnasium.Env]:
    """Return a factory of environments whose resets get these options, `key=value, ...`. Raises PalaError."""
    try:
        _, options = parse_call(f"options({text})")
    except ValueError:
        raise PalaError(
            f"'env.reset_options' is '{text}': write keys with plain values, such as `low=-0.1, high=0.1`."
        ) from None
    return (lambda: ResetWith(make_env(), options)) if options else make_env


def _wrap(text: str) -> Wrap:
    own_name = text.strip().removeprefix("gymnasium.wrappers:")
    name, arguments = named_call(own_name, _SOURCE, "`Name`, `module:Name` or `Name(key=value)`")
    wrapper = import_named(name, _SOURCE) if ":" in name else _of_gymnasium(name)
    return lambda env: wrapper(env, **arguments)


def _of_gymnasium(name: str) -> Any:
    known = [known for known in gymnasium.wrappers.__all__ if known[0].isupper()]
    if name not in known:
        hint = nearest(name, known) or "; one of your own is written 'module:Name'."
        raise PalaError(f"{_SOURCE}: gymnasium.wrappers has no '{name}'{hint}")
    if name in _FORGETFUL:
        setting, fixed = _FORGETFUL[name]
        raise PalaError(
            f"{_SOURCE}: '{name}' keeps its statistics in each environment, and no run saves them: an evaluation would "
            f"begin with others. Use 'env.{setting}' (A2C), or a fixed scale: {fixed}."
        )
    try:
        return getattr(gymnasium.wrappers, name)
    except (ImportError, gymnasium.error.Error) as error:
        raise PalaError(f"{_SOURCE}: '{name}' cannot be loaded ({error}).") from None
