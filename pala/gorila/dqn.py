"""Deep Q-learning: the loss and its gradient, epsilon-greedy actions, and the learner's filter of losses.

[DQN] Mnih et al. 2015, Nature 518; [Gorila] Nair et al. 2015, arXiv 1507.04296.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pala.config import GorilaConfig
from pala.networks.network import FlatParameters
from pala.networks.tape import Tape


class Transitions(NamedTuple):
    """A minibatch of N transitions as tensors on the network's device.

    Where a time limit cut the episode, `terminated` is False: what would have followed counts.
    """

    observations: Tensor  # [N, *obs]
    actions: Tensor  # [N] int64, from 0
    rewards: Tensor  # [N] float32
    next_observations: Tensor  # [N, *obs]; of terminated ones anything
    terminated: Tensor  # [N] bool: the return ends here


class Loss(NamedTuple):
    """Means over the minibatch; `total` is what is minimised."""

    total: Tensor
    absolute_error: Tensor  # |y - Q(s, a)|, unclipped: what `LossFilter` judges by
    value: Tensor  # Q(s, a)


@torch.no_grad()
def targets(tape: Tape, next_values_NA: Tensor, batch: Transitions, gamma: float, double: bool) -> Tensor:
    """y [N] = r + gamma Q_target(s', a'), or r where terminated. `next_values_NA`: Q_target(s', ·).

    a' is the best by the target network [DQN], or by the network itself (`double`: van Hasselt et al. 2016, eq. 4).
    """
    (judge_NA,) = tape.peek(batch.next_observations) if double else (next_values_NA,)
    next_values_N = next_values_NA.gather(-1, judge_NA.argmax(-1, keepdim=True)).squeeze(-1)
    return batch.rewards + gamma * next_values_N.masked_fill(batch.terminated, 0.0)


def dqn_loss(values_NA: Tensor, actions_N: Tensor, targets_N: Tensor) -> Loss:
    """Mean Huber loss of y - Q(s, a): its gradient by Q is the error clipped to [-1, 1] ([DQN], Methods), over N."""
    values_N = values_NA.gather(-1, actions_N.unsqueeze(-1)).squeeze(-1)
    total = functional.huber_loss(values_N, targets_N, delta=1.0)
    return Loss(total, (targets_N - values_N).abs().mean(), values_N.mean())


def differentiate(
    tape: Tape, next_values_NA: Tensor, flat: FlatParameters, batch: Transitions, config: GorilaConfig,
    between: Callable[[], None] = lambda: None,
) -> Loss:  # fmt: skip
    """The minibatch's loss; its gradient by the parameters of the tape's network, those in `flat`, goes to
    `flat.gradient`: autograd down to the values, then the tape. `between` is called between the passes."""
    targets_N = targets(tape, next_values_NA, batch, config.gamma, config.double_dqn)
    (values_NA,) = tape.forward(batch.observations)
    between()
    values_TNA = values_NA.unsqueeze(0).requires_grad_()  # T is 1
    loss = dqn_loss(values_TNA[0], batch.actions, targets_N)
    if tape.adds:
        flat.gradient.zero_()
    tape.backward(torch.autograd.grad(loss.total, values_TNA))
    return Loss(*(term.detach() for term in loss))


def epsilon_greedy(values_BA: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Actions [B] int64 from 0: the best, or with probability epsilon any of them, each as likely."""
    count, num_actions = values_BA.shape
    random_B = torch.randint(num_actions, (count,), generator=generator, device=values_BA.device)
    explores_B = torch.rand(count, generator=generator, device=values_BA.device) < epsilon
    return torch.where(explores_B, random_B, values_BA.argmax(-1))


def epsilon_at(global_steps: int, config: GorilaConfig) -> float:
    """Epsilon after so many steps of all ranks: the first one until learning begins, then falling linearly."""
    progress = (global_steps - config.min_replay_steps) / config.epsilon_decay_steps
    return config.epsilon_first + (config.epsilon_last - config.epsilon_first) * min(max(progress, 0.0), 1.0)


_LEAST_DEVIATION = 1e-6  # after losses that do not vary at all, nothing else would ever be accepted


@dataclass
class LossFilter:
    """Tells the losses that are far above a running mean, whose gradients a learner discards [Gorila].

    Of the n-th loss x the weight is w = 1 / min(n, horizon): at first the plain mean and standard deviation of what was
    seen, then exponential ones:

        mean <- mean + w (x - mean)        variance <- (1 - w) (variance + w (x - mean)²)

    A discarded loss enters as the limit that it passed, mean + deviations x standard deviation: one outlier hardly
    moves the limit, and losses that stay high are accepted after a while, if more than one in deviations². A loss that
    is not finite does not enter. All but the rule is ours. The fields are the state, for checkpoints.
    """

    deviations: float  # 0 discards nothing that is finite
    horizon: int  # losses; of the first so many, none that is finite is discarded
    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0
    discarded: int = 0

    def accepts(self, loss: float) -> bool:
        """Whether this loss's gradient may be used; takes the loss into account, so ask once for each."""
        limit = self._limit()
        accepted = math.isfinite(loss) and loss <= limit
        if math.isfinite(loss):
            self._add(min(loss, limit))
        self.discarded += not accepted
        return accepted

    def _limit(self) -> float:
        if self.deviations == 0 or self.seen < self.horizon:
            return math.inf
        return self.mean + self.deviations * max(math.sqrt(self.variance), _LEAST_DEVIATION)

    def _add(self, loss: float) -> None:
        self.seen += 1
        weight = 1 / min(self.seen, self.horizon)
        difference = loss - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)
