"""The process lock: one credit a peer.

The paper's "process lock across nodes": a rank may not send to a peer again until that peer has taken in its last
model. It bounds what is in flight to one model for each ordered pair of ranks and keeps fast ranks from flooding
slow ones. Sans-IO: a set and three operations.
"""

from __future__ import annotations


class ProcessLock:
    """Which peers still hold the last model that this rank sent them."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def is_free(self, peer: int) -> bool:
        """True if `peer` may be sent to."""
        return peer not in self._held

    def acquire(self, peer: int) -> None:
        """A model is on its way to `peer`."""
        assert peer not in self._held, f"the lock of peer {peer} is held"
        self._held.add(peer)

    def release(self, peer: int) -> None:
        """`peer` has taken the model in, or is dead."""
        self._held.discard(peer)
