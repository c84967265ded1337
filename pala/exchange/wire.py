"""A message's header to bytes and back: a fixed header, everyone's step counters, raw parameters. Never pickle.

| bytes | content |
|---|---|
| 0-63 | little endian: magic `PALA`, version, kind, format, stop, sender, ranks, round, signature, weight, size |
| 64-... | local steps of every rank, uint64, padded to a multiple of 64 bytes |
| then | parameters in the header's format (kind MODEL only; see `payload.py`) |

Formats: FLOAT32 and BFLOAT16 hold every parameter; TOP_K holds int32 indices, rising, then as many float32 values.

The signature is a hash of the network's parameter names and shapes, so that models of another network are refused.
`decode` believes nothing: any bytes give a `Message` or a `Refusal` with a sentence.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pala.exchange.protocol import Stop

_MAGIC, _VERSION = b"PALA", 1
_HEADER = struct.Struct("<4sHBBBxxxIIQQdQ")
_ALIGNMENT = 64
_MOST_STEPS = 1 << 48  # more than anybody's budget; beyond, the sum over ranks could wrap around
assert _HEADER.size <= _ALIGNMENT


class Kind(enum.IntEnum):
    """What a message is for."""

    MODEL = 1
    CREDIT = 2  # the receiver's process lock is free again
    STOP = 3  # training ends
    ASK_WHOLE = 4  # a credit for a part of a model, from a rank that only a whole one can heal


class Format(enum.IntEnum):
    """What the bytes behind the counters hold. Messages without any are marked FLOAT32."""

    FLOAT32 = 1
    BFLOAT16 = 2
    TOP_K = 3  # a part of a model


class Message(NamedTuple):
    """A decoded message but for its parameters, which stay in the buffer."""

    kind: Kind
    sender: int
    round: int
    weight: float
    stop: Stop
    local_steps: np.ndarray  # uint64 [ranks]
    format: Format = Format.FLOAT32


class Refusal(NamedTuple):
    """Why some bytes are not a message."""

    reason: str


_WITHOUT_PARAMETERS = {Format.FLOAT32: range(1)}


class Wire:
    """The messages of one run: so many ranks, so many parameters, this network, these formats."""

    def __init__(self, num_ranks: int, num_parameters: int, signature: int, sizes: Mapping[Format, range]) -> None:
        """`sizes`: bytes that a model of each allowed format may have behind the counters."""
        self.num_ranks, self.num_parameters, self.signature = num_ranks, num_parameters, signature
        self._sizes = sizes
        counters = 8 * num_ranks
        self.control_bytes = _ALIGNMENT + -(-counters // _ALIGNMENT) * _ALIGNMENT
        self.model_bytes = self.control_bytes + max(allowed[-1] for allowed in sizes.values())  # the largest model

    def encode(self, message: Message, into: np.ndarray) -> None:
        """Write header and counters to the first `control_bytes` of a uint8 buffer."""
        _HEADER.pack_into(
            into.data, 0, _MAGIC, _VERSION, message.kind, message.format, message.stop, message.sender, self.num_ranks,
            message.round, self.signature, message.weight, self.num_parameters,
        )  # fmt: skip
        into[_ALIGNMENT : _ALIGNMENT + 8 * self.num_ranks] = message.local_steps.astype("<u8").view(np.uint8)

    def decode(self, data: np.ndarray) -> Message | Refusal:
        """Any uint8 bytes to a Message or a Refusal; the parameters are looked at by `ReceiveBuffer.check`."""
        if len(data) < self.control_bytes:
            return Refusal(f"it has {len(data)} bytes, fewer than a header")
        magic, version, kind, format_, stop, sender, ranks, round_, signature, weight, parameters = _HEADER.unpack_from(
            data[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC or version != _VERSION:
            return Refusal(f"it begins with {magic!r} version {version}")
        if kind not in set(Kind) or stop not in set(Stop):
            return Refusal(f"its kind is {kind} and its stop {stop}")
        if ranks != self.num_ranks or sender >= ranks:
            return Refusal(f"it comes from rank {sender} of {ranks}, not of {self.num_ranks}")
        if signature != self.signature or parameters != self.num_parameters:
            return Refusal(f"it is of another network ({parameters} parameters, not {self.num_parameters})")
        sizes = self._sizes if kind == Kind.MODEL else _WITHOUT_PARAMETERS
        if format_ not in sizes:
            return Refusal(f"its format is {format_}, which this run does not use")
        if len(data) - self.control_bytes not in sizes[Format(format_)]:
            return Refusal(f"it has {len(data)} bytes, which is wrong for its kind")
        if not (math.isfinite(weight) and 0 < weight <= ranks * (1 + 1e-9)):
            return Refusal(f"its weight is {weight}")
        counters = data[_ALIGNMENT : _ALIGNMENT + 8 * ranks].tobytes()
        local_steps = np.frombuffer(counters, "<u8").astype(np.uint64)
        if (most := int(local_steps.max())) > _MOST_STEPS:
            return Refusal(f"it says that a rank made {most} steps")
        return Message(Kind(kind), sender, round_, weight, Stop(stop), local_steps, Format(format_))
