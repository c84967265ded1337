"""Memory that some ranks of a host share: a file in memory without a name, which all have mapped.

It outlives each of the ranks, goes with the last, whatever that dies of, and needs no room in /dev/shm and no MPI:
Open MPI warns that its windows may crash or deadlock when a rank dies.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pala.comm.base import Communicator, SharedBlock
from pala.system.errors import PalaError, reason


class _Made(NamedTuple):
    """A new file, or the reason why there is none."""

    path: str = ""  # by which this host's processes find it, while its maker has it open
    inode: int = 0
    fault: str = ""


class MappedFile(SharedBlock):
    """A block whose file `share` has made."""

    def __init__(self, made: _Made, num_bytes: int) -> None:
        import numpy as np  # not loaded yet when MPI starts: see `resources.prepare`

        with open(made.path, "r+b") as file:
            if os.fstat(file.fileno()).st_ino != made.inode:  # of another process with this number
                raise FileNotFoundError(errno.ENOENT, "it is another file")
            self.data = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Take a lock twice: what was written before the first release is seen before what follows the second take."""
        for _ in range(2):
            with self._lock:
                pass


def share(comm: Communicator, num_bytes: int, among: Sequence[int]) -> MappedFile:
    """Return memory of zeros that the ranks `among` share, this one too. Collective. Raises PalaError."""
    first = among[0]
    with _made(num_bytes if comm.rank == first else 0) as mine:
        made = comm.allgather(mine)[first]
        block, fault = None, made.fault
        if not fault:
            try:
                block = MappedFile(made, num_bytes)
            except (FileNotFoundError, PermissionError) as error:
                fault = (
                    f"this rank does not see rank {first}'s {made.path} ({reason(error)}), though both are on host "
                    f"{comm.host}: they are in containers apart. Start all ranks of a host in one"
                )
            except OSError as error:
                fault = reason(error)
        comm.barrier()
    if block is None:
        raise PalaError(f"{_size(num_bytes)} of memory cannot be shared with ranks of this host: {fault}.")
    return block


@contextmanager
def _made(num_bytes: int) -> Iterator[_Made]:
    """Make the file, with all its memory: a page that is not there later would kill the rank that touches it. Without
    `num_bytes` make none."""
    if not num_bytes:
        yield _Made()
        return
    file = -1
    try:
        try:
            file = os.memfd_create("pala")
            os.posix_fallocate(file, 0, num_bytes)
            made = _Made(f"/proc/{os.getpid()}/fd/{file}", os.fstat(file).st_ino)
        except OSError as error:
            made = _Made(fault=reason(error))
        yield made
    finally:
        if file >= 0:
            os.close(file)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.0f} KiB"
