"""A model to bytes and back: a fixed header, everyone's step counters, raw parameters. Never pickle.

| bytes | content |
|---|---|
| 0-63 | header, little endian: magic `PALA`, version, kind, dtype, stop, sender, ranks, round, signature, weight, size|
| 64-... | local steps of every rank, uint64, padded to a multiple of 64 bytes |
| then | parameters, float32 (kind MODEL only) |

The signature is a hash of the network's parameter names and shapes, so that models of another network are refused.
`decode` believes nothing: any bytes give a `Message` or a `Refusal` with a sentence.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pala.exchange.protocol import Stop

_MAGIC, _VERSION, _FLOAT32 = b"PALA", 1, 1
_HEADER = struct.Struct("<4sHBBBxxxIIQQdQ")
_ALIGNMENT = 64
assert _HEADER.size <= _ALIGNMENT


class Kind(enum.IntEnum):
    """What a message is for."""

    MODEL = 1
    CREDIT = 2  # the receiver's process lock is free again
    STOP = 3  # training ends


class Message(NamedTuple):
    """A decoded message but for its parameters, which stay in the buffer."""

    kind: Kind
    sender: int
    round: int
    weight: float
    stop: Stop
    local_steps: np.ndarray  # uint64 [ranks]


class Refusal(NamedTuple):
    """Why some bytes are not a message."""

    reason: str


class Wire:
    """The message format of one run: so many ranks, so many parameters, this network."""

    def __init__(self, num_ranks: int, num_parameters: int, signature: int) -> None:
        self.num_ranks, self.num_parameters, self.signature = num_ranks, num_parameters, signature
        counters = 8 * num_ranks
        self.control_bytes = _ALIGNMENT + -(-counters // _ALIGNMENT) * _ALIGNMENT
        self.model_bytes = self.control_bytes + 4 * num_parameters

    def encode(self, message: Message, into: np.ndarray) -> None:
        """Write header and counters to the first `control_bytes` of a uint8 buffer."""
        _HEADER.pack_into(
            into.data, 0, _MAGIC, _VERSION, message.kind, _FLOAT32, message.stop, message.sender, self.num_ranks,
            message.round, self.signature, message.weight, self.num_parameters,
        )  # fmt: skip
        into[_ALIGNMENT : _ALIGNMENT + 8 * self.num_ranks] = message.local_steps.astype("<u8").view(np.uint8)

    def decode(self, data: np.ndarray) -> Message | Refusal:
        """Any uint8 bytes to a Message or a Refusal; the parameters are looked at by `ReceiveBuffer.accept`."""
        if len(data) < self.control_bytes:
            return Refusal(f"it has {len(data)} bytes, fewer than a header")
        magic, version, kind, dtype, stop, sender, ranks, round_, signature, weight, parameters = _HEADER.unpack_from(
            data[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC or version != _VERSION or dtype != _FLOAT32:
            return Refusal(f"its format is {magic!r} version {version} dtype {dtype}")
        if kind not in set(Kind) or stop not in set(Stop):
            return Refusal(f"its kind is {kind} and its stop {stop}")
        if ranks != self.num_ranks or sender >= ranks:
            return Refusal(f"it comes from rank {sender} of {ranks}, not of {self.num_ranks}")
        if signature != self.signature or parameters != self.num_parameters:
            return Refusal(f"it is of another network ({parameters} parameters, not {self.num_parameters})")
        if len(data) != (self.model_bytes if kind == Kind.MODEL else self.control_bytes):
            return Refusal(f"it has {len(data)} bytes, which is wrong for its kind")
        if not (math.isfinite(weight) and 0 < weight <= ranks * (1 + 1e-9)):
            return Refusal(f"its weight is {weight}")
        counters = data[_ALIGNMENT : _ALIGNMENT + 8 * ranks].tobytes()
        return Message(Kind(kind), sender, round_, weight, Stop(stop), np.frombuffer(counters, "<u8").astype(np.uint64))


class SendBuffer:
    """One outgoing model: header and parameters in one block of (pinned) host memory.

    On a GPU the copy runs on a stream of its own: the learner goes on at once, `ready` says when the block is whole.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._block = torch.empty(wire.model_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.bytes: np.ndarray = self._block.numpy()
        self._payload = self._block[wire.control_bytes :].view(torch.float32)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self.pending = 0  # copies not yet sent

    def fill(self, message: Message, parameters: Tensor) -> None:
        """Take a snapshot of the parameters under this header."""
        self._wire.encode(message, self.bytes)
        if self._stream is None:
            self._payload.copy_(parameters)
            return
        current = torch.cuda.current_stream(parameters.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._payload.copy_(parameters, non_blocking=True)
            self._copied = self._stream.record_event()
        current.wait_event(self._copied)  # the next update must not overtake the snapshot

    def ready(self) -> bool:
        """True when the snapshot is complete in host memory."""
        return self._copied is None or self._copied.query()


class ReceiveBuffer:
    """One incoming model, and the weighted sum of those accepted since the last mix.

    The sum keeps memory independent of the number of ranks. The first model since a mix is not added but becomes the
    sum, by swapping places with the used-up one. On a GPU, staging is pinned and the sum lives on the receiver's own
    device, whatever device the sender had.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._control_bytes = wire.control_bytes
        blocks = [torch.empty(wire.model_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(1 if cuda else 2)]
        self._block, self._spare = blocks[0], blocks[-1]
        self._stream = torch.cuda.Stream(device) if cuda else None
        payloads = [block[wire.control_bytes :].view(torch.float32) for block in blocks]
        on_device = [torch.empty(wire.num_parameters, device=device) for _ in range(2)] if cuda else payloads
        self._staged, self._sum = on_device  # what came last; scale * sum is the weighted sum
        self._scale, self._total_weight = 1.0, 0.0

    @property
    def bytes(self) -> np.ndarray:
        """Where the next model is to be received."""
        return self._block.numpy()

    def check(self) -> Refusal | None:
        """Refuse parameters with NaN or infinity. One pass: a sum is finite only if every term is, or overflows."""
        if self._stream is None:
            return self._check()
        with torch.cuda.stream(self._stream):
            self._staged.copy_(self._block[self._control_bytes :].view(torch.float32), non_blocking=True)
            return self._check()  # reads the result, and so waits for this stream alone

    def _check(self) -> Refusal | None:
        if math.isfinite(float(self._staged.sum())) or bool(self._staged.isfinite().all()):
            return None
        return Refusal("it holds NaN or infinity")

    def add(self, weight: float) -> None:
        """Add the checked model to the weighted sum."""
        if self._total_weight == 0:
            self._staged, self._sum = self._sum, self._staged
            self._block, self._spare = self._spare, self._block
            self._scale = weight
        elif self._stream is None:
            self._add(weight)
        else:
            with torch.cuda.stream(self._stream):
                self._add(weight)
        self._total_weight += weight

    def _add(self, weight: float) -> None:
        self._sum.mul_(self._scale).add_(self._staged, alpha=weight)
        self._scale = 1.0

    def mix_into(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        """parameters <- (1 - fraction) parameters + fraction * mean, in place; empties the sum.

        If `measure`, returns the distance |mean - parameters| before the mix (L2, scalar, on the device).
        """
        if self._stream is not None:
            torch.cuda.current_stream(parameters.device).wait_stream(self._stream)
        if self._scale != self._total_weight:  # more than one model
            self._sum.mul_(self._scale / self._total_weight)
        distance = (self._sum - parameters).norm() if measure else None
        if fraction == 1.0:  # lerp would keep the NaN of a rank that is to be healed
            parameters.copy_(self._sum)
        else:
            parameters.lerp_(self._sum, fraction)
        self._total_weight = 0.0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(parameters.device))
        return distance
