"""The convolutional network's passes written out: the fast path. Equal to the plain network and autograd to rounding.

What it saves: activations lie in buffers of all passes, so that the backward pass runs once over a rollout instead of
once a step; no graph is built; the scaling of pixels is in the first layer's weights; the heads are one matrix. In
bfloat16 the weights are cast once, by `begin`, while the heads, whose values would lose too much (at 100 the rounding
is 0.25), the parameters, their gradient and the optimiser stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pala.networks.network import channels_last
from pala.networks.tape import Tape


class ConvTape(Tape):
    """Convolutions, a linear layer, heads: a `Network` for images.

    | buffer | shape |
    |---|---|
    | inputs of each convolution, and the last one's outputs | [T B, channels, height, width], channels-last |
    | hidden, the linear layer's outputs | [T B, features] |
    """

    def __init__(
        self, trunk: nn.Sequential, heads: Sequence[nn.Linear], precision: str, max_passes: int, batch_size: int,
        pixel_low: float = 0.0, pixel_factor: float = 1 / 255,
    ) -> None:  # fmt: skip
        """A tape that keeps at most `max_passes` passes of `batch_size` observations, of which each pixel x counts as
        (x - pixel_low) * pixel_factor."""
        self._pixel_low, self._pixel_factor = pixel_low, pixel_factor
        self._convolutions = [layer for layer in trunk if isinstance(layer, nn.Conv2d)]
        self._linear, self._heads = cast(nn.Linear, trunk.linear), heads
        self._head_sizes = [head.out_features for head in heads]
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._max_passes, self._batch_size, self.kept = max_passes, batch_size, 0
        self._buffers: list[Tensor] = []  # made at the first pass, which shows the shapes
        self._weights: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        self.kept = 0
        layers: list[nn.Conv2d | nn.Linear] = [*self._convolutions, self._linear]
        self._weights = [(self._cast(layer.weight), self._cast(layer.bias)) for layer in layers]
        self._weights[0] = self._scaled_first_layer(self._convolutions[0])
        self._weights.append((torch.cat([h.weight for h in self._heads]), torch.cat([h.bias for h in self._heads])))

    def _scaled_first_layer(self, layer: nn.Conv2d) -> tuple[Tensor, Tensor]:
        weight, bias = layer.weight * self._pixel_factor, layer.bias
        if self._pixel_low != 0:
            assert bias is not None
            bias = bias - self._pixel_low * weight.sum((1, 2, 3))
        return self._cast(weight), self._cast(bias)

    def _cast(self, parameter: Tensor | None) -> Tensor:
        assert parameter is not None
        return parameter.detach().to(self._dtype)

    @torch.no_grad()
    def forward(self, observations: Tensor) -> list[Tensor]:
        images = channels_last(observations)
        if not self._buffers:
            self._buffers = [self._buffer_for(images), *map(self._buffer_for, self._compute(images.to(self._dtype))[0])]
        inputs, *buffers = (buffer.unflatten(0, (-1, self._batch_size))[self.kept] for buffer in self._buffers)
        activations, outputs = self._compute(inputs.copy_(images))
        for buffer, activation in zip(buffers, activations, strict=True):
            buffer.copy_(activation)
        self.kept += 1
        return outputs

    def _buffer_for(self, activation: Tensor) -> Tensor:
        """An empty buffer of the same layout, for all passes."""
        buffer = activation.new_empty(self._max_passes * self._batch_size, *activation.shape[1:], dtype=self._dtype)
        return buffer.contiguous(memory_format=torch.channels_last) if activation.dim() == 4 else buffer

    @torch.no_grad()
    def peek(self, observations: Tensor) -> list[Tensor]:
        return self._compute(channels_last(observations).to(self._dtype))[1]

    def _compute(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(the outputs of convolutions and linear layer, each head's outputs [B, O])."""
        *convolutions, linear, heads = self._weights
        activations = []
        for layer, (weight, bias) in zip(self._convolutions, convolutions, strict=True):
            images = functional.conv2d(images, weight, bias, layer.stride).relu_()
            activations.append(images)
        activations.append(_linear(_rows(images), *linear).relu_())
        outputs = functional.linear(activations[-1].float(), *heads)
        return activations, list(outputs.split(self._head_sizes, 1))

    @torch.no_grad()
    def backward(self, gradients_TBO: Sequence[Tensor]) -> None:
        *images, hidden = (buffer[: self.kept * self._batch_size] for buffer in self._buffers)
        self.kept = 0
        *convolutions, (linear, _), (heads, _) = self._weights
        gradient = torch.cat([gradient_TBO.flatten(0, 1) for gradient_TBO in gradients_TBO], 1)
        by_weight, by_bias = gradient.t() @ hidden.float(), gradient.sum(0)
        for head, *parts in zip(self._heads, *(by.split(self._head_sizes) for by in (by_weight, by_bias)), strict=True):
            _write(head, *parts)
        gradient = _through_relu_((gradient @ heads).to(self._dtype), hidden)
        _write(self._linear, _linear(gradient.t(), _rows(images[-1]).t()), gradient.sum(0))
        shape = images[-1].shape
        gradient = _linear(gradient, linear.t()).unflatten(1, (*shape[2:], shape[1])).permute(0, 3, 1, 2)
        for i in reversed(range(len(convolutions))):
            gradient = _through_relu_(gradient, images[i + 1])
            layer, weight = self._convolutions[i], convolutions[i][0]
            gradient, by_weight, by_bias = torch.ops.aten.convolution_backward(
                gradient, images[i], weight, [layer.out_channels], layer.stride, (0, 0), (1, 1), False, (0, 0), 1,
                (i > 0, True, True),
            )  # fmt: skip
            _write(layer, by_weight if i > 0 else self._by_first_weight(by_weight, by_bias), by_bias)

    def _by_first_weight(self, by_scaled_weight: Tensor, by_bias: Tensor) -> Tensor:
        """The gradient by the first layer's own weights."""
        gradient = by_scaled_weight.float() * self._pixel_factor
        if self._pixel_low != 0:
            gradient -= self._pixel_factor * self._pixel_low * by_bias.float().view(-1, 1, 1, 1)
        return gradient


def _rows(images: Tensor) -> Tensor:
    """[B, C, H, W], channels-last -> [B, H W C], a view."""
    return images.permute(0, 2, 3, 1).flatten(1)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [M, K] times weight [N, K] transposed, plus bias [N]: [M, N].

    In float32 on a CPU by oneDNN, whose operation torch has for its compiler. `functional.linear` takes MKL, which
    needed 2.3 times as long on an AMD EPYC; in bfloat16 it takes oneDNN itself.
    """
    if inputs.dtype == torch.float32 and inputs.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], ""))
    return functional.linear(inputs, weight, bias)


def _through_relu_(gradient: Tensor, outputs: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward.grad_input(gradient, outputs, 0, grad_input=gradient)


def _write(layer: nn.Module, by_weight: Tensor, by_bias: Tensor) -> None:
    for parameter, gradient in ((layer.weight, by_weight), (layer.bias, by_bias)):
        parameter.grad.copy_(gradient)  # type: ignore[operator,union-attr]
