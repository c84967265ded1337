"""Models of real ranks: flat parameters to packets of bytes and back, with the host memory that they lie in.

    sent:      parameters ─ fill ─▶ snapshot ─ has left ─▶ free
                                            └ is an offer ─▶ kept ─ answer came ─▶ difference ─ move ─▶ free
    received:  block ─ check ─▶ staged ─ add ─▶ sum ─ mix ─▶ parameters

| memory | blocks of a whole message |
|---|---|
| snapshots on their way | two (`driver.py`); `paired`: one an open offer or answer, at most two a peer |
| what is being received | one; `Float32` and `BFloat16` keep another as their sum, that of the first model |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Bytes, Received
from pala.exchange.gossip.codecs import Change, Codec, Held, Packed, Part
from pala.exchange.gossip.driver import Models, Opened
from pala.exchange.gossip.messages import WITH_MODEL, Kind
from pala.exchange.wire import Format, Message, Refusal, Wire

_ALIGNMENT = 64  # bytes: a line of the cache, and torch's own


def _host_memory(num_bytes: int, pinned: bool) -> Tensor:
    """Return host memory, uint8 [num_bytes], aligned for every instruction.

    numpy asks for huge pages and torch does not: with them MPI copies a model from rank to rank in two thirds of the
    time, and new memory takes half as long to touch.
    """
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[begin : begin + num_bytes])


class SendBuffer:
    """One outgoing model: header and parameters in one block of (pinned) host memory.

    On a GPU the copy runs on a stream of its own: the learner continues at once, `ready` says when the block is whole.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._block = _host_memory(wire.most_bytes, pinned=device.type == "cuda")
        self._block[: wire.control_bytes].zero_()  # the gaps of the header travel too
        self.data: np.ndarray = self._block.numpy()  # as many bytes as the message has
        self._format = Format.FLOAT32
        self.change: Change | None = None  # of an offer: what its answer differs by
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self.pending = 0

    @property
    def held(self) -> Held:
        """The sent model as peers receive it, once it is ready."""
        return Held(self._format, self._block[self._wire.control_bytes : len(self.data)])

    def fill(self, message: Message, packed: Packed) -> None:
        """Take a snapshot of what a codec has packed, under this header."""
        self._format, self.change = packed.format, None
        size = self._wire.control_bytes + sum(piece.num_bytes for piece in packed.pieces)
        self.data = self._block.numpy()[:size]
        self._wire.encode(message._replace(format=packed.format), self.data)
        if self._stream is None:
            self._copy(packed)
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._copy(packed)
            self._copied = self._stream.record_event()
        current.wait_event(self._copied)  # neither the next update nor a new tensor in a piece's memory may overtake it

    def _copy(self, packed: Packed) -> None:
        begin = self._wire.control_bytes
        for piece in packed.pieces:
            values = piece.values.to(piece.dtype) if self._stream else piece.values  # a CPU casts as it copies
            end = begin + piece.num_bytes
            self._block[begin:end].view(piece.dtype).copy_(values, non_blocking=True)
            begin = end

    def ready(self) -> bool:
        """Return whether the snapshot is complete in host memory."""
        return self._copied is None or self._copied.query()


class ReceiveBuffer:
    """One incoming model, and by its codec the sum of those accepted since the last mix. In pinned memory if the
    parameters are on a GPU, whatever device the sender had."""

    def __init__(self, wire: Wire, codec: Codec, device: torch.device) -> None:
        self._num_bytes, self._pinned = wire.most_bytes, device.type == "cuda"
        self._control_bytes, self.codec = wire.control_bytes, codec
        self.give_up_block()

    @property
    def data(self) -> np.ndarray:
        """Memory for the next model to be received."""
        return self._block.numpy()

    def take_in(self, received: np.ndarray) -> None:
        """Copy what a transport has received into memory of its own."""
        if received.ctypes.data != self.data.ctypes.data:
            self.data[: len(received)] = received

    def give_up_block(self) -> None:
        """Leave the block to the model that is being received into it, which comes too late, and take another."""
        self._block = _host_memory(self._num_bytes, self._pinned)

    def check(self, message: Message, num_bytes: int) -> Refusal | None:
        """Refuse what no model can hold in the block's first `num_bytes`, which were decoded to this message."""
        return self.codec.stage(message.format, self._block[self._control_bytes : num_bytes])

    def add(self, weight: float) -> None:
        """Add the checked model to the weighted sum."""
        block = self.codec.add(self._block, weight)
        if block is None:
            self.give_up_block()
        else:
            self._block = block


class TensorModels(Models):
    """A rank's flat parameters."""

    def __init__(self, parameters: Tensor, codec: Codec, wire: Wire) -> None:
        """`parameters`: mixed in place."""
        self._parameters = parameters
        self._codec = codec
        self._wire = wire
        self._incoming = ReceiveBuffer(wire, codec, parameters.device)
        self._opened: Message | None = None
        self._parts: dict[int, Part] = {}  # that the offers in the inbox hold, by their senders

    def new_snapshot(self) -> SendBuffer:
        return SendBuffer(self._wire, self._parameters.device)

    def fill(self, snapshot: SendBuffer, message: Message, whole: bool) -> int:
        snapshot.fill(message, self._codec.pack(self._parameters, whole))
        return len(snapshot.data)

    def fill_answer(self, snapshot: SendBuffer, message: Message, peer: int) -> int:
        snapshot.fill(message, self._codec.pack_part(self._parameters, self._parts.pop(peer)))
        return len(snapshot.data)

    def control(self, message: Message) -> Bytes:
        return Bytes(self._wire.encoded(message))

    def open(self, received: Received, offer: SendBuffer | None = None) -> Opened:
        message = self._wire.decode_from(received.source, received.data)
        if isinstance(message, Refusal):
            return Opened(None, message)
        if message.kind not in WITH_MODEL or received.too_late:
            return Opened(message)
        if not received.bulk:
            return Opened(None, Refusal("it is a model, but was not sent as one"))
        self._incoming.take_in(received.data)
        self._opened, refusal = message, self._incoming.check(message, len(received.data))
        if refusal is None and message.kind is Kind.ANSWER and offer is not None:
            refusal = self._codec.check_answer(offer.held)
        return Opened(message, refusal)

    def add(self, weight: float) -> None:
        if self._opened is not None and self._opened.kind is Kind.OFFER:
            self._parts[self._opened.sender] = self._codec.staged_part()
        self._incoming.add(weight)

    def clear(self) -> None:
        self._parts.clear()
        self._codec.clear()

    def mix(self, own_weight: float, measure: bool) -> Tensor | None:
        return self._codec.mix(self._parameters, own_weight, measure)

    def pull(self, fraction: float, measure: bool) -> Tensor | None:
        return self._codec.pull(self._parameters, fraction, measure)

    def keep(self, offer: SendBuffer) -> None:
        offer.change = self._codec.difference(offer.held, in_place=offer.pending == 0)

    def move(self, offer: SendBuffer, fraction: float) -> None:
        assert offer.change is not None, "an offer moves this rank's model only when it was answered"
        self._codec.move(self._parameters, offer.change, fraction)
        offer.change = None

    def heal(self) -> None:
        self._parts.clear()
        self._codec.heal(self._parameters)

    def memory_for(self, num_bytes: int) -> np.ndarray | None:
        block = self._incoming.data
        return block[:num_bytes] if num_bytes <= len(block) else None

    def give_up_memory(self) -> None:
        self._incoming.give_up_block()
