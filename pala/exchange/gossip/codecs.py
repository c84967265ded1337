"""How models travel: from parameters to the bytes behind a message's header, and into the mix of those that came.

One class a value of `exchange.compression`, used by every rank of a run alike. `SendBuffer` and `ReceiveBuffer` own
the host memory and, on a GPU, the streams; a `Payload` does the arithmetic on the device that the parameters are on.
"""

from __future__ import annotations

import abc
import contextlib
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pala.config import ExchangeConfig
from pala.exchange.wire import Format, Message, Refusal, Wire

_NOT_FINITE = Refusal("it holds NaN or infinity")
_SAMPLE = 16384
_TINY = torch.finfo(torch.float32).tiny


class Packed(NamedTuple):
    """A model as it travels: these tensors one behind the other."""

    format: Format
    parts: tuple[Tensor, ...]


class Payload(abc.ABC):
    """What one rank sends of its models, and what has come from others since its last mix.

    Memory does not grow with the number of ranks: what comes is staged, checked and added to one sum. The data proxy's
    thread stages while the learner's packs or mixes; whoever adds, mixes or clears holds the exchange's lock.
    """

    sizes: dict[Format, range]  # bytes behind the header of each format that may come
    whole_every = 1  # every so many sends carry a whole model
    keeps_block = False  # the sum may lie in the block that a model was received into

    @abc.abstractmethod
    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        """What is to be sent of these parameters now. `whole`: all of them."""

    @abc.abstractmethod
    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        """Take up the bytes of a model, whose number fits the format, or refuse what they say."""

    @abc.abstractmethod
    def add(self, weight: float) -> bool:
        """Add the staged model; True if the block that it was received into is now the sum."""

    @abc.abstractmethod
    def mix_into(self, parameters: Tensor, fraction: float, measure: bool) -> Tensor | None:
        """As `ReceiveBuffer.mix_into`."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget what was added."""


class Float32(Payload):
    """`none`: every parameter as it is.

    The first model since a mix is not added but becomes the sum, by changing places with the used-up one.
    """

    format, dtype = Format.FLOAT32, torch.float32

    def __init__(self, parameters: Tensor) -> None:
        size = parameters.numel() * self.dtype.itemsize
        self.sizes = {self.format: range(size, size + 1)}
        self.keeps_block = self.dtype == parameters.dtype and not parameters.is_cuda
        own = 0 if self.keeps_block else parameters.numel()
        self._staged, self._sum = parameters.new_empty(own), parameters.new_empty(own)
        self._scale, self._total_weight = 1.0, 0.0  # scale * sum is the weighted sum

    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        return Packed(self.format, (parameters.to(self.dtype),))

    def stage(self, format_: Format, received: Tensor) -> Refusal | None:
        """One pass: a sum is finite only if every term is, or overflows."""
        values = received.view(self.dtype)
        if self.keeps_block:
            self._staged = values
        else:
            self._staged.copy_(values.to(self._staged.device, non_blocking=True))  # cast on the device
        return None if _is_finite(self._staged) else _NOT_FINITE

    def add(self, weight: float) -> bool:
        first = self._total_weight == 0
        if first:
            self._staged, self._sum = self._sum, self._staged
            self._scale = weight
        else:
            self._sum.mul_(self._scale).add_(self._staged, alpha=weight)
            self._scale = 1.0
        self._total_weight += weight
        return first and self.keeps_block

    def mix_into(self, parameters: Tensor, fraction: float, measure: bool) -> Tensor | None:
        if self._scale != self._total_weight:  # more than one model
            self._sum.mul_(self._scale / self._total_weight)
        self._total_weight = 0.0
        return self._mix_mean(parameters, fraction, measure)

    def _mix_mean(self, parameters: Tensor, fraction: float, measure: bool) -> Tensor | None:
        distance = (self._sum - parameters).norm() if measure else None
        if fraction == 1.0:  # lerp would keep the NaN of a rank that is to be healed
            parameters.copy_(self._sum)
        else:
            parameters.lerp_(self._sum, fraction)
        return distance

    def clear(self) -> None:
        self._total_weight = 0.0


