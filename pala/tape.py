"""The network's forward passes while acting, kept for one backward pass.

Within a rollout the parameters do not change and the data is on-policy, so the acting passes are the ones that are
differentiated: a second forward pass would compute the same numbers again.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from pala.config import NetworkConfig
from pala.errors import PalaError
from pala.networks import ActorCritic, Categorical, Gaussian


class Tape(abc.ABC):
    """`begin`, then `forward` a step, then `backward` once."""

    distribution: Categorical | Gaussian

    @abc.abstractmethod
    def begin(self) -> None:
        """A new rollout: forget the passes; the parameters may have changed."""

    @abc.abstractmethod
    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """(policy outputs [B, A], values [B]) of `observations` [B, ...], without graph; the pass is kept."""

    @abc.abstractmethod
    def value(self, observations: Tensor) -> Tensor:
        """Values [B] for bootstrapping; the pass is not kept. B is free."""

    @abc.abstractmethod
    def backward(self, policy_gradient_TBA: Tensor, value_gradient_TB: Tensor) -> None:
        """From the loss's gradient by the outputs of all kept passes, write its gradient by the network's parameters
        to their `.grad`, which must be zero before."""


class AutogradTape(Tape):
    """Any network on any device, differentiated by autograd; all but the heads in bfloat16 where autocast puts it."""

    def __init__(self, network: nn.Module, precision: str = "float32") -> None:
        self._network = network
        self.distribution = network.distribution  # type: ignore[assignment]
        device = next(network.parameters()).device
        # The cache of cast weights would outlive an update.
        self._precision = torch.autocast(device.type, torch.bfloat16, precision == "bfloat16", cache_enabled=False)
        self.begin()

    def begin(self) -> None:
        self._policy_outputs: list[Tensor] = []
        self._values: list[Tensor] = []

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision:
            policy_output, value = self._network(observations)
        self._policy_outputs.append(policy_output)
        self._values.append(value)
        return self._policy_outputs[-1].detach(), self._values[-1].detach()

    def value(self, observations: Tensor) -> Tensor:
        with torch.no_grad(), self._precision:
            return self._network(observations)[1]

    def backward(self, policy_gradient_TBA: Tensor, value_gradient_TB: Tensor) -> None:
        outputs = [torch.stack(self._policy_outputs), torch.stack(self._values)]
        torch.autograd.backward(outputs, [policy_gradient_TBA, value_gradient_TB])


def make_tape(network: ActorCritic, config: NetworkConfig, max_passes: int, observations: Tensor) -> Tape:
    """The tape that `config.passes` asks for, with room for `max_passes` passes of as many `observations` [B, ...].

    Raises PalaError for what cannot be: CUDA graphs without CUDA or images, bfloat16 without images.
    """
    written_out = network.is_image and config.passes != "autograd"
    if config.passes == "cuda_graph" and not (written_out and observations.is_cuda):
        raise PalaError(
            "'network.passes' is 'cuda_graph', which needs image observations and a CUDA device; use 'auto'."
        )
    if config.precision == "bfloat16" and not network.is_image:
        raise PalaError(
            "'network.precision' is 'bfloat16', which would round vector observations to 8 bits; use 'float32'."
        )
    if not written_out:
        return AutogradTape(network, config.precision)
    from pala.conv_tape import ConvTape
    from pala.graphed_tape import GraphedTape

    tape = ConvTape(network, config.precision, max_passes, len(observations))
    return GraphedTape(tape, observations, max_passes) if config.passes == "cuda_graph" else tape
