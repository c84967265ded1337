"""Returns and advantages: pure functions on arrays [T, B] (steps, environments)."""

from __future__ import annotations

import torch
from torch import Tensor


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
