"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pala.system.errors import PalaError


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a neighbour, flush to the disk, then rename: a reader sees the old file or the new one, whole.

    So does one after a crash of the machine. Raises OSError, and then the old file is as it was.
    """
    with open_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """`write_atomically` for what is too large to be held as bytes: the file takes its place when the block ends."""
    neighbour = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")  # two may write at once
    try:
        with open(neighbour, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
    except BaseException:  # ^C is none of the Exceptions
        neighbour.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_bytes(path: Path) -> bytes:
    """A file's content; one whose name ends in `.gz` is unpacked. Raises OSError, also for a damaged `.gz`."""
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, zlib.error) as error:
        raise OSError(f"'{path}' is damaged ({error})") from None


def make_output_folder(output: Path | None, what: str) -> Path:
    """A new folder for what a program writes, by default `runs/WHAT-TIME`. Raises PalaError if it exists already."""
    path = output or Path("runs") / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PalaError(f"'{path}' exists already; nothing is written over. Choose another '--output'.") from None
    except OSError as error:
        raise PalaError(f"The folder '{path}' cannot be made: {error}; see '--output'.") from None
    return path


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it outlives a crash of the machine.

    Not every file system can. An error is none of the caller's: the file is whole and has its name already.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
