"""A shard of the parameter server: a slice of the flat parameter vector, and the gradients that are applied to it."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from pala.a2c import ABOVE_ZERO, rmsprop_
from pala.config import GorilaConfig
from pala.errors import PalaError


def slices(num_parameters: int, num_shards: int) -> list[slice]:
    """Each shard's part of the flat vector: in order, without gap, of lengths that differ by at most one.

    Raises PalaError for more shards than parameters.
    """
    if num_shards > num_parameters:
        raise PalaError(
            f"'gorila.num_shards' is {num_shards}, but the network has only {num_parameters} parameters; lower it."
        )
    bounds = [num_parameters * shard // num_shards for shard in range(num_shards + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def adagrad_(
    parameters: Tensor, gradient: Tensor, sum_of_squares: Tensor, learning_rate: float, epsilon: float
) -> None:
    """One AdaGrad step in place (Duchi et al. 2011): s <- s + g^2, then x <- x - lr g / (sqrt(s) + epsilon)."""
    sum_of_squares.addcmul_(gradient, gradient)
    parameters.addcdiv_(gradient, (sum_of_squares + ABOVE_ZERO).sqrt_().add_(epsilon), value=-learning_rate)


class Shard:
    """Applies gradients to its slice of the parameters, in the order in which they come.

    | attribute | meaning |
    |---|---|
    | parameters | float32 [n], changed in place |
    | squares | float32 [n], the optimiser's state: the sum of squared gradients, or with RMSprop their mean |
    | version | gradients applied |
    | stale, not_finite | gradients discarded |

    All of them are what a checkpoint needs.
    """

    def __init__(self, parameters: Tensor, config: GorilaConfig) -> None:
        """`parameters`: this shard's slice of the flat vector, a view of it."""
        self.parameters, self._config = parameters, config
        self.squares = torch.zeros_like(parameters)
        self.version = self.stale = self.not_finite = 0

    def apply(self, gradient: Tensor, computed_at_version: int) -> bool:
        """Take one optimiser step, unless the gradient [n] is older than `max_staleness_updates` or not finite.

        `computed_at_version`: this shard's version when the parameters that it was computed with were fetched.
        """
        if self.version - computed_at_version > self._config.max_staleness_updates:
            self.stale += 1
            return False
        if not math.isfinite(gradient.norm()):  # or its squares would overflow
            self.not_finite += 1
            return False
        self._step(gradient)
        self.version += 1
        return True

    def _step(self, gradient: Tensor) -> None:
        config = self._config
        if config.optimiser == "adagrad":
            adagrad_(self.parameters, gradient, self.squares, config.adagrad_learning_rate, config.adagrad_epsilon)
        else:
            rmsprop_(
                self.parameters, gradient, self.squares, config.rmsprop_learning_rate,
                config.rmsprop_alpha, config.rmsprop_epsilon, epsilon_inside_root=True,
            )  # fmt: skip
