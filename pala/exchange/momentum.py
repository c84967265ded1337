"""Quasi-global momentum: a longer step of the ranks' mean without a longer step of the models that act.

A rank's own step is noisy: it comes from its own few environments. What its model goes through from update to update,
its own step and the exchange together, is less so: the exchange brings in what others learned. So the rank moves by a
running mean of that beside its own step (Lin, Karimireddy, Stich, Jaggi 2021, "Quasi-Global Momentum: Accelerating
Decentralized Deep Learning on Heterogeneous Data", arXiv 2102.04761, Algorithm 1; there with SGD, here with RMSprop).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pala.system.blocks import in_blocks

_DECAY = 0.8  # of the running mean, an update; ours


class Momentum:
    """Momentum of one rank's flat parameters. Costs two vectors of memory and no message."""

    def __init__(self, parameters: Tensor, momentum: float, mean_move: Tensor) -> None:
        """`momentum`: the mean of the ranks' models goes 1 / (1 - momentum) times as far as by the own steps alone;
        `mean_move`: memory of the running mean, which a checkpoint keeps."""
        self._momentum = momentum
        self._mean_move = mean_move
        before = torch.empty_like(parameters)  # the parameters at the last call
        self._has_before = False
        self._blocks = [*in_blocks(parameters, mean_move, before)]

    def push_(self) -> None:
        """Move the parameters by the momentum. Once an update, before or after the own step, not between the
        exchange's moves."""
        for parameters, mean_move, before in self._blocks:
            if self._has_before:
                torch.sub(parameters, before, out=before)
                mean_move.mul_(_DECAY).add_(before, alpha=1 - _DECAY)
            before.copy_(parameters)
            parameters.add_(mean_move, alpha=self._momentum)
        self._has_before = True

    def restart(self) -> None:
        """Forget how the model came here: it is another one."""
        self._mean_move.zero_()
        self._has_before = False
