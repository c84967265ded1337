"""Action masks: what an environment allows in its next step.

| the environment gives | convention |
|---|---|
| `info["action_mask"]` of `reset` and of `step` | Gymnasium's, as Taxi has it |
| a method `action_masks()`, its own or a wrapper's | that of Stable-Baselines3's contributions |

A mask is 1 where an action is allowed and 0 where it is not: an array of as many numbers as Discrete actions. Of
MultiDiscrete actions it is an array for each choice, in a tuple, or all of them one behind the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from pala.system.errors import PalaError

KEY = "action_mask"


class MaskReader:
    """Reads the masks of one environment."""

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        """`name`: the environment's name for people."""
        self._space, self._name = env.action_space, name
        method = env.get_wrapper_attr("action_masks") if env.has_wrapper_attr("action_masks") else None
        self._method: Callable[[], Any] | None = method if callable(method) else None

    def read(self, info: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the mask that `info` or the environment gives now, bool [A], by its key; empty: there is none. Raises
        PalaError for one that cannot be."""
        given = info.get(KEY)
        if given is None and self._method is not None:
            given = self._method()
        return {} if given is None else {KEY: self._checked(given)}

    def _checked(self, given: Any) -> np.ndarray:
        try:
            flat, starts = joined(given, self._space)
            if flat.ndim != 1:
                raise ValueError(f"one has the shape {flat.shape}, not {flat.shape[-1:]}")
        except ValueError as error:
            raise PalaError(f"The environment '{self._name}' gives action masks, but {error}.") from None
        if not np.logical_or.reduceat(flat, starts).all():
            raise PalaError(
                f"The environment '{self._name}' gives an action mask that allows no action; at least one of "
                f"{self._space} must be allowed until the episode has ended."
            )
        return flat


def missing(name: str, are_expected: bool) -> PalaError:
    """Make the error for the environment `name` that gives masks at times; `are_expected`: its first reset gave one."""
    what = "a mask is missing" if are_expected else "one came later"
    return PalaError(
        f"The environment '{name}' must give an action mask after every reset and step or never, but {what}: the first "
        "reset decides."
    )


def an_action(space: gymnasium.Space, mask: np.ndarray | None) -> Any:
    """Return an action that `mask`, bool [A], allows; None: all are allowed."""
    if mask is None:
        drawn = copy.deepcopy(space)
        drawn.seed(0)
        return drawn.sample()
    sizes = _sizes(space)
    first = np.array([part.argmax() for part in np.split(mask, np.cumsum(sizes)[:-1])])
    action: np.ndarray = first.reshape(space.shape) + space.start  # type: ignore[attr-defined]
    return action.astype(space.dtype)


def joined(masks: Any, space: gymnasium.Space) -> tuple[np.ndarray, np.ndarray]:
    """Return one mask, or a batch of them, as bool [..., A], and where each choice begins in it. Raises ValueError for
    what is no mask of this space."""
    sizes = _sizes(space)
    is_apart = isinstance(masks, tuple) and len(masks) == len(sizes) and np.ndim(masks[0]) > 0
    try:
        flat = np.concatenate(masks, -1) if is_apart else np.asarray(masks)
    except ValueError:  # of parts of unlike lengths
        raise ValueError(f"one is no array; of {space} give one mask a choice in a tuple, or all joined") from None
    if flat.shape[-1:] != (sizes.sum(),):
        raise ValueError(f"one has the shape {flat.shape}, where {space} needs {sizes.sum()} numbers")
    if not ((flat == 0) | (flat == 1)).all():
        raise ValueError("one has other numbers than 0 and 1")
    return flat.astype(bool), np.cumsum(sizes) - sizes


def _sizes(space: gymnasium.Space) -> np.ndarray:
    """Return how many actions each choice has. Raises ValueError for a space that cannot be masked."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return np.array([space.n])
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return np.asarray(space.nvec.reshape(-1))
    raise ValueError(f"its actions are {space}, and only Discrete and MultiDiscrete ones can be masked")
