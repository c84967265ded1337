"""Tensors of a model as views of one contiguous vector, so that a snapshot is one copy and averaging one operation."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pala.comm.base import Communicator
from pala.system.errors import CollectiveError, PalaError

Named = list[tuple[str, Tensor]]


def named_tensors(model: nn.Module | Iterable[Tensor]) -> tuple[Named, Named]:
    """Return a model's parameters and its floating-point buffers, by name. Raises PalaError for tensors that one
    float32 vector cannot hold."""
    buffers: Named = []
    if isinstance(model, nn.Module):
        parameters: Named = list(model.named_parameters())
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    else:
        parameters = [(f"tensor {number}", tensor) for number, tensor in enumerate(model)]
    if not parameters:
        raise PalaError("The model has no parameters to exchange.")
    first, device = parameters[0][0], parameters[0][1].device
    for name, tensor in [*parameters, *buffers]:
        if tensor.dtype is not torch.float32:
            raise PalaError(f"'{name}' of the model is of type {tensor.dtype}, but only float32 can be exchanged.")
        if tensor.device != device:
            raise PalaError(f"'{name}' of the model is on {tensor.device}, but '{first}' is on {device}; move one.")
    return parameters, buffers


class FlatTensors:
    """One contiguous float32 vector of a model's tensors, which become views of it."""

    def __init__(self, parameters: Named, buffers: Named) -> None:
        """Copy the tensors into the vector, `buffers` last, and put views of it in their places."""
        named = [*parameters, *buffers]
        self.num_exact = sum(buffer.numel() for _, buffer in buffers)
        self.signature = signature_of(named)
        self.data = torch.empty(sum(tensor.numel() for _, tensor in named), device=named[0][1].device)
        self._views: list[tuple[str, Tensor, Tensor]] = []
        offset = 0
        for name, tensor in named:
            part = self.data[offset : offset + tensor.numel()]
            is_channels_last = tensor.dim() == 4 and tensor.stride(1) == 1 and tensor.size(1) > 1
            view = shaped(part, tensor.shape, is_channels_last)
            view.copy_(tensor.detach())
            tensor.data = view
            self._views.append((name, tensor, view))
            offset += tensor.numel()

    def check_views(self) -> None:
        """Raise PalaError if a tensor of the model is no longer a view of the vector."""
        for name, tensor, view in self._views:
            if tensor.data_ptr() != view.data_ptr() or tensor.shape != view.shape:
                raise PalaError(
                    f"'{name}' of the model has another tensor since the block began, so it would not be exchanged. "
                    "Change it in place: `with torch.no_grad(): parameter.copy_(...)`."
                )


def shaped(flat: Tensor, shape: torch.Size, is_channels_last: bool) -> Tensor:
    """Return a part of a flat vector in this shape; an image's weights, if asked for, in channels-last order."""
    if is_channels_last:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)


def signature_of(named: Sequence[tuple[str, Tensor]]) -> int:
    """Return 64 bits that are equal for tensors of the same names and shapes."""
    layout = ";".join(f"{name}:{tuple(tensor.shape)}" for name, tensor in named)
    return int.from_bytes(hashlib.sha256(layout.encode()).digest()[:8], "little")


def share_tensors(comm: Communicator, tensors: Iterable[Tensor], checked: Tensor, root: int = 0) -> None:
    """Give all ranks the root's tensors. Collective. Raises CollectiveError if `checked`, which is among them or a view
    of them, then differs from the root's."""
    for tensor in tensors:
        host = tensor.cpu().numpy()
        comm.bcast_array(host, root)
        tensor.copy_(torch.from_numpy(host))
    checksums = comm.allgather(zlib.crc32(checked.detach().cpu().numpy().tobytes()))
    wrong = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[root]]
    if wrong:
        raise CollectiveError(
            f"Rank {wrong[0]} began with other weights than rank {root}: its memory or link is faulty."
        )
