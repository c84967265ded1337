"""The Q-network: what the actor-critic's trunk sees, and a value for each action."""

from __future__ import annotations

import gymnasium
from torch import Tensor, nn

from pala.config import NetworkConfig
from pala.errors import PalaError
from pala.networks import Categorical, as_inputs, make_trunk, orthogonal


class QNetwork(nn.Module):
    """observations [B, ...] -> values of the actions [B, A].

    The trunk is `ActorCritic`'s, with one linear head; DQN's published network has `conv_channels` 32, 64, 64.
    Orthogonal initial weights, head 1. Raises PalaError for actions or observations that it cannot take.
    """

    def __init__(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space, config: NetworkConfig
    ) -> None:
        super().__init__()
        if not isinstance(action_space, gymnasium.spaces.Discrete):
            raise PalaError(f"DQN needs Discrete actions, not {action_space}; set 'algorithm' to 'a2c'.")
        self.distribution = Categorical(int(action_space.n), int(action_space.start))  # numbers the actions
        self.trunk, features = make_trunk(observation_space, config)
        self.head = orthogonal(nn.Linear(features, self.distribution.num_outputs), 1.0)

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = self.head(self.trunk(as_inputs(observations)))
        return values