class BFloat16(Float32):
    """`bfloat16`: every parameter rounded to 8 bits of precision (nearest, ties to even): half the bytes.

    Mixing rounded models plainly, x <- (x + r(y))/2, is unsound: where x = y it halves x's distance to the rounded
    grid at each mix, so that steps of less than a quarter of the grid's width never leave their place (width 2.4e-4 for
    weights of 0.05; RMSprop's steps are often smaller). So the receiver rounds its own model too, for the difference
    only: x <- x + fraction (mean r(y) - r(x)). Where models agree nothing moves, no step of a rank's own learning is
    lost, and two ranks that exchange models at the same time keep their mean. Models differ by about the grid's width
    at the end (1/256 of a parameter); they did not agree better when they were learning. Stochastic rounding would
    need random numbers and add noise, error feedback one more vector a rank.
    """

    format, dtype = Format.BFLOAT16, torch.bfloat16

    def _mix_mean(self, parameters: Tensor, fraction: float, measure: bool) -> Tensor | None:
        if fraction == 1.0:
            distance = (self._sum - parameters).norm() if measure else None
            parameters.copy_(self._sum)
            return distance
        difference = self._sum.sub_(parameters.to(self.dtype))
        parameters.add_(difference, alpha=fraction)
        return difference.norm() if measure else None


class TopK(Payload):
    """`top_k`: the parameters that changed most since this rank last sent them, as int32 indices and float32 values.

    After parallel Sarsa (Grounds & Kudenko), whose learners tell each other the weights that changed most. There is one
    reference a rank, what it last sent of each parameter to anybody, so memory does not grow with the ranks. The
    receiver mixes what came, each parameter by the uniform rule: x_i <- (x_i + sum of v_i) / (1 + number of v_i).

    Every `whole_every`-th model is whole: a parameter that no longer changes would otherwise never be told again to
    those who missed it. A rank whose parameters are not finite is healed by a whole model only, and asks for it.

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
        self._sample, self._rank_in_sample = self._plan_sample(size, parameters.device)
        self._num_packed = 0
        self._sum, self._count = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._indices: Tensor | None = None  # of the staged values; None: all
        self._values = parameters.new_empty(0)

    def _plan_sample(self, size: int, device: torch.device) -> tuple[Tensor, int]:
        """(indices of the sample, which of its values, counted from the smallest, is the threshold)."""
        if size <= _SAMPLE:
            return torch.arange(size, device=device), size - self.most + 1
        sample = torch.randint(size, (_SAMPLE,), generator=torch.Generator().manual_seed(0)).sort().values
        expected = self.most * _SAMPLE / size
        return sample.to(device), _SAMPLE - max(1, int(expected - 2 * math.sqrt(expected))) + 1

    def pack(self, parameters: Tensor, whole: bool) -> Packed:
        self._num_packed += 1
        if whole or self._always_whole:
            self._reference.copy_(parameters)
            return Packed(Format.FLOAT32, (parameters,))
        indices = self._choose(torch.sub(parameters, self._reference, out=self._change).abs_())
        values = parameters.index_select(0, indices)
        self._reference.index_copy_(0, indices, values)
        return Packed(Format.TOP_K, (indices.to(torch.int32), values))

    def _choose(self, change: Tensor) -> Tensor:
        """Indices, rising, of at most `most` parameters that changed. NaN is always chosen: peers must refuse it."""
        threshold = float(change[self._sample].kthvalue(self._rank_in_sample).values)
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
        device = self._sum.device
        if format_ is Format.FLOAT32:
            self._indices, self._values = None, received.view(torch.float32).to(device, non_blocking=True)
        else:
            half = received.numel() // 2
            self._indices = received[:half].view(torch.int32).to(device, non_blocking=True)
            self._values = received[half:].view(torch.float32).to(device, non_blocking=True)
            if not _rises_within(self._indices, self._sum.numel()):
                return Refusal("its indices do not rise, or name parameters that do not exist")
        return None if _is_finite(self._values) else _NOT_FINITE

    def add(self, weight: float) -> bool:
        """`weight` is 1: this format mixes uniformly."""
        if self._indices is None:
            self._sum.add_(self._values)
            self._count.add_(1.0)
        else:
            self._sum.index_add_(0, self._indices, self._values)
            self._count.index_add_(0, self._indices, torch.ones_like(self._values))
        return False

    def mix_into(self, parameters: Tensor, fraction: float, measure: bool) -> Tensor | None:
        """The distance is over the parameters that came; a `fraction` below 1 is each parameter's own."""
        distance = None
        if measure:
            difference = torch.mul(self._count, parameters, out=self._change).neg_().add_(self._sum)
            distance = difference.div_(self._count.clamp(min=1.0)).norm()
        if fraction == 1.0:  # the protocol gives it only where a whole model came
            parameters.copy_(self._sum).div_(self._count)
        else:
            parameters.add_(self._sum).div_(self._count.add_(1.0))
        self.clear()
        return distance

    def clear(self) -> None:
        self._sum.zero_()
        self._count.zero_()


