"""Environments that break the interface or fail. A module without torch: processes of environments import it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np


class Plain(gymnasium.Env):
    """Shows how many steps the episode and the environment have had, and terminates after 4; each step pays 1."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self) -> Any:
        return np.array([self.steps, self.total], np.float32)

    def step(self, action):
        self.steps += 1
        self.total += 1
        return self.look(), 1.0, self.steps == 4, False, {}


def like_step(change: Callable[[list], Any]) -> type[Plain]:
    """A Plain whose step returns what `change` makes of the list of its five values."""

    class Changed(Plain):
        def step(self, action):
            return change(list(super().step(action)))

    return Changed


def with_value(index: int, value: Any) -> type[Plain]:
    return like_step(lambda values: (*values[:index], value, *values[index + 1 :]))


class OfBytes(Plain):
    observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)

    def look(self):
        return np.array([1, 2])


class OfADict(Plain):
    observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3), "b": Plain.observation_space})

    def look(self):
        return {"a": 3, "b": super().look()}


class OtherKeys(OfADict):
    def look(self):
        return {"a": 1}


class ResetsAlone(Plain):
    def reset(self):
        return super().reset()


class ResetsBySeed(Plain):
    def reset(self, seed=None):
        return super().reset(seed=seed)


class WithoutInfo(Plain):
    def reset(self, *, seed=None, options=None):
        return super().reset()[0], None


class Lengthy(Plain):
    def look(self):
        return np.zeros(3, np.float32)


def kill(env: Plain) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(env: Plain) -> None:
    time.sleep(1000)


class Counted(Plain):
    """Fails where its action is 1."""

    how: Any = None

    def step(self, action):
        values = super().step(action)
        if action == 1:
            self.how()
        return values


class Killed(Counted):
    how = kill


class Hanging(Counted):
    how = hang


class Raising(Counted):
    def how(self):
        raise ConnectionError("the simulator is gone")


class RaisesFirst(Plain):
    def reset(self, *, seed=None, options=None):
        raise ValueError("level file not found.")


class DiesFirst(Plain):
    def reset(self, *, seed=None, options=None):
        os._exit(3)


class NotFiniteFirst(Plain):
    def look(self):
        return np.full(2, np.nan, np.float32)


class StepsWrongly(Plain):
    def step(self, action):
        raise ValueError("level file not found.")


class DiesInAStep(Plain):
    def step(self, action):
        os._exit(3)


class IsCancelled(Plain):
    def step(self, action):
        raise asyncio.CancelledError


class OfFour(Plain):
    """Of Gym before 0.26, with a wrapper of Gymnasium's around it."""

    def step(self, action):
        return super().step(action)[1:]


def exits_at_once() -> None:
    raise SystemExit("no licence")
