"""Memory that some ranks of a host share, as a file that all have mapped and that has no name any more.

It outlives each of the ranks, and needs no MPI: Open MPI warns that its windows may crash or deadlock when a rank dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pala.comm.base import Communicator, SharedBlock
from pala.system.errors import PalaError, reason

_MEMORY = Path("/dev/shm")  # a file system in memory, on Linux


class _Made(NamedTuple):
    """A new file, or the reason why there is none."""

    path: str = ""
    fault: str = ""


class MappedFile(SharedBlock):
    """A block whose file `share` has made."""

    def __init__(self, path: str, num_bytes: int) -> None:
        import numpy as np  # not loaded yet when MPI starts: see `resources.prepare`

        with open(path, "r+b") as file:
            self.data = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Take a lock twice: what was written before the first release is seen before what follows the second take."""
        for _ in range(2):
            with self._lock:
                pass

    def free(self) -> None:
        """Forget the array, with which the memory goes when all ranks have done so. Not collective."""
        del self.data


def share(comm: Communicator, num_bytes: int, among: Sequence[int]) -> MappedFile:
    """Return memory of zeros that the ranks `among` share, this one too. Collective. Raises PalaError."""
    made = comm.allgather(_make(num_bytes) if comm.rank == among[0] else _Made())[among[0]]
    block, fault = None, made.fault
    if not fault:
        try:
            block = MappedFile(made.path, num_bytes)
        except OSError as error:
            fault = (
                f"it is on host {comm.host} as rank {among[0]} is, but does not see that rank's {made.path} "
                f"({reason(error)}): they are in containers apart"
            )
    comm.barrier()
    if comm.rank == among[0] and made.path:
        Path(made.path).unlink()
    if block is None:
        raise PalaError(
            f"rank {comm.rank} cannot share {num_bytes / 2**20:.0f} MiB of memory with ranks of its host: "
            f"{fault}. In a container give it more (`--shm-size`); see `df /dev/shm`."
        )
    return block


def _make(num_bytes: int) -> _Made:
    """Make the file, with all its memory: a page that is not there later would kill who touches it."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix="pala-", dir=_MEMORY if _MEMORY.is_dir() else None)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        if path:
            with suppress(OSError):
                Path(path).unlink()
        return _Made(fault=reason(error))
    return _Made(path)