def make_payload(config: ExchangeConfig, parameters: Tensor) -> Payload:
    """What the configuration names, for these parameters (flat float32)."""
    if config.compression == "top_k":
        return TopK(parameters, config.top_k_fraction)
    return BFloat16(parameters) if config.compression == "bfloat16" else Float32(parameters)


def _is_finite(values: Tensor) -> bool:
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def _rises_within(indices: Tensor, size: int) -> bool:
    """True if 0 <= first < second < ... < size."""
    if indices.numel() == 0:
        return True
    within = int(indices[0]) >= 0 and int(indices[-1]) < size
    return within and bool((indices[1:] > indices[:-1]).all())


class SendBuffer:
    """One outgoing model: header and parameters in one block of (pinned) host memory.

    On a GPU the copy runs on a stream of its own: the learner goes on at once, `ready` says when the block is whole.
    """

    def __init__(self, wire: Wire, payload: Payload, device: torch.device) -> None:
        self._wire, self._payload = wire, payload
        self._block = torch.zeros(wire.most_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.bytes: np.ndarray = self._block.numpy()  # as many as the message has
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self.pending = 0  # copies not yet sent
        self.peers: tuple[int, ...] = ()  # to whom

    def fill(self, message: Message, parameters: Tensor, whole: bool = True) -> None:
        """Take a snapshot of the parameters, or of the part of them that is to be sent, under this header."""
        packed = self._payload.pack(parameters, whole)
        size = self._wire.control_bytes + sum(part.nbytes for part in packed.parts)
        self.bytes = self._block.numpy()[:size]
        self._wire.encode(message._replace(format=packed.format), self.bytes)
        if self._stream is None:
            self._copy(packed.parts)
            return
        current = torch.cuda.current_stream(parameters.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._copy(packed.parts)
            self._copied = self._stream.record_event()
        current.wait_event(self._copied)  # neither the next update nor a new tensor in `parts`' place may overtake it

    def _copy(self, parts: tuple[Tensor, ...]) -> None:
        begin = self._wire.control_bytes
        for part in parts:
            self._block[begin : begin + part.nbytes].view(part.dtype).copy_(part, non_blocking=True)
            begin += part.nbytes

    def ready(self) -> bool:
        """True when the snapshot is complete in host memory."""
        return self._copied is None or self._copied.query()


class ReceiveBuffer:
    """One incoming model, and by its payload the sum of those accepted since the last mix.

    On a GPU the block is pinned, and staging and sum live on the receiver's own device, whatever device the sender had.
    """

    def __init__(self, wire: Wire, payload: Payload, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._control_bytes, self._payload = wire.control_bytes, payload
        blocks = 2 if payload.keeps_block else 1
        self._blocks = [torch.empty(wire.most_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(blocks)]
        self._stream = torch.cuda.Stream(device) if cuda else None

    @property
    def bytes(self) -> np.ndarray:
        """Where the next model is to be received."""
        return self._blocks[0].numpy()

    def give_up_block(self) -> None:
        """Leave the block to the model that is being received into it, which comes too late, and take another."""
        self._blocks[0] = torch.empty_like(self._blocks[0], pin_memory=self._stream is not None)

    def check(self, message: Message, num_bytes: int) -> Refusal | None:
        """Refuse what no model can hold in the block's first `num_bytes`, which were decoded to this message."""
        with self._on_stream():  # the checks read their results, and so wait for this stream alone
            return self._payload.stage(message.format, self._blocks[0][self._control_bytes : num_bytes])

    def add(self, weight: float) -> None:
        """Add the checked model to the weighted sum."""
        with self._on_stream():
            if self._payload.add(weight):
                self._blocks.reverse()

    def clear(self) -> None:
        """Forget the models that came since the last mix."""
        with self._on_stream():
            self._payload.clear()

    def mix_into(self, parameters: Tensor, fraction: float, measure: bool = True) -> Tensor | None:
        """parameters <- (1 - fraction) parameters + fraction * mean, in place; empties the sum.

        If `measure`, returns the distance |mean - parameters| before the mix (L2, scalar, on the device).
        """
        if self._stream is not None:
            torch.cuda.current_stream(parameters.device).wait_stream(self._stream)
        distance = self._payload.mix_into(parameters, fraction, measure)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(parameters.device))
        return distance

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
