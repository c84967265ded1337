"""The convolutional network's passes written out: the fast path. Equal to the plain network and autograd to rounding.

What it saves: activations lie in buffers of all passes, so that the backward pass runs once over a rollout instead of
once a step; no graph is built; the scaling of pixels is in the first layer's weights; the heads are one matrix. In
bfloat16 the weights are cast once, by `begin`, and frames are turned into blocks of pixels, over which the first layer
has a stride of 1; the heads, whose values would lose too much (at 100 the rounding is 0.25), the parameters, their
gradient and the optimiser stay float32.
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

    adds = False

    def __init__(
        self,
        trunk: nn.Sequential,
        heads: Sequence[nn.Linear],
        precision: str,
        max_passes: int,
        observations: Tensor,
        pixel_low: float = 0.0,
        pixel_factor: float = 1 / 255,
    ) -> None:
        """Keep at most `max_passes` passes of batches shaped as the example `observations` [B, C, H, W]. A pixel x
        counts as (x - pixel_low) * pixel_factor."""
        self._pixel_low, self._pixel_factor = pixel_low, pixel_factor
        self._convolutions = [layer for layer in trunk if isinstance(layer, nn.Conv2d)]
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._block = _block_side(self._convolutions[0], observations) if precision == "bfloat16" else 1
        self._strides = [1 if self._block > 1 else self._convolutions[0].stride[0]]
        self._strides += [layer.stride[0] for layer in self._convolutions[1:]]
        self._linear, self._heads = cast(nn.Linear, trunk.linear), heads
        self._head_sizes = [head.out_features for head in heads]
        self._max_passes = max_passes
        self._batch_size = len(observations)
        self.kept = 0
        self._buffers: list[Tensor] = []  # made at the first pass, which shows the shapes; a single pass's own
        self._weights: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        self.kept = 0
        layers: list[nn.Conv2d | nn.Linear] = [*self._convolutions, self._linear]
        self._weights = [(self._cast(layer.weight), self._cast(layer.bias)) for layer in layers]
        self._weights[0] = self._scaled_first_layer(self._convolutions[0])
        self._weights.append((torch.cat([h.weight for h in self._heads]), torch.cat([h.bias for h in self._heads])))

    def _scaled_first_layer(self, layer: nn.Conv2d) -> tuple[Tensor, Tensor]:
        return _weight_of_blocks(self._cast(layer.weight * self._pixel_factor), self._block), self._cast(layer.bias)

    def _cast(self, parameter: Tensor | None) -> Tensor:
        assert parameter is not None
        return parameter.detach().to(self._dtype)

    @torch.no_grad()
    def forward(self, observations: Tensor) -> list[Tensor]:
        images = self._arranged(observations)
        if self._max_passes == 1:
            inputs = self._converted(images)
            activations, outputs = self._compute(inputs)
            self._buffers, self.kept = [inputs, *activations], 1
            return outputs
        if not self._buffers:
            self._buffers = [self._buffer_for(images), *map(self._buffer_for, self._compute(images.to(self._dtype))[0])]
        inputs, *buffers = (buffer.unflatten(0, (-1, self._batch_size))[self.kept] for buffer in self._buffers)
        activations, outputs = self._compute(self._converted(images, inputs))
        for buffer, activation in zip(buffers, activations, strict=True):
            buffer.copy_(activation)
        self.kept += 1
        return outputs

    def _arranged(self, observations: Tensor) -> Tensor:
        """Return the observations as the first convolution takes them; bytes stay, all others are less the lowest
        pixel."""
        images = blocks(observations, self._block) if self._block > 1 else channels_last(observations)  # a copy
        return images.sub_(self._pixel_low) if self._pixel_low and images.is_floating_point() else images

    def _converted(self, images: Tensor, into: Tensor | None = None) -> Tensor:
        """Return arranged observations in the precision of the passes; bytes less the lowest pixel, which is exact in
        bfloat16, too, if that is a whole number."""
        inputs = images.to(self._dtype) if into is None else into.copy_(images)
        return inputs.sub_(self._pixel_low) if self._pixel_low and not images.is_floating_point() else inputs

    def _buffer_for(self, activation: Tensor) -> Tensor:
        """Return an empty buffer of the same layout, for all passes."""
        buffer = activation.new_empty(self._max_passes * self._batch_size, *activation.shape[1:], dtype=self._dtype)
        return buffer.contiguous(memory_format=torch.channels_last) if activation.dim() == 4 else buffer

    @torch.no_grad()
    def peek(self, observations: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        return self._compute(self._converted(self._arranged(observations)))[1]

    def _compute(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of convolutions and linear layer, and each head's outputs [B, O]."""
        *convolutions, linear, heads = self._weights
        activations = []
        for (weight, bias), stride in zip(convolutions, self._strides, strict=True):
            images = functional.conv2d(images, weight, bias, stride).relu_()
            activations.append(images)
        activations.append(fast_linear(_rows(images), *linear).relu_())
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
        _write(self._linear, fast_linear(gradient.t(), _rows(images[-1]).t()), gradient.sum(0))
        shape = images[-1].shape
        gradient = fast_linear(gradient, linear.t()).unflatten(1, (*shape[2:], shape[1])).permute(0, 3, 1, 2)
        for i in reversed(range(len(convolutions))):
            gradient = _through_relu_(gradient, images[i + 1])
            layer = self._convolutions[i]
            weight = convolutions[i][0]
            stride = self._strides[i]
            gradient, by_weight, by_bias = torch.ops.aten.convolution_backward(
                gradient, images[i], weight, [layer.out_channels], (stride, stride), (0, 0), (1, 1), False, (0, 0), 1,
                (i > 0, True, True),
            )  # fmt: skip
            if i == 0:  # by the scaled weight
                by_weight = _weight_of_pixels(by_weight, self._block).float() * self._pixel_factor
            _write(layer, by_weight, by_bias)


