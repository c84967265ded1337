"""Memory that the ranks of a group share: what each says, the gradients and their mean, and the leader's words.

Every word has one writer at a time: a rank's own row is its own, the head is the leader's. What a word announces is
written before it, with a fence between. A number of an update is written last, so that a rank that dies in the middle
has said nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Communicator

_ARRIVED, _REDUCED, _ENDS, _HEARD, _LEFT, _NOT_FINITE = range(6)  # of a member; the last is of even updates, then odd
_DECIDED, _DECIDED_STOP, _PUBLISHED, _PUBLISHED_STOP, _CHANGED, _WAS_HEALTHY, _HEALED = range(7)  # of the head
_COLUMNS = 7


class GroupMemory:
    """One block of memory, by the ranks' numbers in the job.

    | part | shape | who writes |
    |---|---|---|
    | `members` | int64 [members, 7] | each its row |
    | head | int64 [7], included [members], living [ranks] | the leader |
    | `steps` | uint64 [ranks] | the leader |
    | `gradients` | float32 [members, parameters] | each its row |
    | `mean` | float32 [parameters] | each a slice |
    | `model` | float32 [parameters] | the leader |
    """

    def __init__(self, comm: Communicator, members: Sequence[int], num_parameters: int) -> None:
        """Share the block among `members`, sorted. Collective for the job. Raises PalaError if there is not as much
        shared memory."""
        self._place = {rank: place for place, rank in enumerate(members)}
        self._rank = comm.rank
        n = len(members)  # all words begin with 0
        num_words = n * _COLUMNS + _COLUMNS + n + 2 * comm.size
        self._block = comm.share_memory(num_words * 8 + (n + 2) * num_parameters * 4, members)
        words = self._block.data[: num_words * 8].view(np.int64)
        table, self._head, self._included, self._living, steps = np.split(
            words, np.cumsum([n * _COLUMNS, _COLUMNS, n, comm.size])
        )
        self._members = table.reshape(n, _COLUMNS)
        self._steps = steps.view(np.uint64)
        floats = torch.from_numpy(self._block.data[num_words * 8 :].view(np.float32).reshape(n + 2, num_parameters))
        self._gradients, self.mean, self.model = floats[:n], floats[n], floats[n + 1]

    # ---- what each member says -------------------------------------------------------------------------------------

    def arrive(self, update: int, gradient: Tensor, is_finite: bool, heard: int) -> None:
        """Bring this rank's gradient to an update. `heard`: the reason to end of which it has been told, or 0."""
        own = self._place[self._rank]
        self._gradients[own].copy_(gradient)
        self._members[own, _NOT_FINITE + update % 2] = not is_finite
        self._members[own, _HEARD] = heard
        self._announce(self._members[own], _ARRIVED, update)

    def end(self, reason: int) -> None:
        """Say that this rank brings no gradient any more."""
        self._announce(self._members[self._place[self._rank]], _ENDS, reason)

    def leave(self) -> None:
        """Say that this rank is no member any more."""
        self._announce(self._members[self._place[self._rank]], _LEFT, 1)

    def has_arrived(self, rank: int, update: int) -> bool:
        """Return whether a member has brought its gradient."""
        return bool(self._members[self._place[rank], _ARRIVED] >= update)

    def ends(self, rank: int) -> int:
        """Return the reason for which a member brings no gradient any more, or 0."""
        return int(self._members[self._place[rank], _ENDS])

    def heard(self, rank: int) -> int:
        """Return the reason to end of which a member had been told when it arrived, or 0."""
        return int(self._members[self._place[rank], _HEARD])

    def has_left(self, rank: int) -> bool:
        """Return whether a member has left."""
        return bool(self._members[self._place[rank], _LEFT])

    def not_finite(self, update: int, ranks: Sequence[int]) -> list[int]:
        """Return those of the members whose gradients of the update are not finite, though some may have arrived at the
        next."""
        return [rank for rank in ranks if self._members[self._place[rank], _NOT_FINITE + update % 2]]

    # ---- what the leader says --------------------------------------------------------------------------------------

    def decide(self, update: int, included: Sequence[int], stop: int, living: Sequence[int], steps: np.ndarray) -> None:
        """Say whose gradients an update has, or that there is none: `stop`. `living`, `steps` (uint64 [ranks]): what
        the leader knows of the job."""
        self._included[:] = 0
        self._included[[self._place[rank] for rank in included]] = 1
        self._living[:] = 0
        self._living[list(living)] = 1
        self._steps[:] = steps
        self._head[_DECIDED_STOP] = stop
        self._announce(self._head, _DECIDED, update)

    def is_decided(self, update: int) -> bool:
        """Return whether the leader has spoken about an update."""
        return bool(self._head[_DECIDED] >= update)

    def decision(self) -> tuple[list[int], int, list[int], np.ndarray]:
        """Return what `decide` was last given: included, stop, living, steps."""
        self._block.fence()
        included = [rank for rank, place in self._place.items() if self._included[place]]
        living = np.flatnonzero(self._living).tolist()
        return included, int(self._head[_DECIDED_STOP]), living, self._steps.copy()

    def publish(self, update: int, model: Tensor | None, healthy: bool, healed: bool, stop: int) -> None:
        """Say what gossip has made of the model after an update; None: nothing. `healthy`: it was finite before;
        `healed`: a peer's took its place; `stop`: the reason why training ends here, or 0."""
        if model is not None:
            self.model.copy_(model)
        self._head[_CHANGED] = model is not None
        self._head[_WAS_HEALTHY] = healthy
        self._head[_HEALED] = healed
        self._head[_PUBLISHED_STOP] = stop
        self._announce(self._head, _PUBLISHED, update)

    def is_published(self, update: int) -> bool:
        """Return whether the leader has said what became of the model after an update."""
        return bool(self._head[_PUBLISHED] >= update)

    def published(self) -> tuple[bool, bool, bool, int]:
        """Return what `publish` was last given: whether there is a model, healthy, healed, stop."""
        self._block.fence()
        head = self._head
        return bool(head[_CHANGED]), bool(head[_WAS_HEALTHY]), bool(head[_HEALED]), int(head[_PUBLISHED_STOP])

    # ---- the mean of the gradients ---------------------------------------------------------------------------------

    def reduce_slice(self, update: int, rank: int, included: Sequence[int]) -> None:
        """Write the slice of the mean that is `rank`'s share: its own, or the leader for one that has died."""
        part = self._slice(rank, included)
        self._block.fence()
        total = self.mean[part]
        total.copy_(self._gradients[self._place[included[0]], part])
        for other in included[1:]:
            total.add_(self._gradients[self._place[other], part])
        total.div_(len(included))
        self._announce(self._members[self._place[rank]], _REDUCED, update)

    def is_reduced(self, rank: int, update: int) -> bool:
        """Return whether the slice that is `rank`'s share has been written."""
        return bool(self._members[self._place[rank], _REDUCED] >= update)

    def _slice(self, rank: int, included: Sequence[int]) -> slice:
        share, of, num_all = included.index(rank), len(included), len(self.mean)
        return slice(num_all * share // of, num_all * (share + 1) // of)

    def _announce(self, row: np.ndarray, column: int, value: int) -> None:
        """Write a word when all that was written before can be seen."""
        self._block.fence()
        row[column] = value
        self._block.fence()
