"""A message's header to bytes and back: a fixed header, everyone's step counters, raw parameters. Never pickle.

| bytes | content |
|---|---|
| 0-63 | little endian: magic `PALA`, version, kind, format, stop, sender, ranks, round, signature, weight, size |
| 64-... | local steps of every rank, uint64, padded to a multiple of 64 bytes |
| then | of some kinds: parameters or arrays, in the header's format |

Formats: FLOAT32 and BFLOAT16 hold every parameter; TOP_K holds int32 indices, rising, then as many float32 values
(`gossip/codecs.py`); ARRAYS hold steps of environments (`pala/gorila/`).

What kinds of messages there are is the exchange's own: `gossip/messages.py`, `pala/gorila/messages.py`.

The signature is a hash of the names and shapes of the network's parameters, and of the buffers of a user's own network:
models of another network are refused.
`decode` believes nothing: any bytes give a `Message` or a `Refusal` with a sentence.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from pala.exchange.budget import Stop

_MAGIC, _VERSION = b"PALA", 2
_HEADER = struct.Struct("<4sHBBBxxxIIQQdQ")
_ALIGNMENT = 64
_MOST_STEPS = 1 << 48  # more than a budget may have; beyond, the sum over ranks could wrap around
assert _HEADER.size <= _ALIGNMENT


class Format(enum.IntEnum):
    """Format of the bytes behind the counters. Messages without any are marked FLOAT32."""

    FLOAT32 = 1
    BFLOAT16 = 2
    TOP_K = 3
    ARRAYS = 4

    @property
    def is_whole(self) -> bool:
        """False of a format that may hold a part of a model only."""
        return self is not Format.TOP_K


class Message(NamedTuple):
    """A decoded message without its parameters, which stay in the buffer."""

    kind: enum.IntEnum
    sender: int
    round: int  # of its sender; of an offer its number, which the reply to it repeats
    weight: float  # push-sum's; of an answer the fraction to move by
    stop: Stop
    steps_by_rank: np.ndarray  # uint64 [ranks]
    format: Format = Format.FLOAT32


class Refusal(NamedTuple):
    """The reason why some bytes are not a message."""

    reason: str


NOT_FINITE = Refusal("it holds NaN or infinity")

Sizes = Mapping[Format, range]
KindT = TypeVar("KindT", bound=enum.IntEnum)
NOTHING: Sizes = {Format.FLOAT32: range(1)}  # behind the counters


class Wire:
    """Encoder and decoder of one run's messages, for its number of ranks and parameters, its network and its kinds."""

    def __init__(self, num_ranks: int, num_parameters: int, signature: int, sizes: Mapping[KindT, Sizes]) -> None:
        """`sizes`: bytes that a message of each allowed kind and format may have behind the counters."""
        self.num_ranks = num_ranks
        self.num_parameters = num_parameters
        self.signature = signature
        self._sizes: Mapping[int, tuple[enum.IntEnum, Sizes]] = {int(kind): (kind, of) for kind, of in sizes.items()}
        counters = 8 * num_ranks
        self.control_bytes = _ALIGNMENT + -(-counters // _ALIGNMENT) * _ALIGNMENT
        most = max(allowed[-1] for formats in sizes.values() for allowed in formats.values())
        self.most_bytes = self.control_bytes + most  # of any message

    def encode(self, message: Message, into: np.ndarray) -> None:
        """Write header and counters to the first `control_bytes` of a uint8 buffer."""
        _HEADER.pack_into(
            into.data, 0, _MAGIC, _VERSION, message.kind, message.format, message.stop, message.sender, self.num_ranks,
            message.round, self.signature, message.weight, self.num_parameters,
        )  # fmt: skip
        into[_ALIGNMENT : _ALIGNMENT + 8 * self.num_ranks] = message.steps_by_rank.astype("<u8", copy=False).view(
            np.uint8
        )

    def encoded(self, message: Message) -> np.ndarray:
        """Return a message with nothing behind the counters, in memory of its own: uint8 [control_bytes]."""
        data = np.zeros(self.control_bytes, np.uint8)
        self.encode(message, data)
        return data

    def decode(self, data: np.ndarray) -> Message | Refusal:
        """Decode any uint8 bytes to a Message or a Refusal, without a look at what is behind the counters."""
        if len(data) < self.control_bytes:
            return Refusal(f"it has {len(data)} bytes, fewer than a header")
        magic, version, kind, format_, stop, sender, ranks, round_, signature, weight, parameters = _HEADER.unpack_from(
            data[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC or version != _VERSION:
            return Refusal(f"it begins with {magic!r} version {version}")
        if kind not in self._sizes or stop not in set(Stop):
            return Refusal(f"its kind is {kind} and its stop {stop}")
        if ranks != self.num_ranks or sender >= ranks:
            return Refusal(f"it comes from rank {sender} of {ranks}, not of {self.num_ranks}")
        if signature != self.signature or parameters != self.num_parameters:
            return Refusal(f"it is of another network ({parameters} parameters, not {self.num_parameters})")
        known_kind, sizes = self._sizes[kind]
        if format_ not in sizes:
            return Refusal(f"its format is {format_}, which this run does not use")
        if len(data) - self.control_bytes not in sizes[Format(format_)]:
            return Refusal(f"it has {len(data)} bytes, which is wrong for its kind")
        if not (math.isfinite(weight) and 0 < weight <= ranks * (1 + 1e-9)):
            return Refusal(f"its weight is {weight}")
        counters = data[_ALIGNMENT : _ALIGNMENT + 8 * ranks].tobytes()
        steps_by_rank = np.frombuffer(counters, "<u8").astype(np.uint64, copy=False)
        if (most := int(steps_by_rank.max())) > _MOST_STEPS:
            return Refusal(f"it says that a rank made {most} steps")
        return Message(known_kind, sender, round_, weight, Stop(stop), steps_by_rank, Format(format_))

    def decode_from(self, source: int, data: np.ndarray) -> Message | Refusal:
        """Decode bytes that came from this rank, which they must name as their sender."""
        message = self.decode(data)
        if isinstance(message, Message) and message.sender != source:
            return Refusal(f"it says it comes from rank {message.sender}")
        return message
