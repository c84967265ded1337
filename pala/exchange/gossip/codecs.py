"""Codecs: models from parameters to bytes and back, and into the average of the received ones.

One class a value of `exchange.compression`, used by every rank of a run alike. A codec knows weights, but not the rule
that gives them (`MixingRule`), and no message. What came from others is checked and summed where it was received,
on the host, also if the parameters are on a GPU: there it was no faster. The memory of whole messages is in
`models.py`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pala.config import ExchangeConfig
from pala.exchange.flat import is_finite
from pala.exchange.wire import NOT_FINITE, Format, Refusal
from pala.system.blocks import in_blocks

_SAMPLE = 16384
_TINY = torch.finfo(torch.float32).tiny


class Piece(NamedTuple):
    """Numbers, and the data type that they are cast to as they are copied."""

    values: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes after the cast to `dtype`."""
        return self.values.numel() * self.dtype.itemsize


class Packed(NamedTuple):
    """A model as it travels: these pieces one behind the other."""

    format: Format
    pieces: tuple[Piece, ...]


class Held(NamedTuple):
    """A model as it was sent: the bytes behind the header, on the host."""

    format: Format
    data: Tensor


Part = Tensor | None
"""Indices of parameters, integers [K], rising; None: all P of them."""


class Change(NamedTuple):
    """By how much some parameters differ; on the host."""

    part: Part
    values: Tensor  # [K], or [P]
    exact: Tensor | None = None  # of `_ExactTail`, behind the P that its codec knows: the answer's, no difference


