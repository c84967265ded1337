"""A message's header to bytes and back: a fixed header, everyone's step counters, raw parameters. Never pickle.

| bytes | content |
|---|---|
| 0-63 | little endian: magic `PALA`, version, kind, format, stop, sender, ranks, round, signature, weight, size |
| 64-... | local steps of every rank, uint64, padded to a multiple of 64 bytes |
| then | of some kinds: parameters or arrays, in the header's format |

Formats: FLOAT32 and BFLOAT16 hold every parameter; TOP_K holds int32 indices, rising, then as many float32 values
(`payload.py`); ARRAYS hold steps of environments (`pala/gorila/`).

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

from pala.exchange.budget import Stop

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
    GRADIENT = 5  # of a shard's slice, computed with the parameters of version `round`
    GRADIENT_AND_FETCH = 6  # the same, to be answered by PARAMETERS
    FETCH = 7  # asks a shard for PARAMETERS
    PARAMETERS = 8  # a shard's slice, of version `round`
    FETCH_TARGET = 9  # asks a shard for TARGET
    TARGET = 10  # a shard's slice of the target network, the `round`-th
    RESET = 11  # the first frames of an actor's environments
    EXPERIENCE = 12  # one step of an actor's environments
    SAMPLE = 13  # asks for BATCH
    BATCH = 14  # a minibatch of transitions


class Format(enum.IntEnum):
    """What the bytes behind the counters hold. Messages without any are marked FLOAT32."""

    FLOAT32 = 1
    BFLOAT16 = 2
    TOP_K = 3  # a part of a model
    ARRAYS = 4


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


Sizes = Mapping[Format, range]
NOTHING: Sizes = {Format.FLOAT32: range(1)}  # behind the counters


def gossip_sizes(model: Sizes) -> dict[Kind, Sizes]:
    """The messages of a run that gossips, whose models have these sizes."""
    return {Kind.MODEL: model, Kind.CREDIT: NOTHING, Kind.STOP: NOTHING, Kind.ASK_WHOLE: NOTHING}


class Wire:
    """The messages of one run: so many ranks, so many parameters, this network, these kinds."""

    def __init__(self, num_ranks: int, num_parameters: int, signature: int, sizes: Mapping[Kind, Sizes]) -> None:
        """`sizes`: bytes that a message of each allowed kind and format may have behind the counters."""
        self.num_ranks, self.num_parameters, self.signature = num_ranks, num_parameters, signature
        self._sizes = sizes
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
        into[_ALIGNMENT : _ALIGNMENT + 8 * self.num_ranks] = message.local_steps.astype("<u8").view(np.uint8)

    def decode(self, data: np.ndarray) -> Message | Refusal:
        """Any uint8 bytes to a Message or a Refusal; what is behind the counters is looked at by others."""
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
        sizes = self._sizes[kind]
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
