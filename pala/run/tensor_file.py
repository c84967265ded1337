"""A file of tensors with a JSON header: safetensors, checked by CRC when read. No pickle. What is read is not believed:
any bytes give what was packed, or a PalaError."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from pala.system.errors import PalaError, reason
from pala.system.files import open_to_read

_FORMAT = 2
_MOST_HEADER_BYTES = 4 << 20  # counters of 100,000 ranks fit
_DTYPES = {"F32": str(torch.float32), "U8": str(torch.uint8)}  # safetensors' names of those that are read
Layout = dict[str, list[Any]]  # name of a tensor -> its type and shape
Check = Callable[[dict[str, Any], Layout], None]


def pack(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    """The bytes of such a file."""
    crcs = {name: _crc(tensor) for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, "crc32": crcs, "layout": _layout(tensors)} | header)
    return safetensors_bytes(tensors, {"pala": text, "crc32": _text_crc(text)})


def unpack(path: Path, check: Check) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, header). Raises PalaError, as `check` does for a header and layout that are not wanted, before a tensor
    is read."""
    with opened(path) as (file, header, layout):
        check(header, layout)
        tensors = {name: file.get_tensor(name) for name in layout}
    crcs = {name: _crc(tensor) for name, tensor in tensors.items()}
    # The checksums say nothing of the layout.
    if header.get("crc32") != crcs or header.get("layout") != _layout(tensors):
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    return tensors, header


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, dict[str, Any], Layout]]:
    """The file, its checked header, and what it says of its tensors, of which none has been read. Raises PalaError."""
    try:
        open_to_read(path).close()  # a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = _header(path, metadata["pala"], metadata.get("crc32"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            layout = {name: [_DTYPES.get(of.get_dtype(), ""), *of.get_shape()] for name, of in slices.items()}
            yield file, header, layout
    except FileNotFoundError:
        raise PalaError(f"Checkpoint '{path}' does not exist.") from None
    except (OSError, RuntimeError, SafetensorError, KeyError, ValueError) as error:  # Runtime: renamed meanwhile
        raise PalaError(f"Checkpoint '{path}' cannot be read ({reason(error)}).") from None


def _header(path: Path, text: str, crc: str | None) -> dict[str, Any]:
    """The checked header. Its own checksum stays as it is in every format, so that the format can be believed."""
    if crc != _text_crc(text):
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    if len(text) > _MOST_HEADER_BYTES:  # before it is parsed: a few bytes of JSON can take a hundred of memory
        raise PalaError(f"Checkpoint '{path}' cannot be read (a header of {len(text)} bytes).")
    try:
        header = json.loads(text)
    except RecursionError:
        header = None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise PalaError(f"Checkpoint '{path}' cannot be read (its header is none of PALA's).")
    if version != _FORMAT:
        age, what = ("a newer", "update PALA") if version > _FORMAT else ("an older", "use that version")
        raise PalaError(
            f"Checkpoint '{path}' was written by {age} version of PALA (format {version}; this one reads {_FORMAT}): "
            f"{what}."
        )
    return header


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(torch.as_tensor(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)


def _layout(tensors: dict[str, Tensor]) -> Layout:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def _text_crc(text: str) -> str:
    return str(zlib.crc32(text.encode()))
