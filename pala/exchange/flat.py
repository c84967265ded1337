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
        _refuse_torchscript(model)
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


def _refuse_torchscript(model: nn.Module) -> None:
    """Raise PalaError if the model is a TorchScript module, or holds one: nothing tells when its tensors change."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"'{name}' of the model" if name else "The model"
            raise PalaError(f"{which} is a TorchScript module; give its tensors in a list, [*model.parameters()].")


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
        self.signature = signature_of([(name + _order(tensor), tensor) for name, tensor in named])
        numbers = sum(tensor.numel() for _, tensor in named)
        self.data = torch.empty(numbers, dtype=torch.float32, device=named[0][1].device)
        self._views: list[tuple[str, Tensor, Tensor]] = []
        self._copied: list[tuple[str, Tensor, Tensor]] = []  # and where the vector has them
        self._tables = _tables(owner, {id(buffer) for _, buffer in buffers})
        offset = 0
        for name, tensor in named:
            part = self.data[offset : offset + tensor.numel()]
            view = part.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else part.view(tensor.shape)
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
                now, cut_off = tensor.detach().to(torch.float32), inside - inside.to(tensor.dtype)
                fits = cut_off.abs() <= now.abs() * torch.finfo(tensor.dtype).eps  # else the tensor was reset, as to 0
                torch.add(now, cut_off.where(fits, 0.0), out=inside)

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
        for path, now, before, all_are_known in self._tables:
            for name, value in before.items():
                if now.get(name) is not value:
                    raise _replaced(path + name)
            if all_are_known and len(now) > len(before):
                raise _replaced(path + next(name for name in now if name not in before))

    def is_finite(self) -> bool:
        """Return whether the vector holds neither NaN nor infinity."""
        return is_finite(self.data)

    def not_finite(self) -> str:
        """Return the name of a tensor for which the vector holds NaN or infinity; "" if there is none."""
        named = [*self._views, *self._copied]
        return next((name for name, _, inside in named if not bool(inside.isfinite().all())), "")


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers lie side by side, each once, in whatever order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _order(tensor: Tensor) -> str:
    """Return in which order a tensor's numbers lie in the vector; "" if as usual. Optimisers keep that order."""
    return "" if tensor.is_contiguous() or not is_dense(tensor) else str(tensor.stride())


def _tables(owner: nn.Module | None, buffers: set[int]) -> list[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Return each module's tables of parameters, modules and buffers: the path to it, the table itself, what it must
    hold (of buffers only these, by `id`), and whether it may hold no more."""
    tables: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = []
    for name, module in owner.named_modules() if owner is not None else ():
        path = f"{name}." if name else ""
        # a look here takes a tenth of one at `module.name`
        tables += [(path, table, dict(table), True) for table in (module._parameters, module._modules)]
        exchanged = {key: buffer for key, buffer in module._buffers.items() if id(buffer) in buffers}
        tables.append((path, module._buffers, exchanged, False))
    return tables


def _replaced(name: str) -> PalaError:
    return PalaError(
        f"'{name}' of the model was added, removed or replaced since the block began, or has another shape or type, so "
        "it would not be exchanged. Change tensors in place, `with torch.no_grad(): parameter.copy_(...)`, or end the "
        "block and begin another."
    )


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
