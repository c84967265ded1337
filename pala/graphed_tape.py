"""A tape's passes as CUDA graphs: each is one launch instead of dozens, which on a GPU take longer than the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pala.conv_tape import ConvTape
from pala.tape import Tape

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


def cuda_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function`, captured: a call replays its kernels on the same memory and returns the same tensors, filled anew."""
    side = torch.cuda.Stream()
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


class GraphedTape(Tape):
    """`ConvTape` in one graph for each of its passes. What a pass returns is valid until the next rollout's."""

    def __init__(self, tape: ConvTape, observations: Tensor, max_passes: int, capture: Capture = cuda_graph) -> None:
        """`observations` [B, C, H, W]: an example on the device, which the tape keeps and writes to."""
        self._tape, self.distribution = tape, tape.distribution
        self._observations = observations
        self._kept = 0
        self._begin = capture(tape.begin)
        self._forwards = [capture(lambda t=t: self._forward_at(t)) for t in range(max_passes)]  # type: ignore[misc]
        self._value = capture(lambda: tape.value(observations))
        self._begin()
        policy, value = self._forwards[-1]()
        self._by_policy = torch.zeros(max_passes, *policy.shape, device=policy.device)
        self._by_value = torch.zeros(max_passes, *value.shape, device=value.device)
        self._backward = capture(lambda: tape.backward(self._by_policy, self._by_value))

    def _forward_at(self, t: int) -> tuple[Tensor, Tensor]:
        self._tape.kept = t
        return self._tape.forward(self._observations)

    def begin(self) -> None:
        self._kept = 0
        self._begin()

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        self._observations.copy_(observations)
        policy_output, value = self._forwards[self._kept]()
        self._kept += 1
        return policy_output, value

    def value(self, observations: Tensor) -> Tensor:
        if observations.shape != self._observations.shape:  # of the episodes that a time limit has cut
            return self._tape.value(observations)
        self._observations.copy_(observations)
        result: Tensor = self._value().clone()  # a rollout may ask more than once
        return result

    def backward(self, policy_gradient_TBA: Tensor, value_gradient_TB: Tensor) -> None:
        self._by_policy.copy_(policy_gradient_TBA)
        self._by_value.copy_(value_gradient_TB)
        self._backward()
