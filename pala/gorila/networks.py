"""The Q-network: what the actor-critic's trunk sees, and a value for each action."""

from __future__ import annotations

import gymnasium
from torch import Tensor, nn

from pala.config import Config, NetworkConfig
from pala.networks.distributions import Categorical, distribution_of
from pala.networks.network import Network, TrunkNetwork, orthogonal
from pala.networks.own import MakeNetwork, OwnNetwork, own_network
from pala.system.errors import PalaError


class QNetwork(TrunkNetwork):
    """A network from observations [B, ...] to values [B, A] of the actions, which `distribution` numbers.

    DQN's published network has `conv_channels` 32, 64, 64. The head's initial weights: 1. Raises PalaError for actions
    or observations that it cannot take.
    """

    distribution: Categorical

    def __init__(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space, config: NetworkConfig
    ) -> None:
        super().__init__(observation_space, numbered(action_space), config)
        self.head = orthogonal(nn.Linear(self.num_features, self.distribution.num_outputs), 1.0)

    @property
    def heads(self) -> list[nn.Linear]:
        return [self.head]

    def forward(self, observations: Tensor) -> Tensor:
        (values,) = self.outputs(observations)
        return values


def numbered(action_space: gymnasium.Space) -> Categorical:
    """Return the numbering of the actions. Raises PalaError for actions without numbers."""
    if not isinstance(action_space, gymnasium.spaces.Discrete):
        raise PalaError(f"DQN needs Discrete actions, not {action_space}; set 'algorithm' to 'a2c'.")
    distribution = distribution_of(action_space)
    assert isinstance(distribution, Categorical)
    return distribution


def q_network(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, config: Config, make_network: MakeNetwork | None
) -> Network:
    """Return the user's own network, or PALA's if there is none."""
    own = own_network(config, make_network)
    if own is None:
        return QNetwork(observation_space, action_space, config.network)
    distribution = numbered(action_space)
    network = OwnNetwork(own, observation_space, distribution, (distribution.num_outputs,))
    if network.state_size:
        raise PalaError(
            "Your own network has a memory ('state_size'), but 'algorithm' is 'gorila', whose replay holds steps "
            "without what came before; set it to 'a2c'."
        )
    return network
