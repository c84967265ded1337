"""Sketches of how a rank's model moves, which show how much of its progress the exchange keeps.

A rank's model moves by its own steps and by what the exchange does to it. If mixing takes nothing back, the mean of all
models moves by the mean of the ranks' own steps; *progress kept* is the share of that which it does move. A rank cannot
see the mean, so it records sketches of both movements, cheap enough for every update; `metrics.progress_kept` adds up
those of all ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SAMPLE = 4096  # parameters that are looked at
_SKETCH = 32  # sums of them, with signs: inner products of sketches are nearly those of the samples


class Movement:
    """A measure of how far one rank's flat parameters move. All ranks look at the same parameters."""

    def __init__(self, parameters: Tensor) -> None:
        """`parameters`: changed in place, by the rank's steps and by the exchange."""
        self._parameters = parameters
        size, device = parameters.numel(), parameters.device
        draw = np.random.default_rng(size)
        count = min(size, _SAMPLE)
        self._indices = torch.from_numpy(np.sort(draw.choice(size, count, replace=False))).to(device)
        signs = np.zeros((count, _SKETCH), np.float32)
        signs[np.arange(count), draw.integers(_SKETCH, size=count)] = draw.choice((-1.0, 1.0), count)
        self._signs = torch.from_numpy(signs).to(device)
        self._begin = self._last = parameters[self._indices]
        self._own = torch.zeros_like(self._last)

    def note_own_step(self) -> None:
        """Count a step of the rank's own."""
        self._own += self._parameters[self._indices] - self._last

    def note_exchange(self) -> None:
        """Count what an exchange did, whether it has changed the model or not."""
        self._last = self._parameters[self._indices]

    def restart(self) -> None:
        """Forget the interval: the model is another one."""
        self._begin = self._last = self._parameters[self._indices]
        self._own = torch.zeros_like(self._own)

    def take(self) -> tuple[list[float], list[float]]:
        """Return sketches of the own steps and of the whole movement since the last call: 32 sums each."""
        own, moved = self._own @ self._signs, (self._last - self._begin) @ self._signs
        self._begin = self._last
        self._own = torch.zeros_like(self._own)
        return [float(f"{x:.6g}") for x in own.tolist()], [float(f"{x:.6g}") for x in moved.tolist()]
