"""Files that are whole or not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pala.errors import PalaError


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a neighbour, flush to the disk, then rename: a reader sees the old file or the new one, whole."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(neighbour, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
    except OSError:
        neighbour.unlink(missing_ok=True)
        raise


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
