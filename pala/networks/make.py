"""Makes the actor-critic and the tape that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium
from torch import Tensor

from pala.config import Config, NetworkConfig
from pala.networks.conv_tape import ConvTape
from pala.networks.distributions import distribution_of
from pala.networks.network import ActorCritic, Network, TrunkNetwork
from pala.networks.tape import AutogradTape, Tape
from pala.system.errors import PalaError

if TYPE_CHECKING:
    from pala.networks.own import MakeNetwork


def actor_critic(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, config: Config,
    make_network: MakeNetwork | None = None,
) -> Network:  # fmt: skip
    """Return PALA's actor-critic, or the user's own network. Raises PalaError."""
    if make_network is None and not config.network.custom:
        return ActorCritic(observation_space, action_space, config.network, config.env)
    from pala.networks.own import OwnNetwork, own_network

    own = own_network(config, make_network)
    assert own is not None
    distribution = distribution_of(action_space)
    return OwnNetwork(own, observation_space, distribution, (distribution.num_outputs, 1), config.env)


def make_tape(network: Network, config: NetworkConfig, max_passes: int, observations: Tensor) -> Tape:
    """Return the tape that `config.passes` asks for, with room for `max_passes` passes of as many `observations` [B,
    ...].

    Raises PalaError for what cannot be: bfloat16 without images.
    """
    assert config.precision != "auto", "decided by all ranks together"
    if config.precision == "bfloat16" and not network.is_image:
        raise PalaError(
            "'network.precision' is 'bfloat16', which would round vector observations to 8 bits; use 'float32'."
        )
    by_hand = config.passes != "autograd" and network.is_image and not network.state_size
    if not (by_hand and isinstance(network, TrunkNetwork)):
        return AutogradTape(network, config.precision)
    tape = ConvTape(
        network.trunk,
        network.heads,
        config.precision,
        max_passes,
        observations,
        network.pixel_low,
        network.pixel_factor,
    )
    if not observations.is_cuda:
        return tape
    from pala.networks.graphed_tape import GraphedTape

    return GraphedTape(tape, observations, max_passes)
