"""Makes the tape that a configuration asks for."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch
from torch import Tensor

from pala.config import NetworkConfig
from pala.networks.conv_tape import ConvTape
from pala.networks.network import Network, TrunkNetwork
from pala.networks.tape import AutogradTape, Tape
from pala.system.errors import PalaError


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
    # The written-out passes round pixels before their low is taken away, which these few bits only bear near 0.
    far_from_zero = config.precision == "bfloat16" and abs(network.pixel_low) * network.pixel_factor > 1
    if config.passes == "autograd" or not isinstance(network, TrunkNetwork) or not network.is_image or far_from_zero:
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


def blank_observations(space: gymnasium.Space, count: int, device: torch.device) -> Tensor:
    """Return `count` observations of a space, all zeros: an example for `make_tape`."""
    return torch.from_numpy(np.zeros((count, *(space.shape or ())), space.dtype)).to(device)
