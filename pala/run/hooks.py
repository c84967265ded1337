"""The user's own code from Python: an environment, a network, and functions that training calls. Loads no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pala.envs.vector import MakeEnv
    from pala.networks.own import MakeNetwork


class UserCode(NamedTuple):
    """Factories, the same on every rank; a run keeps each in files of that name (`user_code.py`)."""

    make_env: MakeEnv | None = None
    """In place of the environment that the configuration names."""
    make_network: MakeNetwork | None = None
    """`(observation_space, num_outputs)` -> a module with `trunk` and `heads` (`pala/networks/own.py`)."""


NO_CODE = UserCode()


@dataclass(frozen=True)
class Moment:
    """A moment of training, as a callback is told of it on its rank."""

    rank: int
    updates: int  # of this rank
    local_steps: int  # environment steps of this rank
    global_steps: int  # of all ranks, as far as known here
    time_s: float  # of training, all segments; as of the last record
    records: Sequence[dict[str, Any]] = ()
    """`on_interval`: what this rank has just written to its metrics file (docs/metrics.md), its episodes and, last, the
    figures of the interval."""

    @property
    def mean_return(self) -> float | None:
        """The mean over this rank's episodes in `records`, whole and unclipped; None without one. Returns that are not
        finite are left out."""
        returns = [record["return"] for record in self.records if record["type"] == "episode"]
        returns = [each for each in returns if math.isfinite(each)]
        return statistics.fmean(returns) if returns else None


Callback = Callable[[Moment], object]
"""Returns False to end training on all ranks; anything else, None as well, continues."""


class Callbacks(NamedTuple):
    """Functions that training calls; a rank may have others than the next."""

    on_update: Callback | None = None
    """Called after each update of this rank."""
    on_interval: Callback | None = None
    """Called on each rank whenever it writes to its metrics file: every `run.log_interval_s`, and at the end."""

    @property
    def may_stop(self) -> bool:
        """Whether a callback may end training."""
        return self.on_update is not None or self.on_interval is not None


NO_CALLBACKS = Callbacks()


def asks_to_stop(answer: object) -> bool:
    """Return whether a callback returned False, or what NumPy and torch have for it."""
    if type(answer).__module__ in ("numpy", "torch") and getattr(answer, "shape", None) == ():
        answer = answer.item()  # type: ignore[attr-defined]
    return answer is False
