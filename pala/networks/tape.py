"""A network's forward passes, kept for one backward pass: a tape holds the saved activations (a forward cache).

Within A2C's rollout the parameters do not change and the data is on-policy, so the acting passes are the ones that are
differentiated: a second forward pass would compute the same numbers again. DQN keeps the pass over a minibatch.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from pala.networks.network import Network


class Tape(abc.ABC):
    """`begin` whenever the parameters have changed, and at first; then `forward` a step, and `backward` once."""

    joins = True  # several minibatches take less time in one `peek` than each in its own
    remembers = False  # whether its network has a memory
    adds = True  # `backward` adds to `.grad`, which must be zero before; False: it writes over what is there

    @abc.abstractmethod
    def begin(self) -> None:
        """Forget the kept passes: the parameters may have changed."""

    @abc.abstractmethod
    def forward(self, observations: Tensor) -> list[Tensor]:
        """Return each head's outputs [B, O] for `observations` [B, ...], without graph; the pass is kept."""

    @abc.abstractmethod
    def peek(self, observations: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        """Compute the heads' outputs without keeping the pass. B is free; `rows`, bool: the environments whose memory
        counts (None: all)."""

    def forget(self, began_B: Tensor | None = None) -> None:
        """Forget what is remembered of environments whose episodes begin, bool [B]; None: of all. Does nothing without
        a memory."""
        assert not self.remembers

    @abc.abstractmethod
    def backward(self, gradients_TBO: Sequence[Tensor]) -> None:
        """Take the loss's gradient by each head's outputs of all kept passes, and write its gradient by the network's
        parameters to their `.grad`, which must be zero before if it `adds`. The passes are forgotten."""


class AutogradTape(Tape):
    """Any network on any device, differentiated by autograd; all but the heads in bfloat16 where autocast puts it.

    Of a network with memory it keeps the environments' states. Back-propagation through time is truncated: `begin`
    keeps the states and cuts the graph, so that a gradient reaches back to the first step of a rollout.
    """

    def __init__(self, network: Network, precision: str = "float32") -> None:
        self._network = network
        self.remembers = network.state_size > 0
        self._states: Tensor | None = None  # [B, S]; None: all begin, or there is no memory
        device = next(network.parameters()).device
        # The cache of cast weights would outlive an update.
        self._precision = torch.autocast(device.type, torch.bfloat16, precision == "bfloat16", cache_enabled=False)
        self.begin()

    def begin(self) -> None:
        self._passes: list[list[Tensor]] = []
        if self._states is not None:  # of a network that was ruined and healed they would stay what they are
            self._states = self._states.detach().nan_to_num(0.0, 0.0, 0.0)

    def forward(self, observations: Tensor) -> list[Tensor]:
        # An environment may have switched gradients off, for a network of its own.
        with torch.enable_grad(), self._precision:
            outputs, self._states = self._network.advance(observations, self._states)
        self._passes.append(outputs)
        return [output.detach() for output in outputs]

    def peek(self, observations: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        states = self._states if self._states is None or rows is None else self._states[rows]
        with torch.no_grad(), self._precision:
            return self._network.advance(observations, states)[0]

    def forget(self, began_B: Tensor | None = None) -> None:
        if began_B is None:
            self._states = None
        elif self._states is not None:
            self._states = self._states.masked_fill(began_B.unsqueeze(-1), 0.0)

    @torch.enable_grad()
    def backward(self, gradients_TBO: Sequence[Tensor]) -> None:
        heads_TBO = [torch.stack(outputs) for outputs in zip(*self._passes, strict=True)]
        # Its gradient by the outputs is the one given. Handed to `backward` itself, it would have torch import sympy.
        products = [(head_TBO * given_TBO).sum() for head_TBO, given_TBO in zip(heads_TBO, gradients_TBO, strict=True)]
        torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]
        self._passes = []
