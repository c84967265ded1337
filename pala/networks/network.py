"""Networks: trunks, heads, the actor-critic, and flat parameter storage."""

from __future__ import annotations

import abc
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from pala.config import EnvConfig, NetworkConfig
from pala.envs.spaces import LEAST_SIDE, Joined, has_images, image_scale, is_bounded, vector_size
from pala.exchange.flat import checksum, signature_of
from pala.networks.distributions import Distribution, distribution_of
from pala.networks.moments import Moments
from pala.system.errors import PalaError
from pala.system.resources import available_memory_bytes

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


class Network(nn.Module, abc.ABC):
    """Linear heads over features, and what its observations are scaled by: images ([C, H, W]) to 0..1, by the bounds of
    their space, less their background."""

    is_own = False  # of the user's making (`own.py`)
    state_size = 0
    """Numbers that a network with memory remembers of an environment (`recurrent.py`); 0: it has none."""
    background = 0.0
    """Taken from images that are scaled to 0..1."""

    def __init__(self, space: gymnasium.Space, distribution: Distribution, env: EnvConfig | None = None) -> None:
        """`space`: space of observations. `env`: settings of normalisation; None: nothing is normalised."""
        super().__init__()
        self.distribution = distribution
        self.is_image = len(space.shape or ()) == 3
        normalize = env is not None and env.normalize_observations
        if normalize and not vector_size(space):
            raise PalaError(
                "'env.normalize_observations' is for vectors, but the observations are images, which are scaled by "
                "the bounds of their space; leave it out."
            )
        self.observation_moments = Moments(vector_size(space)) if normalize else None
        # Of discounted returns, by which rewards are scaled; no part of the policy, but it goes where that goes.
        self.return_moments = Moments(1) if env is not None and env.normalize_rewards else None
        self.pixel_low, self.pixel_factor = 0.0, 1.0
        if self.is_image:
            assert isinstance(space, gymnasium.spaces.Box)
            self.pixel_low, self.pixel_factor = image_scale(space)

    @property
    @abc.abstractmethod
    def heads(self) -> list[nn.Linear]:
        """Heads in the order of their outputs."""

    def outputs(self, observations: Tensor) -> list[Tensor]:
        """Return each head's outputs [B, O], float32, for observations [B, ...], the first ones of their episodes."""
        return self.advance(observations, None)[0]

    def advance(self, observations: Tensor, state: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Return each head's outputs, as `outputs` does, and the state after these observations. `state`: [B, S], of a
        network with memory; None: without one, and where all episodes begin."""
        if state is None and self.state_size:
            state = torch.zeros(len(observations), self.state_size, device=observations.device)
        features, state = self._features(self._inputs(observations), state)
        with torch.autocast(observations.device.type, enabled=False):  # bfloat16 would round values of 100 by 0.25
            return [head(x) for head, x in zip(self.heads, features, strict=True)], state

    def _inputs(self, observations: Tensor) -> Tensor:
        """Return what a trunk takes of observations [B, ...]: float32; images scaled and channels-last. A user's trunk,
        which may work in place, never gets the observations themselves."""
        if self.is_image:
            images = channels_last(observations).to(torch.float32)  # a copy
            if self.pixel_low != 0:
                images.sub_(self.pixel_low)
            return images.mul_(self.pixel_factor)
        moments = self.observation_moments
        if moments is None:
            return observations.to(torch.float32, copy=self.is_own)
        size = len(moments.mean)
        seen = moments.standardised(observations[:, :size])
        return torch.cat([seen, observations[:, size:]], 1) if size < observations.shape[1] else seen

    @abc.abstractmethod
    def _features(self, inputs: Tensor, state: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Return the input of each head, float32, and the state after it; None: without memory."""


class TrunkNetwork(Network):
    """A network with a trunk of PALA's own.

    Images go through convolutions, those of GALA from 36 x 36 pixels on, vectors through an MLP with tanh. Where there
    are both, it takes the images' features, too. Orthogonal initial weights. The linear layer takes the last
    convolution's outputs in the order height, width, channels: as they lie in memory. Raises PalaError for observations
    that it cannot take; `pala.envs.spaces` makes of others what it can.
    """

    memories: nn.ModuleList
    """One for each of `trunks`; there are some where `state_size` is not 0."""

    def __init__(
        self, space: gymnasium.Space, distribution: Distribution, config: NetworkConfig, env: EnvConfig | None = None
    ) -> None:
        super().__init__(space, distribution, env)
        self.trunk, self.num_features = make_trunk(space, config)
        self._joined = space if isinstance(space, Joined) and space.images else None
        if self._joined is not None:
            self.image_trunks = nn.ModuleList(make_trunk(image, config)[0] for image in self._joined.images)

    @property
    def trunks(self) -> list[nn.Module]:
        """One that all heads share, or one for each."""
        return [self.trunk]

    def _features(self, inputs: Tensor, state: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        if self._joined is not None:
            vectors, images = self._joined.split(inputs)
            if self.background:
                each = zip(images, self._joined.images, strict=True)
                images = [image - self.background if is_bounded(space) else image for image, space in each]
            seen = [trunk(channels_last(image)) for trunk, image in zip(self.image_trunks, images, strict=True)]
            inputs = torch.cat([vectors, *seen], -1)
        features = [trunk(inputs).float() for trunk in self.trunks]
        if state is not None:
            parts = zip(self.memories, features, state.chunk(len(features), -1), strict=True)
            with torch.autocast(inputs.device.type, enabled=False):
                remembered = [memory(x, part) for memory, x, part in parts]
            features, state = [x for x, _ in remembered], torch.cat([part for _, part in remembered], -1)
        return features * (len(self.heads) // len(features)), state


class ActorCritic(TrunkNetwork):
    """observations [B, ...] -> (policy outputs [B, A], values [B]).

    Images have one trunk for the two; vectors have one for each, since unscaled values would swamp a trunk that they
    shared. Where there are both, the MLPs share the images' features. A memory is behind each trunk. The heads' initial
    weights: 0.01 and 1.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: NetworkConfig,
        env: EnvConfig | None = None,
    ) -> None:
        super().__init__(observation_space, distribution_of(action_space), config, env)
        if has_images(observation_space):
            assert isinstance(observation_space, gymnasium.spaces.Box)
            assert config.background != "auto", "found when a run starts"
            self.background = config.background
            if self.is_image and is_bounded(observation_space):
                self.pixel_low += self.background / self.pixel_factor
        if not self.is_image:
            self.value_trunk, _ = make_trunk(observation_space, config)
        if config.memory != "none":
            from pala.networks.recurrent import UNITS, Memory

            memories = [Memory(config.memory, self.num_features) for _ in self.trunks]
            self.memories = nn.ModuleList(memories)
            self.state_size = sum(memory.state_size for memory in memories)
            self.num_features = UNITS
        self.policy_head = orthogonal(nn.Linear(self.num_features, self.distribution.num_outputs), 0.01)
        self.value_head = orthogonal(nn.Linear(self.num_features, 1), 1.0)

    @property
    def trunks(self) -> list[nn.Module]:
        return [self.trunk] if self.is_image else [self.trunk, self.value_trunk]

    @property
    def heads(self) -> list[nn.Linear]:
        return [self.policy_head, self.value_head]

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        policy_output, value = self.outputs(observations)
        return policy_output, value.squeeze(-1)


def channels_last(images: Tensor) -> Tensor:
    """Return the images [B, C, H, W] in channels-last memory order. For bytes, a stack of the channels is three times
    as fast as `to(memory_format=...)`."""
    return torch.stack(images.unbind(1), -1).permute(0, 3, 1, 2)


def make_trunk(space: gymnasium.Space, config: NetworkConfig) -> tuple[nn.Sequential, int]:
    """Return convolutions for an image, or an MLP for vectors and the features of images beside them; and the number of
    features. Raises PalaError for other spaces."""
    shape = space.shape
    if not isinstance(space, gymnasium.spaces.Box) or shape is None or len(shape) not in (1, 3):
        raise PalaError(f"Observations must be a Box of one or three dimensions, not {space}.")
    if len(shape) == 1:
        num_images = len(space.images) if isinstance(space, Joined) else 0
        return _mlp_trunk(vector_size(space) + num_images * config.conv_hidden, config.mlp_hidden)
    return _conv_trunk(shape, config), config.conv_hidden


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Give the layer orthogonal weights of this gain and a zero bias; return it."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


_TRUNKS = {  # least side in pixels -> (kernel, stride) of each convolution
    36: ((8, 4), (4, 2), (3, 1)),  # GALA's, for Atari's 84 x 84
    16: ((4, 2), (3, 2), (3, 1)),
    LEAST_SIDE: ((3, 1), (3, 1), (3, 1)),  # as on MinAtar's 10 x 10 (Young & Tian 2019, which has one of them)
}
"""The first that fits is taken. The smaller ones are ours."""


def _conv_trunk(shape: tuple[int, ...], config: NetworkConfig) -> nn.Sequential:
    gain = nn.init.calculate_gain("relu")
    channels, height, width = shape
    kinds = next((kinds for least, kinds in _TRUNKS.items() if min(height, width) >= least), None)
    if kinds is None:
        raise PalaError(
            f"Image observations {shape} are under {LEAST_SIDE} pixels high or wide; give them as a vector."
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (out, (kernel, stride)) in enumerate(zip(config.conv_channels, kinds, strict=True), 1):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        _check_fits(channels * out * kernel**2, "conv_channels")
        layers[f"conv{i}"] = orthogonal(nn.Conv2d(channels, out, kernel, stride), gain)
        layers[f"relu{i}"] = nn.ReLU()
        channels = out
    _check_fits(height * width * channels * config.conv_hidden, "conv_hidden")
    layers["flatten"] = _FlattenChannelsLast()
    layers["linear"] = orthogonal(nn.Linear(height * width * channels, config.conv_hidden), gain)
    layers["relu"] = nn.ReLU()
    return nn.Sequential(layers)


def _check_fits(weights: int, setting: str) -> None:
    """Raise PalaError if a layer's float32 weights alone take more memory than there is."""
    if 4 * weights > (available := available_memory_bytes()):
        raise PalaError(
            f"'network.{setting}' asks for a layer of {4 * weights / 2**30:,.1f} GiB, but "
            f"{available / 2**30:.1f} GiB of memory are available; lower it."
        )


class _FlattenChannelsLast(nn.Module):
    """[B, C, H, W] -> [B, H W C]: a view of what channels-last convolutions give."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


def _mlp_trunk(inputs: int, hidden: Iterable[int]) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for width in hidden:
        _check_fits(inputs * width, "mlp_hidden")
        layers += [orthogonal(nn.Linear(inputs, width), math.sqrt(2)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers), inputs


def blank_observations(space: gymnasium.Space, count: int, device: torch.device) -> Tensor:
    """Return `count` observations of a space, all zeros: an example for `make_tape`."""
    return torch.from_numpy(np.zeros((count, *(space.shape or ())), space.dtype)).to(device)


class FlatParameters:
    """One contiguous float32 vector of all parameters of a network, and another of their gradients.

    The network's parameters become views of `data` (convolutions in channels-last order, the layout in which they
    are fastest), so a snapshot is one copy, averaging one operation and an optimiser step a few. The last `num_moments`
    elements are running moments (`moments.py`), which no optimiser may move.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        network.to(device)
        parameters = list(network.named_parameters())
        self.moments = {name: module for name, module in network.named_modules() if isinstance(module, Moments)}
        buffers = [
            (f"{name}.{of}", buffer) for name, module in self.moments.items() for of, buffer in module.named_buffers()
        ]
        self.num_moments = sum(buffer.numel() for _, buffer in buffers)
        total = sum(parameter.numel() for _, parameter in parameters) + self.num_moments
        self.data = torch.zeros(total, device=device, dtype=torch.float32)
        self.gradient = torch.zeros_like(self.data)
        own = getattr(network, "own", None)  # `own.py`: its buffers are sent to nobody, so all have to make the same
        fixed = [] if own is None else [(f"{name}={_checksum(buffer)}", buffer) for name, buffer in own.named_buffers()]
        self.signature = signature_of([*parameters, *buffers, *fixed])
        self._offset = 0
        for _, parameter in parameters:
            parameter.data, parameter.grad = self._take(parameter.data)
        for module in self.moments.values():
            for name, buffer in list(module.named_buffers()):
                view, module.seen[name] = self._take(buffer)
                setattr(module, name, view)

    @property
    def num_learned(self) -> int:
        """Elements that the optimiser moves: the first ones."""
        return len(self.data) - self.num_moments

    def _take(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next views of `data`, filled with this tensor, and of `gradient`."""
        begin, self._offset = self._offset, self._offset + tensor.numel()
        parts = self.data[begin : self._offset], self.gradient[begin : self._offset]
        if tensor.dim() == 4:  # an image's weights: channels last
            out, channels, height, width = tensor.shape
            data, gradient = (part.view(out, height, width, channels).permute(0, 3, 1, 2) for part in parts)
        else:
            data, gradient = (part.view(tensor.shape) for part in parts)
        data.copy_(tensor)
        return data, gradient


def _checksum(tensor: Tensor) -> int:
    # What is computed may differ between processors in its last bits.
    return checksum(tensor.cpu().to(torch.bfloat16) if tensor.is_floating_point() else tensor)
