"""The process lock: one credit a peer.

The paper's "process lock across nodes": a rank may not send to a peer again until that peer has taken in its last
model. It bounds what is in flight to one model for each ordered pair of ranks (`paired`: and one answer, which takes
no lock) and keeps fast ranks from flooding slow ones. Sans-IO: a table and four operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ProcessLock:
    """The peers that still hold the last model that this rank sent them, and since when, the longest first."""

    held_since_s: dict[int, float] = field(default_factory=dict)

    def is_free(self, peer: int) -> bool:
        """Return whether `peer` may be sent to."""
        return peer not in self.held_since_s

    def acquire(self, peer: int, now_s: float) -> None:
        """Note that a model is on its way to `peer`."""
        assert peer not in self.held_since_s, f"the lock of peer {peer} is held"
        self.held_since_s[peer] = now_s

    def release(self, peer: int) -> None:
        """Note that `peer` has taken the model in, or is dead."""
        self.held_since_s.pop(peer, None)

    def held_before(self, time_s: float) -> set[int]:
        """Return the peers that have held a model since before this time."""
        held = self.held_since_s
        # Most often there is none; the first in the table has held its model for the longest time.
        if not held or next(iter(held.values())) >= time_s:
            return set()
        return {peer for peer, since_s in held.items() if since_s < time_s}
