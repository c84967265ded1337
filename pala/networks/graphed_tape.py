"""A tape's passes as CUDA graphs: each is one launch instead of dozens, which on a GPU take longer than the work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pala.networks.conv_tape import ConvTape
from pala.networks.tape import Tape

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


def cuda_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `function` as a CUDA graph: a call replays its kernels on the same memory and returns the same tensors,
    filled again."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose their kernels outside of the capture
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the one stream of all captures: cuBLAS keeps 32 MiB for each stream that it was used on."""
    return torch.cuda.Stream(device)


class GraphedTape(Tape):
    """`ConvTape` in one graph for each of its passes. What a pass returns is valid until the tape comes
    to that pass again."""

    adds = ConvTape.adds
    joins = False  # only a pass of the captured size is a graph

    def __init__(self, tape: ConvTape, observations: Tensor, max_passes: int, capture: Capture = cuda_graph) -> None:
        """`observations` [B, C, H, W]: an example on the device, which the tape keeps and writes to."""
        self._tape = tape
        self._observations = observations
        self._kept = 0
        self._begin = capture(tape.begin)
        self._forwards = [capture(lambda t=t: self._forward_at(t)) for t in range(max_passes)]  # type: ignore[misc]
        self._peek = capture(lambda: tape.peek(observations))
        self._begin()
        self._gradients_TBO = [o.new_zeros(max_passes, *o.shape) for o in self._forwards[-1]()]
        self._backward = capture(self._backward_through_all)

    def _forward_at(self, t: int) -> list[Tensor]:
        self._tape.kept = t
        return self._tape.forward(self._observations)

    def _backward_through_all(self) -> None:
        self._tape.kept = len(self._forwards)
        self._tape.backward(self._gradients_TBO)

    def begin(self) -> None:
        self._kept = 0
        self._begin()

    def forward(self, observations: Tensor) -> list[Tensor]:
        self._observations.copy_(observations)
        outputs: list[Tensor] = self._forwards[self._kept]()
        self._kept += 1
        return outputs

    def peek(self, observations: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        count = len(observations)
        if count > len(self._observations):
            return self._tape.peek(observations)
        self._observations[:count].copy_(observations)  # the other rows' outputs are of no interest
        return [outputs[:count].clone() for outputs in self._peek()]  # one may ask more than once

    def backward(self, gradients_TBO: Sequence[Tensor]) -> None:
        for mine, gradient_TBO in zip(self._gradients_TBO, gradients_TBO, strict=True):
            mine.copy_(gradient_TBO)
        self._backward()
        self._kept = 0
