"""Quasi-global momentum: a longer step of the ranks' mean without a longer step of the models that act.

A rank's own step is noisy: it comes from its own few environments. What its model goes through from update to update,
its own step and the exchange together, is less so: the exchange brings in what others learned. So the rank moves by a
running mean of that beside its own step (Lin, Karimireddy, Stich, Jaggi 2021, "Quasi-Global Momentum: Accelerating
Decentralized Deep Learning on Heterogeneous Data", arXiv 2102.04761, Algorithm 1; there with SGD, here with RMSprop).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Momentum:
    """Momentum of one rank's flat parameters. Costs two vectors of memory and no message."""

    def __init__(self, parameters: Tensor, momentum: float, smoothing: float, movement: Tensor | None = None) -> None:
        """`momentum`: the mean of the ranks' models goes 1 / (1 - momentum) times as far as by the own steps alone;
        `smoothing`: decay of the running mean an update; `movement`: where that mean is kept."""
        self._parameters, self._momentum, self._smoothing = parameters, momentum, smoothing
        self.movement = torch.zeros_like(parameters) if movement is None else movement  # the running mean, an update
        self._before: Tensor | None = None  # the parameters at the last call

    def push_(self) -> None:
        """Move the parameters by the momentum. Once an update, before or after the own step, not between the
        exchange's moves."""
        if self._before is None:
            self._before = self._parameters.clone()
        else:
            self.movement.mul_(self._smoothing).add_(self._parameters - self._before, alpha=1 - self._smoothing)
            self._before.copy_(self._parameters)
        self._parameters.add_(self.movement, alpha=self._momentum)

    def restart(self) -> None:
        """The model is another one: how it came here is forgotten."""
        self.movement.zero_()
        self._before = None
