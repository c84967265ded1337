"""Deep Q-learning: the loss and its gradient, epsilon-greedy actions, and the filter of losses.

[DQN] Mnih et al. 2015, Nature 518; [Gorila] Nair et al. 2015, arXiv 1507.04296.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pala.config import GorilaConfig
from pala.networks.distributions import Distribution
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
    """Return y [N] = r + gamma Q_target(s', a'), or r where terminated. `next_values_NA`: Q_target(s', ·).

    a' is the best by the target network [DQN], or by the network itself (`double`: van Hasselt et al. 2016, eq. 4).
    """
    (judge_NA,) = tape.peek(batch.next_observations) if double else (next_values_NA,)
    next_values_N = next_values_NA.gather(-1, judge_NA.argmax(-1, keepdim=True)).squeeze(-1)
    return batch.rewards + gamma * next_values_N.masked_fill(batch.terminated, 0.0)


def dqn_loss(values_NA: Tensor, actions_N: Tensor, targets_N: Tensor) -> Loss:
    """Return the mean Huber loss of y - Q(s, a).

    Its gradient by Q is the error clipped to [-1, 1] ([DQN], Methods), over N.
    """
    values_N = values_NA.gather(-1, actions_N.unsqueeze(-1)).squeeze(-1)
    total = functional.huber_loss(values_N, targets_N, delta=1.0)
    return Loss(total, (targets_N - values_N).abs().mean(), values_N.mean())


def epsilon_greedy(values_BA: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Return actions [B] int64 from 0: the best, or with probability epsilon any of them, each as likely."""
    count, num_actions = values_BA.shape
    random_B = torch.randint(num_actions, (count,), generator=generator, device=values_BA.device)
    explores_B = torch.rand(count, generator=generator, device=values_BA.device) < epsilon
    return torch.where(explores_B, random_B, values_BA.argmax(-1))


def epsilon_at(global_steps: int, config: GorilaConfig) -> float:
    """Return epsilon: 1 until learning begins, then falling linearly with the steps of all ranks [DQN]."""
    progress = (global_steps - config.min_replay_steps) / config.epsilon_decay_steps
    return 1 + (config.epsilon_last - 1) * min(max(progress, 0.0), 1.0)


_FILTER_HORIZON = 1000  # losses that the filter remembers
_LEAST_DEVIATION = 1e-6  # after losses that do not vary at all, nothing else would ever be accepted


@dataclass
class LossFilter:
    """A running mean of the losses; those far above it are outliers, whose gradients a learner discards [Gorila].

    The weight of the n-th loss x is w = 1 / min(n, horizon): at first the plain mean and standard deviation of what
    was seen, then exponential ones:

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
        """Tell whether this loss's gradient may be used, and take the loss into account: ask once for each."""
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


class DQN:
    """The two networks of a rank, and the gradient of one by what the other says of a minibatch.

    The optimiser is the shards' (`Shard`); `squares` and `version` are what they begin with.
    """

    def __init__(
        self,
        distribution: Distribution,
        tape: Tape,
        flat: FlatParameters,
        target_tape: Tape,
        target: FlatParameters,
        config: GorilaConfig,
    ) -> None:
        self.distribution, self._config = distribution, config
        self.tape, self.flat = tape, flat
        self.target_tape, self.target = target_tape, target
        self.squares = torch.zeros_like(flat.data)  # of the gradients: the optimiser's state
        self.version = 0  # gradients that are in the parameters
        self.filter = LossFilter(config.loss_filter_deviations, _FILTER_HORIZON)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that checkpoints keep, by their names there; each shard's checkpoint keeps a part of them."""
        return {"parameters": self.flat.data, "squares": self.squares, "target": self.target.data}

    def act(self, observations: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Return an epsilon-greedy action [B] for each observation."""
        (values_BA,) = self.tape.peek(observations)
        return epsilon_greedy(values_BA, epsilon, generator)

    def next_values(self, batches: Sequence[Transitions]) -> list[Tensor]:
        """Return Q_target(s', ·), [N, A], of each minibatch, computed in one pass if that is faster.

        They stay right until the target network changes.
        """
        following = [batch.next_observations for batch in batches]
        if self.target_tape.joins and len(following) > 1:
            (values,) = self.target_tape.peek(torch.cat(following))
            return list(values.split([len(observations) for observations in following]))
        return [self.target_tape.peek(observations)[0] for observations in following]

    @torch.enable_grad()  # see `AutogradTape.forward`
    def differentiate(
        self, batch: Transitions, next_values_NA: Tensor, between: Callable[[], None] = lambda: None
    ) -> Loss:
        """Return the minibatch's loss, and write its gradient to `flat.gradient`.

        Autograd goes down to the values, then the tape. `between`: called between the passes.
        """
        targets_N = targets(self.tape, next_values_NA, batch, self._config.gamma, self._config.double_dqn)
        (values_NA,) = self.tape.forward(batch.observations)
        between()
        values_TNA = values_NA.unsqueeze(0).requires_grad_()  # T is 1
        loss = dqn_loss(values_TNA[0], batch.actions, targets_N)
        if self.tape.adds:
            self.flat.gradient.zero_()
        self.tape.backward(torch.autograd.grad(loss.total, values_TNA))
        return Loss(*(term.detach() for term in loss))
