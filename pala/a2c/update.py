"""Advantage actor-critic: returns, the loss and one update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pala.config import A2CConfig
from pala.networks.distributions import Distribution
from pala.networks.network import FlatParameters
from pala.networks.optimisers import clip_gradient_, rmsprop_
from pala.networks.tape import Tape

if TYPE_CHECKING:
    from pala.a2c.normalization import Normalization
    from pala.exchange.momentum import Momentum


@dataclass
class Rollout:
    """T steps of B environments."""

    policy_outputs: list[Tensor] = field(default_factory=list)  # T x [B, A]; -inf: an action that is not allowed
    values: list[Tensor] = field(default_factory=list)  # T x [B]
    actions: list[Tensor] = field(default_factory=list)  # T x [B, ...]
    rewards: list[Tensor] = field(default_factory=list)  # T x [B]; a time limit's bootstrap is already added
    ended: list[Tensor] = field(default_factory=list)  # T x [B] float


class Loss(NamedTuple):
    """Means over the rollout; `total` is what is minimised."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor


def a2c_loss(
    distribution: Distribution,
    policy_TBA: Tensor,
    values_TB: Tensor,
    rollout: Rollout,
    bootstrap_B: Tensor,
    config: A2CConfig,
) -> Loss:
    """Return policy + value_coefficient * value - entropy_coefficient * entropy (A3C, section 4; GALA, released
    settings).

    policy = -mean(log pi(a) * advantage), value = mean((return - V)^2). The rollout's network outputs are given apart
    (stacked: policy outputs [T, B, A], values [T, B]), to be differentiated by. `bootstrap_B`: V after the last step.
    """
    with torch.no_grad():
        advantages_TB, returns_TB = advantages_and_returns(
            torch.stack(rollout.rewards),
            torch.stack(rollout.ended),
            values_TB,
            bootstrap_B,
            config.gamma,
            config.gae_lambda,
        )
    log_prob_TB, entropy_TB = distribution.log_prob_and_entropy(policy_TBA, torch.stack(rollout.actions))
    policy = -(log_prob_TB * advantages_TB).mean()
    value = (returns_TB - values_TB).square().mean()
    entropy = entropy_TB.mean()
    total = policy + config.value_coefficient * value - config.entropy_coefficient * entropy
    return Loss(total, policy, value, entropy)


def advantages_and_returns(
    rewards_TB: Tensor, ended_TB: Tensor, values_TB: Tensor, bootstrap_B: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE (arXiv 1506.02438, eq. 16); lambda = 1 gives n-step returns (A3C, alg. S3).

    | symbol | shape | meaning |
    |---|---|---|
    | rewards | [T, B] | reward of each step; at a time limit gamma * V(last observation) is already added |
    | ended | [T, B] | 1.0 where the return ends with this step, else 0.0 |
    | values | [T, B] | V of the observation the step began with, without gradient |
    | bootstrap | [B] | V of the observation after the last step |

    Returns (advantages [T, B], returns [T, B]), where returns = advantages + values.
    """
    advantages = torch.empty_like(rewards_TB)
    next_value, next_advantage = bootstrap_B, torch.zeros_like(bootstrap_B)
    for t in reversed(range(rewards_TB.shape[0])):
        going_on = 1.0 - ended_TB[t]
        delta = rewards_TB[t] + gamma * next_value * going_on - values_TB[t]
        next_advantage = delta + gamma * gae_lambda * going_on * next_advantage
        advantages[t] = next_advantage
        next_value = values_TB[t]
    return advantages, advantages + values_TB


class UpdateResult(NamedTuple):
    """The outcome of one update. `applied` is False when the gradient was not finite and the step was left out."""

    loss: Loss
    gradient_norm: float
    applied: bool


class A2C:
    """The optimiser's state and one update of a network's flat parameters: its gradient, then a step along it."""

    def __init__(self, distribution: Distribution, tape: Tape, flat: FlatParameters, config: A2CConfig) -> None:
        self.distribution = distribution
        self.tape = tape
        self.flat = flat
        self._config = config
        self.normalization: Normalization | None = None
        if flat.moments:
            from pala.a2c.normalization import Normalization

            self.normalization = Normalization(flat, config.gamma)
        self.mean_square = torch.zeros_like(flat.data)
        self.num_squares = 0
        """Gradients whose squares are in `mean_square`."""
        self._momentum: Momentum | None = None
        if config.momentum:
            from pala.exchange.momentum import Momentum

            self._mean_move = torch.zeros_like(flat.data)
            mean = self._mean_move[: flat.num_learned]
            self._momentum = Momentum(self.learned, config.momentum, mean)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps, by their names there."""
        state = {"parameters": self.flat.data, "mean_square": self.mean_square}
        if self._momentum is not None:
            state["movement"] = self._mean_move
        return state

    @property
    def learned(self) -> Tensor:
        """The part of the flat parameters that the optimiser moves."""
        return self.flat.data[: self.flat.num_learned]

    def restart_mean_square(self) -> None:
        """Set the mean squares to zero, and warm up again: those of parameters that were not finite are not finite
        either."""
        self.mean_square.zero_()
        self.num_squares = 0

    def restart_momentum(self) -> None:
        """Restart the momentum: the exchange has put another model in the place of this one."""
        if self._momentum is not None:
            self._momentum.restart()

    def step(self, loss: Loss, learning_rate: float) -> UpdateResult:
        """Clip the gradient in `flat.gradient`, and take one optimiser step, unless it is not finite."""
        config, learned = self._config, slice(self.flat.num_learned)
        gradient = self.flat.gradient[learned]
        norm = clip_gradient_(gradient, config.max_gradient_norm)
        finite = math.isfinite(norm)
        if self.normalization is not None:
            finite = self.normalization.is_finite() and finite
            self.normalization.learn(finite)
        if finite:
            if self._momentum is not None:
                self._momentum.push_()
            self.num_squares += 1
            rmsprop_(
                self.learned,
                gradient,
                self.mean_square[learned],
                learning_rate,
                config.rmsprop_alpha,
                config.rmsprop_epsilon,
                config.rmsprop_epsilon_inside_root,
                self._bias_correction(),
            )
        return UpdateResult(loss, norm, finite)

    def _bias_correction(self) -> float:
        """Return the share that the squared gradients make up of their mean, which began at 0 (Adam, arXiv 1412.6980,
        section 3); 1: that is not corrected."""
        config = self._config
        return 1 - config.rmsprop_alpha**self.num_squares if config.rmsprop_bias_correction else 1.0

    @torch.enable_grad()  # see `AutogradTape.forward`
    def differentiate(self, rollout: Rollout, bootstrap_B: Tensor) -> Loss:
        """Return the rollout's loss, and write its gradient to `flat.gradient`: autograd goes down to the network's
        outputs, the tape from there."""
        policy_TBA = torch.stack(rollout.policy_outputs).requires_grad_()
        values_TB = torch.stack(rollout.values).requires_grad_()
        loss = a2c_loss(self.distribution, policy_TBA, values_TB, rollout, bootstrap_B, self._config)
        self.flat.gradient.zero_()
        loss.total.backward()  # type: ignore[no-untyped-call]
        assert policy_TBA.grad is not None and values_TB.grad is not None
        self.tape.backward([policy_TBA.grad, values_TB.grad.unsqueeze(-1)])
        if self.normalization is not None:
            self.normalization.gather()
        return Loss(*(term.detach() for term in loss))