class Codec(abc.ABC):
    """Codec of one rank: packs what it sends of its models, and sums what it received since its last mix.

    Memory does not grow with the number of ranks: what comes is staged, checked and added to one sum. The transport's
    thread stages while the learner's packs or mixes; whoever adds, mixes, heals or clears holds the driver's lock.

    `parameters`: float32 [P], flat, on the learner's device, changed in place. `received` and `Held.data`: uint8, the
    bytes behind the header, on the host. Weights: push-sum's, above 0; 1 with any other mixing.
    """

    sizes: dict[Format, range]  # bytes behind the header of each format that may come
    whole_every = 1  # of this number of sends, one carries a whole model

    @abc.abstractmethod
    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        """Return what is to be sent of these parameters now. `whole`: all of them."""

    @abc.abstractmethod
    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        """Take up the bytes of a model, whose number fits the format, or refuse what they say."""

    @abc.abstractmethod
    def add(self, block: Tensor, weight: float) -> Tensor | None:
        """Add the staged model, which lies in `block`. Returns the block to receive the next one into: often the same;
        None if the codec keeps this one as its sum and has none to give back."""

    @abc.abstractmethod
    def mix(self, parameters: Tensor, own_weight: float, measure: bool = True) -> Tensor | None:
        """Mix, parameters <- (own_weight parameters + weighted sum) / (own_weight + weights), in place; empty the sum.

        If `measure`, returns the distance |mean of what came - parameters| before (L2, scalar, on their device).
        """

    @abc.abstractmethod
    def pull(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        """Move by parameters <- parameters + fraction (sum over the models m that were added, each with weight 1, of m
        - parameters), in place; empty the sum. Measures as `mix`."""

    @abc.abstractmethod
    def staged_part(self) -> Part:
        """Return which parameters the staged model holds; valid as long as wanted."""

    @abc.abstractmethod
    def pack_part(self, parameters: Tensor, part: Part) -> Packed:
        """Return these parameters of this rank's model: the answer to an offer."""

    @abc.abstractmethod
    def check_answer(self, offer: Held) -> Refusal | None:
        """Refuse the staged model if it does not hold the parameters that the offer held."""

    @abc.abstractmethod
    def difference(self, offer: Held, in_place: bool) -> Change:
        """Return the staged answer without the offer. `in_place`: it may lie where the offer did."""

    def move(self, parameters: Tensor, change: Change, fraction: float) -> None:
        """Move by parameters <- parameters + fraction change, in place."""
        part, values = change.part, change.values.to(parameters.device)
        if part is None:
            parameters.add_(values, alpha=fraction)
        else:
            parameters.index_add_(0, part.to(parameters.device), values, alpha=fraction)

    @abc.abstractmethod
    def heal(self, parameters: Tensor) -> None:
        """Heal, parameters <- weighted mean of what came, with at least one whole model; empty the sum."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget what was added."""


class Float32(Codec):
    """`none`: every parameter as it is.

    The first model since a mix is not added but becomes the sum, and the block of the used-up one is given back.
    """

    format, dtype = Format.FLOAT32, torch.float32

    def __init__(self, parameters: Tensor) -> None:
        size = parameters.numel() * self.dtype.itemsize
        self.sizes = {self.format: range(size, size + 1)}
        self._staged, self._sum = (torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(2))
        self._kept: Tensor | None = None  # the block in which the sum lies, or the last one did
        self._scale, self._total_weight = 1.0, 0.0  # scale * sum is the weighted sum

    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        return Packed(self.format, (Piece(parameters, self.dtype),))

    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        """Check in one pass: a sum is finite only if every term is, or overflows."""
        self._staged = received.view(self.dtype)
        return None if is_finite(self._staged) else NOT_FINITE

    def add(self, block: Tensor, weight: float) -> Tensor | None:
        is_first = self._total_weight == 0
        self._total_weight += weight
        if is_first:
            self._sum, self._scale = self._staged, weight
            given_back, self._kept = self._kept, block
            return given_back
        self._sum = self._sum.to(torch.float32)
        if self._scale != 1.0:
            self._sum.mul_(self._scale)
        for total, staged in in_blocks(self._sum, self._staged):  # of unlike types a CPU casts all at once
            total.add_(staged, alpha=weight)
        self._scale = 1.0
        return block

    def mix(self, parameters: Tensor, own_weight: float, measure: bool = True) -> Tensor | None:
        fraction = self._total_weight / (own_weight + self._total_weight)
        return self._move(parameters, self._take_mean().to(parameters.device), fraction, measure)

    def pull(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        fraction *= self._total_weight
        return self._move(parameters, self._take_mean().to(parameters.device), fraction, measure)

    def staged_part(self) -> Part:
        return None

    def pack_part(self, parameters: Tensor, part: Part) -> Packed:
        return self.pack(parameters, whole=True)

    def check_answer(self, offer: Held) -> Refusal | None:
        return None

    def difference(self, offer: Held, in_place: bool) -> Change:
        offered = offer.data.view(self.dtype)
        return Change(None, torch.sub(self._staged, offered, out=offered if in_place else None))

    def heal(self, parameters: Tensor) -> None:
        parameters.copy_(self._take_mean())

    def _take_mean(self) -> Tensor:
        """Return the weighted mean of the models that came; the sum is empty from then on."""
        if self._scale != self._total_weight:  # more than one model
            self._sum.mul_(self._scale / self._total_weight)
        self._total_weight = 0.0
        return self._sum

    def _move(self, parameters: Tensor, mean: Tensor, fraction: float, measure: bool) -> Tensor | None:
        """Move by parameters <- (1 - fraction) parameters + fraction mean; may change `mean`."""
        if not measure:
            parameters.lerp_(mean, fraction)
            return None
        norms, difference = [], None
        for own, came in in_blocks(parameters, mean):  # new memory for all at once takes longer than the mix
            difference = torch.empty_like(own) if difference is None else difference[: len(own)]
            norms.append(torch.sub(came, own, out=difference).norm())
            own.lerp_(came, fraction)
        return torch.stack(norms).norm()

    def clear(self) -> None:
        self._total_weight = 0.0


class BFloat16(Float32):
    """`bfloat16`: every parameter rounded to 8 bits of precision (nearest, ties to even): half the bytes.

    The receiver rounds its own model too, for the difference only: x <- x + fraction (mean r(y) - r(x)). Why:
    docs/architecture.md, "Compression".
    """

    format, dtype = Format.BFLOAT16, torch.bfloat16
    _used: Tensor | None = None
    """Memory of the last difference that was moved by: new memory takes longer to touch than all else here."""

    def difference(self, offer: Held, in_place: bool) -> Change:
        """Subtract in float32, exact except for the smallest bits: the offer's place is too small for that."""
        offered = offer.data.view(self.dtype)
        differences, self._used = self._used, None
        if differences is None:
            differences = torch.empty_like(self._staged, dtype=torch.float32)
        for difference, staged, own in in_blocks(differences, self._staged, offered):
            difference.copy_(staged).sub_(own)
        return Change(None, differences)

    def move(self, parameters: Tensor, change: Change, fraction: float) -> None:
        super().move(parameters, change, fraction)
        self._used = change.values

    def _move(self, parameters: Tensor, mean: Tensor, fraction: float, measure: bool) -> Tensor | None:
        norms = []
        for own, came in in_blocks(parameters, mean):
            difference = came.to(torch.float32).sub_(own.to(self.dtype))
            own.add_(difference, alpha=fraction)
            if measure:
                norms.append(difference.norm())
        return torch.stack(norms).norm() if measure else None


class TopK(Codec):
    """`top_k`: the parameters that changed most since this rank last sent them, as int32 indices and float32 values.

    After parallel Sarsa (Grounds & Kudenko), whose learners tell each other the weights that changed most. There is one
    reference a rank, what it last sent of each parameter to anybody, so memory does not grow with the ranks. The
    receiver mixes each parameter with what came of it, and leaves the others.

    Every `whole_every`-th model is whole: a parameter that no longer changes would otherwise never reach the peers that
    missed it. A rank whose parameters are not finite is healed by a whole model only, and asks for it.

    Choosing is cheap and deterministic: the threshold is an order statistic of a fixed sample, aimed two standard
    deviations below the count allowed; what is still too many is cut off, at another place each time.
    """

    whole_every = 61

    def __init__(self, parameters: Tensor, fraction: float) -> None:
        """`parameters`: equal on all ranks, or a whole model of each will be on its way soon."""
        size = parameters.numel()
        self.most = math.ceil(fraction * size)
        self._always_whole = 8 * self.most >= 4 * size  # which is then shorter
        self.sizes = {Format.FLOAT32: range(4 * size, 4 * size + 1), Format.TOP_K: range(0, 8 * self.most + 1, 8)}
        if self._always_whole:
            del self.sizes[Format.TOP_K]
        self._reference, self._change = parameters.clone(), torch.empty_like(parameters)
        self._sample, self._place_in_sample = self._plan_sample(size, parameters.device)
        self._num_packed = 0
        self._sum, self._count = (
            torch.zeros(size, dtype=torch.float32, device="cpu", pin_memory=parameters.is_cuda) for _ in range(2)
        )
        self._indices: Tensor | None = None  # of the staged values; None: all
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def _plan_sample(self, size: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the indices of the sample, and which of its values, counted from the smallest, is the threshold."""
        if size <= _SAMPLE:
            return torch.arange(size, device=device), size - self.most + 1
        draw = torch.Generator("cpu").manual_seed(0)
        sample = torch.randint(size, (_SAMPLE,), generator=draw, device="cpu").sort().values
        expected = self.most * _SAMPLE / size
        return sample.to(device), _SAMPLE - max(1, int(expected - 2 * math.sqrt(expected))) + 1

    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        self._num_packed += 1
        if whole or self._always_whole:
            self._reference.copy_(parameters)
            return Packed(Format.FLOAT32, (Piece(parameters, torch.float32),))
        indices = self._choose(torch.sub(parameters, self._reference, out=self._change).abs_())
        values = parameters.index_select(0, indices)
        self._reference.index_copy_(0, indices, values)
        return _some(indices, values)

    def _choose(self, change: Tensor) -> Tensor:
        """Return rising indices of at most `most` parameters that changed. NaN is always chosen: peers must refuse
        it."""
        threshold = float(change[self._sample].kthvalue(self._place_in_sample).values)
        threshold = math.inf if math.isnan(threshold) else max(threshold, _TINY)
        if change.is_cuda:
            indices = (change < threshold).logical_not_().nonzero().flatten()
        else:  # numpy is several times faster at this
            indices = torch.from_numpy(np.flatnonzero(~(change.numpy() < threshold)))
        if (excess := indices.numel() - self.most) > 0:
            begin = self._num_packed * 0x9E3779B1 % (excess + 1)
            indices = indices[begin : begin + self.most]
        return indices

    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        self._indices, self._values = self._read(format_, received)
        if self._indices is not None and not _rises_within(self._indices, self._sum.numel()):
            return Refusal("its indices do not rise, or name parameters that do not exist")
        return None if is_finite(self._values) else NOT_FINITE

    def _read(self, format_: Format, data: Tensor) -> tuple[Part, Tensor]:
        """Return (indices, values) as views of `data`."""
        if format_ is Format.FLOAT32:
            return None, data.view(torch.float32)
        half = data.numel() // 2
        return data[:half].view(torch.int32), data[half:].view(torch.float32)

    def add(self, block: Tensor, weight: float) -> Tensor | None:
        if self._indices is None:
            self._sum.add_(self._values, alpha=weight)
            self._count.add_(weight)
        else:
            self._sum.index_add_(0, self._indices, self._values, alpha=weight)
            self._count.index_add_(0, self._indices, torch.full_like(self._values, weight))
        return block

    def mix(self, parameters: Tensor, own_weight: float, measure: bool = True) -> Tensor | None:
        """Mix each parameter with what came of it; the distance is over the parameters that came."""
        sums, counts = self._sum.to(parameters.device), self._count.to(parameters.device)
        distance = None
        if measure:
            distance = self._distance(self._sum_of_differences(parameters, sums, counts), counts)
        if own_weight != 1.0:
            parameters.mul_(own_weight)
        parameters.add_(sums).div_(counts.add_(own_weight))
        self.clear()
        return distance

    def pull(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        """Move each parameter by what came of it."""
        sums, counts = self._sum.to(parameters.device), self._count.to(parameters.device)
        change = self._sum_of_differences(parameters, sums, counts)
        parameters.add_(change, alpha=fraction)
        distance = self._distance(change, counts) if measure else None
        self.clear()
        return distance

    def _sum_of_differences(self, parameters: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
        """Return by how much what came of each parameter differs from it."""
        return torch.addcmul(sums, counts, parameters, value=-1, out=self._change)

    def _distance(self, sum_of_differences: Tensor, counts: Tensor) -> Tensor:
        """Return the distance from the parameters to the mean of what came of each."""
        return sum_of_differences.div_(torch.where(counts > 0, counts, 1.0)).norm()

    def staged_part(self) -> Part:
        return None if self._indices is None else self._indices.clone()

    def pack_part(self, parameters: Tensor, part: Part) -> Packed:
        """Leave the reference as it is: it is for what a rank tells of its own accord."""
        if part is None:
            return Packed(Format.FLOAT32, (Piece(parameters, torch.float32),))
        return _some(part, parameters.index_select(0, part.to(parameters.device)))

    def check_answer(self, offer: Held) -> Refusal | None:
        offered, staged = self._read(*offer)[0], self._indices
        if (offered is None) == (staged is None) and (offered is None or staged is None or offered.equal(staged)):
            return None
        return Refusal("it holds other parameters than the offer that it answers")

    def difference(self, offer: Held, in_place: bool) -> Change:
        part, values = self._read(*offer)
        return Change(part, self._values - values)

    def heal(self, parameters: Tensor) -> None:
        parameters.copy_(self._sum.div_(self._count))
        self.clear()

    def clear(self) -> None:
        self._sum.zero_()
        self._count.zero_()


class _ExactTail(Codec):
    """Another codec, except for the last `count` parameters: running moments, which rounding would spoil.

    A mean of 1,000 with a deviation of 1, rounded to 8 bits, is off by two deviations; and of parameters that are sent
    when they have changed, a count of samples would always be sent, a mean in small units never. So these travel whole,
    as float32, before what the other codec makes of the others. They are no part of the distance that is measured.

    An answer moves them towards itself, not by its difference to the offer: a variance that decays meanwhile could go
    below 0. So their mean over the ranks is not kept.
    """

    def __init__(self, codec: Codec, parameters: Tensor, count: int) -> None:
        """`codec`: made for the other parameters."""
        self._codec, self._exact = codec, Float32(parameters[-count:])
        self._first, self._bytes = parameters.numel() - count, 4 * count
        self._block = self._new_block()  # of the exact ones
        self.whole_every = codec.whole_every
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
        refusal = self._exact.stage(Format.FLOAT32, self._block.copy_(received[: self._bytes]))
        return refusal or self._codec.stage(format_, received[self._bytes :])

    def add(self, block: Tensor, weight: float) -> Tensor | None:
        given_back = self._exact.add(self._block, weight)
        self._block = self._new_block() if given_back is None else given_back
        return self._codec.add(block, weight)

    def _new_block(self) -> Tensor:
        return torch.empty(self._bytes, dtype=torch.uint8, device="cpu")

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
        exact = self._block.view(torch.float32).clone()
        return self._codec.difference(self._without_exact(offer), in_place)._replace(exact=exact)

    def move(self, parameters: Tensor, change: Change, fraction: float) -> None:
        assert change.exact is not None
        self._codec.move(parameters[: self._first], change, fraction)
        parameters[self._first :].lerp_(change.exact.to(parameters.device), fraction)

    def _without_exact(self, held: Held) -> Held:
        return Held(held.format, held.data[self._bytes :])

    def heal(self, parameters: Tensor) -> None:
        self._exact.heal(parameters[self._first :])
        self._codec.heal(parameters[: self._first])

    def clear(self) -> None:
        self._exact.clear()
        self._codec.clear()


CODECS: Mapping[str, Callable[[ExchangeConfig, Tensor], Codec]] = {
    "none": lambda config, parameters: Float32(parameters),
    "bfloat16": lambda config, parameters: BFloat16(parameters),
    "top_k": lambda config, parameters: TopK(parameters, config.top_k_fraction),
}
"""By the names of `exchange.compression`."""


def make_codec(config: ExchangeConfig, parameters: Tensor, num_exact: int = 0) -> Codec:
    """Return the codec that the configuration names for these parameters (flat float32), of which the last `num_exact`
    are exact, whatever becomes of the others."""
    make = CODECS[config.compression]
    if num_exact == 0:
        return make(config, parameters)
    return _ExactTail(make(config, parameters[:-num_exact]), parameters, num_exact)


def _some(indices: Tensor, values: Tensor) -> Packed:
    """Return some parameters of a model, as they travel."""
    return Packed(Format.TOP_K, (Piece(indices, torch.int32), Piece(values, torch.float32)))


def _rises_within(indices: Tensor, size: int) -> bool:
    """Return whether 0 <= first < second < ... < size."""
    if indices.numel() == 0:
        return True
    within = int(indices[0]) >= 0 and int(indices[-1]) < size
    return within and bool((indices[1:] > indices[:-1]).all())
