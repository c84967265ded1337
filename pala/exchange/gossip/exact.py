"""A codec that leaves the last few parameters exact: running moments, which rounding would spoil.

A mean of 1,000 with a deviation of 1, rounded to 8 bits, is off by two deviations; and of parameters that are sent
when they have changed, a count of samples would always be sent, a mean in small units never. So these travel whole, as
float32, before what another codec makes of the others. They are no part of the distance that is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pala.config import ExchangeConfig
from pala.exchange.gossip.codecs import Change, Codec, Float32, Held, Packed, Part, Piece, make_codec
from pala.exchange.wire import Format, Refusal


def make_codec_with_exact(config: ExchangeConfig, parameters: Tensor, count: int) -> Codec:
    """What the configuration names, for flat parameters of which the last `count` are to be exact."""
    if count == 0:
        return make_codec(config, parameters)
    return WithExact(make_codec(config, parameters[:-count]), parameters, count)


class WithExact(Codec):
    """`codec` for all parameters but the last `count`."""

    def __init__(self, codec: Codec, parameters: Tensor, count: int) -> None:
        """`codec`: made for the others."""
        self._codec, self._exact = codec, Float32(parameters[-count:], may_keep_block=False)
        self._first, self._bytes = parameters.numel() - count, 4 * count
        self._indices = torch.arange(self._first, parameters.numel(), dtype=torch.int32)
        self.whole_every, self.keeps_block = codec.whole_every, codec.keeps_block
        self.sizes = {
            format_: range(of.start + self._bytes, of.stop + self._bytes, of.step)
            for format_, of in codec.sizes.items()
        }

    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        return self._with_exact(self._codec.pack(parameters[: self._first], whole), parameters)

    def pack_part(self, parameters: Tensor, part: Part) -> Packed:
        return self._with_exact(self._codec.pack_part(parameters[: self._first], part), parameters)

    def _with_exact(self, packed: Packed, parameters: Tensor) -> Packed:
        exact = Piece(parameters[self._first :], torch.float32)
        return Packed(packed.format, (exact, *packed.pieces))  # first: aligned for float32

    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        refusal = self._exact.stage(Format.FLOAT32, received[: self._bytes])
        return refusal or self._codec.stage(format_, received[self._bytes :])

    def add(self, weight: float) -> bool:
        self._exact.add(weight)
        return self._codec.add(weight)

    def mix(self, parameters: Tensor, own_weight: float, measure: bool = True) -> Tensor | None:
        self._exact.mix(parameters[self._first :], own_weight, False)
        return self._codec.mix(parameters[: self._first], own_weight, measure)

    def pull(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        self._exact.pull(parameters[self._first :], fraction, False)
        return self._codec.pull(parameters[: self._first], fraction, measure)

    def staged_part(self) -> Part:
        return self._codec.staged_part()

    def check_answer(self, offer: Held) -> Refusal | None:
        return self._codec.check_answer(self._without_exact(offer))

    def difference(self, offer: Held, in_place: bool) -> Change:
        exact = self._exact.difference(Held(Format.FLOAT32, offer.data[: self._bytes]), False).values
        part, values = self._codec.difference(self._without_exact(offer), in_place)
        return Change(None if part is None else torch.cat([part, self._indices]), torch.cat([values, exact]))

    def _without_exact(self, held: Held) -> Held:
        return Held(held.format, held.data[self._bytes :])

    def heal(self, parameters: Tensor) -> None:
        self._exact.heal(parameters[self._first :])
        self._codec.heal(parameters[: self._first])

    def clear(self) -> None:
        self._exact.clear()
        self._codec.clear()
