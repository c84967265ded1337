"""A rank without the others. It calls nothing that communicates, so it may be used while a transport is open: a spare
that takes a place builds its network and environments by it, while its transport's thread may be inside MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from pala.comm.base import Communicator, Deaths, Reduction, SharedBlock, Survivors, Transport
from pala.system.interrupt import Interrupt

T = TypeVar("T")


class Alone(Communicator):
    """Rank 0 of one. It builds what a rank trains with, and does not train."""

    rank = 0
    size = 1
    outlives_ranks = False

    def __init__(self, host: str) -> None:
        self.host = host
        self.interrupt = Interrupt()

    def barrier(self) -> None:
        """Return at once: there is no other rank."""

    def allgather(self, value: T) -> list[T]:
        return [value]

    def bcast(self, value: T, root: int = 0) -> T:
        return value

    def bcast_array(self, array: np.ndarray, root: int = 0) -> None:
        """Do nothing: there is no other rank."""

    def first(self, size: int) -> Alone:
        return self

    def ibarrier(self) -> Callable[[], bool]:
        return lambda: True

    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        """Leave the array: one value is its own sum and maximum."""

    def with_survivors(self, action: Callable[[Survivors], T], timeout_s: float | None) -> T:
        raise NotImplementedError("a rank alone does not train")

    def deaths(self) -> Deaths:
        raise NotImplementedError("a rank alone has no other rank to lose")

    def is_alone(self) -> bool:
        return True

    def open_transport(self) -> Transport:
        raise NotImplementedError("a rank alone has no peer")

    def share_memory(self, num_bytes: int, among: Sequence[int]) -> SharedBlock:
        raise NotImplementedError("a rank alone shares no memory")

    def facts(self) -> dict[str, Any]:
        return {}
