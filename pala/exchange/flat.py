"""Tensors of a model as views of one contiguous vector, so that a snapshot is one copy and averaging one operation."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pala.comm.base import Communicator
from pala.system.errors import CollectiveError, PalaError

Named = list[tuple[str, Tensor]]


_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def named_tensors(model: nn.Module | Iterable[Tensor]) -> tuple[Named, Named]:
    """Return a model's parameters, and those of its buffers that travel, by name: floating-point ones that its
    `state_dict` holds. Raises PalaError for tensors that cannot be exchanged."""
    buffers: Named = []
    if isinstance(model, nn.Module):
        parameters: Named = list(model.named_parameters())
        kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        named = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in kept]
        buffers = [(name, buffer) for name, buffer in named if buffer.is_floating_point()]
    elif isinstance(model, Tensor):
        raise PalaError("The model is one tensor: give it in a list, [tensor].")
    elif isinstance(model, Iterable):
        parameters = [(f"tensor {number}", tensor) for number, tensor in enumerate(model)]
    else:
        raise PalaError(f"The model is a {type(model).__name__}: give a torch module, or tensors.")
    if not parameters:
        raise PalaError("The model has no parameters to exchange.")
    for name, tensor in parameters:
        if not isinstance(tensor, Tensor):
            raise PalaError(f"'{name}' is a {type(tensor).__name__}: give a torch module, or tensors.")
    _check_tensors([*parameters, *buffers])
    return parameters, buffers


def _check_tensors(named: Named) -> None:
    """Raise PalaError for a tensor that no flat vector can stand in for."""
    first, device = named[0][0], named[0][1].device
    places: dict[int, str] = {}
    for name, tensor in named:
        if is_lazy(tensor):
            raise PalaError(f"'{name}' of the model has no shape yet; call the model once before `pala.Gossip`.")
        if tensor.dtype not in _TYPES:
            raise PalaError(
                f"'{name}' of the model is of type {tensor.dtype}, but only float32, bfloat16 and float16 can be "
                "exchanged; convert the model, or leave the tensor out of the list."
            )
        if tensor.device != device:
            raise PalaError(f"'{name}' of the model is on {tensor.device}, but '{first}' is on {device}; move one.")
        other = places.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if other != name:
            raise PalaError(f"'{name}' and '{other}' of the model lie in the same memory; give it once.")


class FlatTensors:
    """One contiguous float32 vector of a model's tensors. Those of float32 become views of it.

    Tensors of fewer bits stay where they are: the vector holds them in float32, and what rounding takes from them. A
    small move of the exchange, less than their last bit, is thus not lost, but adds up. Tensors in shared memory stay
    there, too, since other processes may have them open.
    """

    def __init__(self, parameters: Named, buffers: Named, owner: nn.Module | None = None) -> None:
        """Copy the tensors into the vector, `buffers` last, and put views of it in their places. `owner`: the module
        whose tensors they are."""
        named = [*parameters, *buffers]
        self.num_exact = sum(buffer.numel() for _, buffer in buffers)
        self.signature = signature_of(named)
        self.data = torch.empty(sum(tensor.numel() for _, tensor in named), device=named[0][1].device)
        self._views: list[tuple[str, Tensor, Tensor]] = []
        self._copied: list[tuple[str, Tensor, Tensor]] = []  # and where the vector has them
        self._owners = _owners(owner, {id(tensor) for _, tensor in named})
        modules = owner.named_modules() if owner is not None else ()
        self._children = [(name, module._modules, dict(module._modules)) for name, module in modules]
        offset = 0
        for name, tensor in named:
            part = self.data[offset : offset + tensor.numel()]
            is_channels_last = tensor.dim() == 4 and tensor.stride(1) == 1 and tensor.size(1) > 1
            view = shaped(part, tensor.shape, is_channels_last)
            view.copy_(tensor.detach())
            is_shared = tensor.device.type == "cpu" and tensor.is_shared()
            if tensor.dtype is torch.float32 and not is_shared:
                tensor.data = view
                self._views.append((name, tensor, view))
            else:
                self._copied.append((name, tensor, view))
            offset += tensor.numel()

    @property
    def learned(self) -> Tensor:
        """The part of the vector that holds parameters, without buffers."""
        return self.data[: len(self.data) - self.num_exact]

    def gather(self) -> None:
        """Take over the shared tensors, and by how much those of fewer bits have changed since `scatter`."""
        for _, tensor, inside in self._copied:
            if tensor.dtype is torch.float32:
                inside.copy_(tensor.detach())
            else:
                inside.add_(tensor.detach().to(torch.float32).sub_(inside.to(tensor.dtype)))

    def scatter(self) -> None:
        """Copy the vector's values into the tensors that are no views of it."""
        for _, tensor, inside in self._copied:
            tensor.detach().copy_(inside)

    def check(self) -> None:
        """Raise PalaError if a tensor or a module of the model is no longer the one that is exchanged, or has another
        shape."""
        for name, tensor, view in self._views:
            if tensor.shape != view.shape or tensor.data_ptr() != view.data_ptr():
                raise _replaced(name)
        for name, tensor, inside in self._copied:
            if tensor.shape != inside.shape:
                raise _replaced(name)
        for module, tensors, name, tensor in self._owners:
            if tensors.get(name) is not tensor:
                raise _replaced(f"{module}.{name}" if module else name)
        for name, now, before in self._children:
            if now != before:
                raise _has_other_modules(name, {key for key in now.keys() | before if now.get(key) != before.get(key)})

    def is_finite(self) -> bool:
        """Return whether the vector holds neither NaN nor infinity."""
        return is_finite(self.data)

    def not_finite(self) -> str:
        """Return the name of a tensor for which the vector holds NaN or infinity; "" if there is none."""
        named = [*self._views, *self._copied]
        return next((name for name, _, inside in named if not bool(inside.isfinite().all())), "")


