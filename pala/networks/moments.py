"""Running mean and variance, by which observations and rewards are normalised.

The rule is that of Gymnasium's NormalizeObservation and NormalizeReward (the parallel variance of Chan, Golub and
LeVeque 1979), with two differences: the moments change with an update of the parameters, not within a rollout, so that
a rollout has one policy; and what is normalised is clipped to ±10, as Stable-Baselines3 and CleanRL do.

The moments lie behind the parameters in one flat vector (`FlatParameters`), so they travel with the model and are
averaged with it. What a rollout saw of them lies in the same place behind the gradient: an all-reduce averages it, and
all ranks continue with the same moments. The optimiser leaves them alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_EPSILON = 1e-8  # as Gymnasium
_MOST = 10.0
_FIRST_COUNT = 1e-4  # as Gymnasium: mean 0 and variance 1, until something is seen


class Moments(nn.Module):
    """Running mean and variance of vectors of `size` numbers.

    | buffer | shape | |
    |---|---|---|
    | mean, variance | [N] | of all that was seen |
    | count | [1] | how many samples that were, a rank |
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.full((1,), _FIRST_COUNT))
        self.seen: dict[str, Tensor] = {}  # views of the flat gradient, by the buffers' names

    def standardised(self, values: Tensor) -> Tensor:
        """Return float32 (values - mean) / deviation, clipped, for values [..., N]."""
        return ((values - self.mean) / self._deviation).to(torch.float32).clamp_(-_MOST, _MOST)

    def scaled(self, values: Tensor) -> Tensor:
        """Return values [...] / deviation, clipped."""
        return (values / self._deviation).clamp_(-_MOST, _MOST)

    @torch.no_grad()
    def see(self, values: Tensor) -> None:
        """Note samples [M, N] in `seen`: mean and mean square of z = (sample - mean) / deviation, so that figures of
        ranks can be averaged. (Of the first samples the variance of z in its place: their mean may lie far off.)"""
        z = (values - self.mean) / self._deviation
        self.seen["mean"].copy_(z.mean(0))
        self.seen["variance"].copy_(z.var(0, correction=0) if self.is_new else z.square().mean(0))

    @torch.no_grad()
    def learn(self, samples: int) -> None:
        """Take in what is noted of `samples` samples, and forget the note."""
        deviation = self._deviation
        shift, spread = self.seen["mean"] * deviation, self.seen["variance"] * deviation.square()
        if self.is_new:
            self.mean += shift
            self.variance.copy_(spread)
            self.count.fill_(samples)
        else:
            weight = samples / (self.count + samples)
            shift *= weight
            self.mean += shift
            self.variance.lerp_(spread, weight).sub_(shift.square()).clamp_(min=0)
            self.count += samples
        for seen in self.seen.values():
            seen.zero_()

    @property
    def _deviation(self) -> Tensor:
        # Models that were averaged by differences, as by earlier commits, may carry a variance below zero.
        return (self.variance.clamp(min=0) + _EPSILON).sqrt()

    @property
    def is_new(self) -> bool:
        """Whether nothing has been seen yet."""
        return float(self.count) < 1
