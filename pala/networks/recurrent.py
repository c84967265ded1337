"""Memory behind a trunk (`network.memory`): an LSTM or a GRU.

A network with memory has a *state* of each environment: a row of `state_size` numbers, zeros where an episode begins.
Mnih et al. 2016 (arXiv 1602.01783, section 8) put an LSTM of 256 cells behind the last hidden layer, and carry its
state on from rollout to rollout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

UNITS = 256  # [A3C]
Kind = Literal["none", "lstm", "gru"]


class Memory(nn.Module):
    """An LSTM or a GRU: features [B, F] and a state [B, S] -> what is remembered [B, 256] and the state after.

    Orthogonal initial weights, and biases of 0.
    """

    def __init__(self, kind: Kind, inputs: int) -> None:
        super().__init__()
        self.is_lstm = kind == "lstm"
        self.cell: nn.RNNCellBase = nn.LSTMCell(inputs, UNITS) if self.is_lstm else nn.GRUCell(inputs, UNITS)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        self.state_size = 2 * UNITS if self.is_lstm else UNITS

    def forward(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_lstm:
            hidden: Tensor = self.cell(features, state)
            return hidden, hidden
        hidden, cells = self.cell(features, state.split(UNITS, -1))
        return hidden, torch.cat([hidden, cells], -1)