def _owners(owner: nn.Module | None, ids: set[int]) -> list[tuple[str, dict[str, Any], str, Tensor]]:
    """Return of which module, in which of its tables and under which name each of these tensors lies."""
    modules = owner.named_modules() if owner is not None else ()
    return [
        (path, tensors, name, tensor)
        for path, module in modules
        for tensors in (module._parameters, module._buffers)  # a look here takes a tenth of one at `module.name`
        for name, tensor in tensors.items()
        if tensor is not None and id(tensor) in ids
    ]


def _replaced(name: str) -> PalaError:
    return PalaError(
        f"'{name}' of the model has another tensor, shape or type since the block began, so it would not be exchanged. "
        "Change it in place: `with torch.no_grad(): parameter.copy_(...)`."
    )


def _has_other_modules(owner: str, names: set[str]) -> PalaError:
    changed = ", ".join(f"'{f'{owner}.' * bool(owner)}{name}'" for name in sorted(names))
    return PalaError(
        f"The model has other modules since the block began ({changed}), which would not be exchanged. Change tensors "
        "in place, or end the block and begin another."
    )


def shaped(flat: Tensor, shape: torch.Size, is_channels_last: bool) -> Tensor:
    """Return a part of a flat vector in this shape; an image's weights, if asked for, in channels-last order."""
    if is_channels_last:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)


def is_finite(vector: Tensor) -> bool:
    """Return whether a vector holds neither NaN nor infinity. A finite sum shows that in one pass."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())


def checksum(tensor: Tensor) -> int:
    """Return the CRC of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


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
    checksums = comm.allgather(checksum(checked))
    wrong = [rank for rank, found in enumerate(checksums) if found != checksums[root]]
    if wrong:
        raise CollectiveError(
            f"Rank {wrong[0]} began with other weights than rank {root}: its memory or link is faulty."
        )
