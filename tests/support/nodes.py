"""One rank's end of the wire, without a network."""

from __future__ import annotations

import numpy as np
import torch

from pala.config import ExchangeConfig
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import Codec, make_codec
from pala.exchange.gossip.messages import Kind, gossip_sizes
from pala.exchange.gossip.models import ReceiveBuffer, SendBuffer
from pala.exchange.wire import Message, Refusal, Wire

RANKS, PARAMETERS, SIGNATURE = 5, 41, 0xFEDCBA9876543210

CPU = torch.device("cpu")

COMPRESSIONS = ["none", "bfloat16", "top_k"]


class Node:
    """One rank's end of the wire, without a network."""

    def __init__(
        self, parameters: torch.Tensor, compression: str, fraction: float = 0.1, rank: int = 0, ranks: int = RANKS
    ) -> None:
        config = ExchangeConfig(compression=compression, top_k_fraction=fraction)
        self.rank, self.parameters = rank, parameters.clone()
        self.codec: Codec = make_codec(config, self.parameters)
        self.wire = Wire(ranks, parameters.numel(), SIGNATURE, gossip_sizes(self.codec.sizes))
        self.send = SendBuffer(self.wire, parameters.device)
        self.inbox = ReceiveBuffer(self.wire, self.codec, parameters.device)

    def message(self, whole: bool = False) -> np.ndarray:
        """The bytes of this rank's next model."""
        header = Message(Kind.MODEL, self.rank, 0, 1.0, Stop.NONE, np.zeros(self.wire.num_ranks, np.uint64))
        self.send.fill(header, self.codec.pack(self.parameters, whole))
        while not self.send.ready():
            pass
        return self.send.data.copy()

    def receive(self, data: np.ndarray) -> Message | Refusal:
        """As the transport and the driver do, before anything is accepted."""
        assert len(data) <= len(self.inbox.data)
        self.inbox.data[: len(data)] = data
        decoded = self.wire.decode(self.inbox.data[: len(data)])
        if isinstance(decoded, Refusal):
            return decoded
        return self.inbox.check(decoded, len(data)) or decoded

    def take_in(self, data: np.ndarray) -> None:
        message = self.receive(data)
        assert isinstance(message, Message), message
        self.inbox.add(1.0)

    def mix(self) -> torch.Tensor | None:
        """What came, each with the weight of this rank's own."""
        return self.codec.mix(self.parameters, own_weight=1.0)
