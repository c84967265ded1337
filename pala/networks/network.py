"""Networks: trunks, heads, the actor-critic and its action distributions, and flat parameter storage."""

from __future__ import annotations

import abc
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

import gymnasium
import torch
from torch import Tensor, nn

from pala.config import NetworkConfig
from pala.system.errors import PalaError

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


class Categorical:
    """Distribution over discrete actions, from logits [..., A]; actions are int64 [...]."""

    def __init__(self, num_actions: int, first_action: int = 0) -> None:
        self.num_outputs = num_actions
        self.first_action = first_action

    def sample(self, logits: Tensor, generator: torch.Generator, greedy: bool = False) -> Tensor:
        """Actions [B] for logits [B, A], by exponential races: P(argmax p / e) = p. Unlike `multinomial`, logits that
        are not finite give some action instead of an error (on a GPU, a dead context): the update deals with them."""
        if greedy:
            return logits.argmax(-1)
        races = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.softmax(-1) / races).argmax(-1)

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of `actions` and entropy, both [...]."""
        log_p = logits.log_softmax(-1)
        return log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """As the environment wants them."""
        return actions + self.first_action if self.first_action else actions


class Gaussian(nn.Module):
    """Independent normal distributions over a box of actions, from means [..., A]; one learned log-deviation each."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        self.num_outputs = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.zeros(self.num_outputs))
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", torch.as_tensor(space.low), persistent=False)
        self.register_buffer("high", torch.as_tensor(space.high), persistent=False)

    def sample(self, mean: Tensor, generator: torch.Generator, greedy: bool = False) -> Tensor:
        """Actions [B, A], not yet clipped to the box."""
        if greedy:
            return mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return mean + noise * self.log_std.detach().exp()  # an action is data: no gradient flows through it

    def log_prob_and_entropy(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density of the unclipped `actions` and entropy, both [...]."""
        normal = torch.distributions.Normal(mean, self.log_std.exp(), validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Clipped to the box and in its shape; finite whatever the network says."""
        return actions.nan_to_num(0.0).reshape(-1, *self.low.shape).clamp(self.low, self.high)


class Network(nn.Module, abc.ABC):
    """A trunk, and linear heads over its features.

    Images (uint8 [C, H, W]) go through GALA's convolutions (Assran et al. 2019, released settings: 32 8x8/4, 64 4x4/2,
    32 3x3/1, linear 512, ReLU), vectors through an MLP with tanh. Orthogonal initial weights. The linear layer takes
    the last convolution's outputs in the order height, width, channels: as they lie in memory. Raises PalaError for
    observations that it cannot take.
    """

    is_own = False  # of the user's making (`own.py`)

    def __init__(
        self, observation_space: gymnasium.Space, distribution: Categorical | Gaussian, config: NetworkConfig
    ) -> None:
        super().__init__()
        self.distribution = distribution
        self.trunk, self.num_features = make_trunk(observation_space, config)
        self.is_image = len(observation_space.shape or ()) == 3

    @property
    @abc.abstractmethod
    def heads(self) -> list[nn.Linear]:
        """In the order of their outputs."""

    def outputs(self, observations: Tensor) -> list[Tensor]:
        """Each head's [B, O] float32, for observations [B, ...]."""
        features = self._features(as_inputs(observations))
        with torch.autocast(observations.device.type, enabled=False):  # bfloat16 would round values of 100 by 0.25
            return [head(x.float()) for head, x in zip(self.heads, features, strict=True)]

    def _features(self, inputs: Tensor) -> list[Tensor]:
        """What each head takes."""
        return [self.trunk(inputs)] * len(self.heads)


class ActorCritic(Network):
    """observations [B, ...] -> (policy outputs [B, A], values [B]).

    Images have one trunk for the two; vectors have one for each, since unscaled values would swamp a trunk that they
    shared. The heads' initial weights: 0.01 and 1.
    """

    def __init__(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space, config: NetworkConfig
    ) -> None:
        super().__init__(observation_space, _distribution(action_space), config)
        if not self.is_image:
            self.value_trunk, _ = make_trunk(observation_space, config)
        self.policy_head = orthogonal(nn.Linear(self.num_features, self.distribution.num_outputs), 0.01)
        self.value_head = orthogonal(nn.Linear(self.num_features, 1), 1.0)

    @property
    def heads(self) -> list[nn.Linear]:
        return [self.policy_head, self.value_head]

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        policy_output, value = self.outputs(observations)
        return policy_output, value.squeeze(-1)

    def _features(self, inputs: Tensor) -> list[Tensor]:
        return super()._features(inputs) if self.is_image else [self.trunk(inputs), self.value_trunk(inputs)]


def as_inputs(observations: Tensor) -> Tensor:
    """What a trunk takes of observations [B, ...]: float32; images scaled to 0..1 and channels-last."""
    if observations.dim() == 4:
        return channels_last(observations).to(torch.float32).mul_(1 / 255)
    return observations.to(torch.float32)


def channels_last(images: Tensor) -> Tensor:
    """The same images [B, C, H, W] in channels-last memory order. For bytes, a stack of the channels is three times
    as fast as `to(memory_format=...)`."""
    return torch.stack(images.unbind(1), -1).permute(0, 3, 1, 2)


def _distribution(space: gymnasium.Space) -> Categorical | Gaussian:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.Box):
        return Gaussian(space)
    raise PalaError(f"Actions must be Discrete or a Box, not {space}; wrap the environment.")