def _block_side(layer: nn.Conv2d, images: Tensor) -> int:
    """Return the side in pixels of the blocks that a first layer can take instead of pixels; 1: none.

    A kernel of k x k at stride s, s a divisor of k, is one of k/s x k/s at stride 1 over blocks of s x s pixels, which
    count as channels. The pixels of a block's row, 2 or 4 bytes, are moved as one word, and in bfloat16 the gradient by
    the weights takes less. In float32 nothing is gained; on a GPU it is not measured.
    """
    side, kernel = layer.stride[0], layer.kernel_size[0]
    if images.dtype != torch.uint8 or images.device.type != "cpu":
        return 1
    return side if side in _WORDS and kernel % side == 0 and images.shape[-1] % side == 0 else 1


def blocks(images: Tensor, side: int) -> Tensor:
    """Turn bytes [B, C, H, W] into [B, C side side, H // side, W / side], channels-last: the pixels of each block as
    its channels. Rows under the last whole block are left out."""
    count, channels, height, width = images.shape
    rows, columns = height // side, width // side
    flat = images[:, :, : rows * side].reshape(-1)  # whatever stride a dimension of size 1 has
    words = flat.view(_WORDS[side]).view(count, channels, rows, side, columns)
    words = words.transpose(2, 3).reshape(count, channels * side, rows * columns)  # in two steps, twice as fast as one
    return words.transpose(1, 2).contiguous().view(torch.uint8).view(count, rows, columns, -1).permute(0, 3, 1, 2)


_WORDS = {2: torch.int16, 4: torch.int32}


def _weight_of_blocks(weight: Tensor, side: int) -> Tensor:
    """Turn a weight [O, C, K, K] into that of a convolution over blocks, [O, C side side, K / side, K / side]."""
    if side == 1:
        return weight
    parts = weight.unflatten(2, (-1, side)).unflatten(-1, (-1, side))  # [O, C, Y, y, X, x]
    return parts.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).contiguous(memory_format=torch.channels_last)


def _weight_of_pixels(weight: Tensor, side: int) -> Tensor:
    """Turn the weight of a convolution over blocks into that over pixels, [O, C, K, K]."""
    if side == 1:
        return weight
    parts = weight.unflatten(1, (-1, side, side))  # [O, C, y, x, Y, X]
    return parts.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)


def _rows(images: Tensor) -> Tensor:
    """Return a view [B, H W C] of [B, C, H, W], channels-last."""
    return images.permute(0, 2, 3, 1).flatten(1)


def fast_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs [M, K] times weight [N, K] transposed, plus bias [N]: [M, N].

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
