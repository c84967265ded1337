"""Action distributions, from a network's outputs: one choice, several choices, or a box of real numbers.

An action that an environment does not allow now has a logit of -inf (`masked`): its probability is 0, it adds nothing
to the entropy, and the loss has no gradient by its logit (Huang and Ontanon, "A Closer Look at Invalid Action Masking
in Policy Gradient Algorithms", 2022, arXiv 2006.14171).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from pala.system.errors import PalaError


def masked(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Return the logits [..., A], with -inf where `masks`, bool [..., A], is False. None: every action is allowed."""
    return logits if masks is None else logits.masked_fill(~masks, -math.inf)


class Categorical:
    """Distribution over discrete actions, from logits [..., A]; actions are int64 [...]."""

    def __init__(self, num_actions: int, first_action: int = 0, dtype: torch.dtype = torch.int64) -> None:
        """`first_action`, `dtype`: lowest number and type of the environment's actions."""
        self.num_outputs = num_actions
        self.first_action = first_action
        self._dtype = dtype

    def sample(
        self, logits: Tensor, generator: torch.Generator, greedy: bool = False, masks: Tensor | None = None
    ) -> Tensor:
        """Draw actions [B] for logits [B, A], by exponential races: P(argmax p / e) = p. Unlike `multinomial`, logits
        that are not finite give some action instead of an error (on a GPU, a dead context): the update deals with
        them. It is an allowed one if `masks`, by which the logits are `masked`, are given."""
        if greedy:
            scores = logits
        else:
            races = torch.empty_like(logits).exponential_(generator=generator)
            scores = logits.softmax(-1) / races
        if masks is not None:
            scores = masked(scores.clamp(min=torch.finfo(scores.dtype).min), masks)
        return scores.argmax(-1)

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `actions` and the entropy, both [...]."""
        log_p = logits.log_softmax(-1)
        finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # 0 x -inf, of an action that a network rules out, is 0
        return log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * finite).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return the actions as the environment wants them."""
        return (actions + self.first_action if self.first_action else actions).to(self._dtype)


LOG_STD_LOW, LOG_STD_HIGH = -20.0, 2.0
"""Bounds of a Gaussian's log-deviations: those of SAC (Haarnoja et al. 2018, released code: `LOG_SIG_MIN`,
`LOG_SIG_MAX`) and of Stable-Baselines3 (`sac/policies.py`). Where the action does not matter, the entropy bonus would
let them grow without end: to deviations of 4,200 in one of our trainings."""


class _Bounded(torch.autograd.Function):
    """Clamps to the bounds. A gradient that leads back inside passes: `clamp`'s is zero outside, so that a parameter
    which an update has put there would stay."""

    @staticmethod
    def forward(ctx: Any, log_std: Tensor) -> Tensor:
        """Return the parameter within its bounds."""
        ctx.save_for_backward(log_std)
        return log_std.clamp(LOG_STD_LOW, LOG_STD_HIGH)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient, zero where descent would lead further outside."""
        (log_std,) = ctx.saved_tensors
        outwards = ((log_std >= LOG_STD_HIGH) & (gradient < 0)) | ((log_std <= LOG_STD_LOW) & (gradient > 0))
        return gradient.masked_fill(outwards, 0.0)


class Gaussian(nn.Module):
    """Independent normal distributions over a box of actions, from means [..., A]; one learned log-deviation each,
    within bounds."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        self.num_outputs = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.zeros(self.num_outputs))
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", torch.as_tensor(space.low), persistent=False)
        self.register_buffer("high", torch.as_tensor(space.high), persistent=False)

    def sample(
        self, mean: Tensor, generator: torch.Generator, greedy: bool = False, masks: Tensor | None = None
    ) -> Tensor:
        """Draw actions [B, A], not yet clipped to the box. A box has no masks."""
        if greedy:
            return mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return (
            mean + noise * self.log_std.detach().clamp(LOG_STD_LOW, LOG_STD_HIGH).exp()
        )  # an action is data: no gradient flows through it

    def log_prob_and_entropy(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density of the unclipped `actions` and the entropy, both [...]."""
        log_std: Tensor = _Bounded.apply(self.log_std)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return actions clipped to the box, in its shape and dtype (whole numbers: rounded); finite whatever the
        network says."""
        inside = actions.nan_to_num(0.0).reshape(-1, *self.low.shape).clamp(self.low, self.high)
        return (inside if self.low.dtype.is_floating_point else inside.round()).to(self.low.dtype)


class MultiCategorical:
    """Independent choices, each with a categorical distribution of its own: logits [..., sum of sizes], the choices'
    one behind the other; actions are int64 [..., K]. For MultiDiscrete and MultiBinary actions of any shape."""

    def __init__(self, space: gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary) -> None:
        if isinstance(space, gymnasium.spaces.MultiBinary):
            sizes, starts = np.full(space.shape, 2), np.zeros(space.shape, np.int64)
        else:
            sizes, starts = np.asarray(space.nvec), np.asarray(space.start)
        self._dtype = _dtype_of(space)
        self.shape: tuple[int, ...] = tuple(space.shape)
        self.num_outputs = int(sizes.sum())
        self._sizes: list[int] = sizes.reshape(-1).tolist()
        self._choices = [Categorical(size) for size in self._sizes]
        self._starts = torch.from_numpy(starts.reshape(-1).astype(np.int64))

    def sample(
        self, logits: Tensor, generator: torch.Generator, greedy: bool = False, masks: Tensor | None = None
    ) -> Tensor:
        """Draw actions [B, K] for logits [B, sum of sizes], and masks of that shape."""
        of_choices = self._split(masks) if masks is not None else [None] * len(self._choices)
        parts = zip(self._choices, self._split(logits), of_choices, strict=True)
        return torch.stack([choice.sample(part, generator, greedy, allowed) for choice, part, allowed in parts], -1)

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `actions` and the entropy, both [...]: sums over the choices."""
        parts = zip(self._choices, self._split(logits), actions.unbind(-1), strict=True)
        log_probs, entropies = zip(*(choice.log_prob_and_entropy(part, of) for choice, part, of in parts), strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return the actions in the space's shape, counted from where it begins."""
        return (actions + self._starts.to(actions.device)).to(self._dtype).reshape(-1, *self.shape)

    def _split(self, logits: Tensor) -> Sequence[Tensor]:
        return logits.split(self._sizes, -1)


Distribution = Categorical | MultiCategorical | Gaussian


def distribution_of(space: gymnasium.Space) -> Distribution:
    """Return the distribution over a space's actions. Raises PalaError for a space that has none."""
    if space.shape is not None and 0 in space.shape:
        raise PalaError(f"Actions of {space} are empty; there is nothing to choose.")
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical(int(space.n), int(space.start), _dtype_of(space))
    if isinstance(space, (gymnasium.spaces.MultiDiscrete, gymnasium.spaces.MultiBinary)):
        return MultiCategorical(space)
    if isinstance(space, gymnasium.spaces.Box):
        return Gaussian(space)
    raise PalaError(
        f"Actions must be Discrete, MultiDiscrete, MultiBinary or a Box, not {space}; wrap the environment."
    )


def _dtype_of(space: gymnasium.Space) -> torch.dtype:
    return torch.from_numpy(np.empty(0, space.dtype)).dtype