def make_trunk(space: gymnasium.Space, config: NetworkConfig) -> tuple[nn.Sequential, int]:
    """Convolutions for images, an MLP for vectors, and the number of features. Raises PalaError for other spaces."""
    shape = space.shape
    if not isinstance(space, gymnasium.spaces.Box) or shape is None or len(shape) not in (1, 3):
        raise PalaError(f"Observations must be a Box of one or three dimensions, not {space}.")
    if len(shape) == 1:
        return _mlp_trunk(shape[0], config.mlp_hidden)
    if space.dtype != "uint8":
        raise PalaError(f"Image observations must be uint8, not {space.dtype}; wrap the environment.")
    return _conv_trunk(shape, config), config.conv_hidden


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer with orthogonal weights of this gain and no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _conv_trunk(shape: tuple[int, ...], config: NetworkConfig) -> nn.Sequential:
    gain = nn.init.calculate_gain("relu")
    channels, height, width = shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (out, kernel, stride) in enumerate(zip(config.conv_channels, (8, 4, 3), (4, 2, 1), strict=True), 1):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        layers[f"conv{i}"] = orthogonal(nn.Conv2d(channels, out, kernel, stride), gain)
        layers[f"relu{i}"] = nn.ReLU()
        channels = out
    if height < 1 or width < 1:
        raise PalaError(f"Image observations {shape} are too small for the convolutions; 84 x 84 is usual.")
    layers["flatten"] = _FlattenChannelsLast()
    layers["linear"] = orthogonal(nn.Linear(height * width * channels, config.conv_hidden), gain)
    layers["relu"] = nn.ReLU()
    return nn.Sequential(layers)


class _FlattenChannelsLast(nn.Module):
    """[B, C, H, W] -> [B, H W C]: a view of what channels-last convolutions give."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


def _mlp_trunk(inputs: int, hidden: Iterable[int]) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [orthogonal(nn.Linear(inputs, width), math.sqrt(2)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers), inputs


class FlatParameters:
    """All parameters of a network in one contiguous float32 vector, and their gradients in another.

    The network's parameters become views of `data` (convolutions in channels-last order, the layout in which they
    are fastest), so a snapshot is one copy, averaging one operation and an optimiser step a few.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        network.to(device)
        named = list(network.named_parameters())
        total = sum(parameter.numel() for _, parameter in named)
        self.data = torch.zeros(total, device=device)
        self.gradient = torch.zeros(total, device=device)
        self.signature = _signature(named)
        offset = 0
        for _, parameter in named:
            end = offset + parameter.numel()
            view = _shaped(self.data[offset:end], parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = _shaped(self.gradient[offset:end], parameter.shape)
            offset = end


def _shaped(flat: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)


def _signature(named: list[tuple[str, nn.Parameter]]) -> int:
    """64 bits that are equal for networks of the same names and shapes."""
    layout = ";".join(f"{name}:{tuple(parameter.shape)}" for name, parameter in named)
    return int.from_bytes(hashlib.sha256(layout.encode()).digest()[:8], "little")
