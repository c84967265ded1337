"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


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
