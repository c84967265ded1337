"""A file of tensors with a JSON header: safetensors, checked by CRC when read. No pickle. What is read is not believed:
any bytes give what was packed, or a PalaError."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from pala.exchange.flat import checksum
from pala.system.errors import PalaError, reason
from pala.system.files import open_to_read

_FORMAT = 2


def pack(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    """Return the bytes of such a file."""
    text = json.dumps({"format": _FORMAT, "crc32": _crcs(tensors), "layout": _layout(tensors)} | header)
    return safetensors_bytes(tensors, {"pala": text, "crc32": _text_crc(text)})


def unpack(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, header). Raises PalaError."""
    with _opened(path) as (file, header):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        # The checksums say nothing of the layout.
        if header.get("crc32") != _crcs(tensors) or header.get("layout") != _layout(tensors):
            raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    return tensors, header


def header_of(path: Path) -> dict[str, Any]:
    """Return the header alone; nothing of the tensors is read. Raises PalaError."""
    with _opened(path) as (_, header):
        return header


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        open_to_read(path).close()  # a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            yield file, _header(path, metadata["pala"], metadata.get("crc32"))
    except FileNotFoundError:
        raise PalaError(f"Checkpoint '{path}' does not exist.") from None
    except (OSError, RuntimeError, SafetensorError, KeyError, ValueError, TypeError, MemoryError) as error:
        raise PalaError(f"Checkpoint '{path}' cannot be read ({reason(error)}).") from None  # perhaps renamed meanwhile


def _header(path: Path, text: str, crc: str | None) -> dict[str, Any]:
    """Return the checked header. Its own checksum is the same in every format, so that the format can be believed."""
    if crc != _text_crc(text):
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
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


def _crcs(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def _layout(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return each tensor's type and shape."""
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def _text_crc(text: str) -> str:
    return str(zlib.crc32(text.encode()))
