"""A shard of the parameter server: a slice of the flat parameter vector, and the gradients that are applied to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pala.config import GorilaConfig
from pala.networks.optimisers import adagrad_, rmsprop_
from pala.run.checkpoint import OF_ANOTHER_ALGORITHM, RankState
from pala.system.errors import PalaError

_ADAGRAD_EPSILON = 1e-5  # ours
_CONTENTS = (
    {"parameters", "squares", "target"},  # a shard's slices; the optimiser's squares; the target network
    set[str](),  # of a rank that serves no shard
)


def slices(num_parameters: int, num_shards: int) -> list[slice]:
    """Return each shard's part of the flat vector: in order, without gap, of lengths that differ by at most one.

    Raises PalaError for more shards than parameters.
    """
    if num_shards > num_parameters:
        raise PalaError(
            f"'gorila.num_shards' is {num_shards}, but the network has only {num_parameters} parameters; lower it."
        )
    bounds = [num_parameters * shard // num_shards for shard in range(num_shards + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def targets_at(version: int, config: GorilaConfig) -> int:
    """Return how often the target network has been copied after `version` gradients."""
    return version // config.target_period_updates


class ServedModel(NamedTuple):
    """The model that all shards serve together: flat vectors of the whole network."""

    parameters: Tensor
    squares: Tensor
    target: Tensor
    version: int = 0  # gradients that are in it


class Shard:
    """A slice of the parameters, to which gradients are applied in the order in which they come.

    | attribute | meaning |
    |---|---|
    | parameters | float32 [n], changed in place |
    | squares | float32 [n], the optimiser's state: the sum of squared gradients, or with RMSprop their mean |
    | target | float32 [n], of the target network: copied from the parameters every `target_period_updates` |
    | version | gradients applied |
    | stale, not_finite | gradients discarded since the last record of the metrics |

    The first four are what a checkpoint needs.
    """

    def __init__(self, begin: ServedModel, part: slice, config: GorilaConfig) -> None:
        """Copy `part` of what the run begins with to the host."""
        self.parameters, self.squares, self.target = (
            vector[part].detach().to("cpu", copy=True) for vector in (begin.parameters, begin.squares, begin.target)
        )
        self.version, self._config = begin.version, config
        self.stale = self.not_finite = 0

    @property
    def num_targets(self) -> int:
        """Copies of the target so far."""
        return targets_at(self.version, self._config)

    def apply(self, gradient: Tensor, computed_at_version: int, is_finite: bool = False) -> bool:
        """Take one optimiser step, unless the gradient [n] is older than `max_staleness_updates` or not finite.

        `computed_at_version`: this shard's version when the parameters that it was computed with were fetched.
        `is_finite`: its norm is known to be.
        """
        if self.version - computed_at_version > self._config.max_staleness_updates:
            self.stale += 1
            return False
        if not is_finite and not math.isfinite(gradient.norm()):  # or its squares would overflow
            self.not_finite += 1
            return False
        self._step(gradient)
        self.version += 1
        if self.version % self._config.target_period_updates == 0:
            self.target.copy_(self.parameters)
        return True

    def take_figures(self) -> dict[str, int]:
        """Return the figures for the metrics, and begin to count again."""
        figures = {
            "server_updates": self.version,
            "gradients_stale": self.stale,
            "gradients_not_finite": self.not_finite,
        }
        self.stale = self.not_finite = 0
        return figures

    def _step(self, gradient: Tensor) -> None:
        config = self._config
        if config.optimiser == "adagrad":
            adagrad_(self.parameters, gradient, self.squares, config.adagrad_learning_rate, _ADAGRAD_EPSILON)
        else:
            rmsprop_(
                self.parameters,
                gradient,
                self.squares,
                config.rmsprop_learning_rate,
                config.rmsprop_alpha,
                config.rmsprop_epsilon,
                epsilon_inside_root=True,
            )


def assemble(states: Sequence[RankState]) -> ServedModel:
    """Return the model whose slices the checkpoints of a run's ranks hold. Raises PalaError if a shard is missing."""
    if not all("gorila" in state.counters and set(state.tensors) in _CONTENTS for state in states):
        raise PalaError(OF_ANOTHER_ALGORITHM)
    saved = {state.counters["gorila"]["shard"]: state for state in states if state.tensors}
    num_shards = max((state.counters["gorila"]["num_shards"] for state in states), default=0)
    missing = sorted(set(range(num_shards)) - set(saved))
    if missing or not saved:
        raise PalaError(
            f"The checkpoints hold no parameters of shard {missing[0] if missing else 0} of {num_shards}: the run "
            "cannot be continued from there."
        )
    in_order = [saved[shard] for shard in range(num_shards)]
    counters = [state.counters["gorila"] for state in in_order]
    num_targets = max(counts["num_targets"] for counts in counters)
    # A shard that saved just before the others copied their targets copies its own now.
    targets = ["target" if counts["num_targets"] == num_targets else "parameters" for counts in counters]
    return ServedModel(
        torch.cat([state.tensors["parameters"] for state in in_order]),
        torch.cat([state.tensors["squares"] for state in in_order]),
        torch.cat([state.tensors[name] for state, name in zip(in_order, targets, strict=True)]),
        max(counts["version"] for counts in counters),
    )
