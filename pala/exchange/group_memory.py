"""Memory that the ranks of a group share: what each says, the gradients and their mean, and the leader's words.

Every word has one writer at a time: a rank's own row is its own, the head is the leader's. What a word announces is
written before it, with a fence between. A number of an update is written last, so that a rank that dies in the middle
has said nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Communicator
from pala.exchange.budget import Stop

_MEMBER = ("arrived", "reduced", "ends", "heard", "left")
_HEAD = ("decided", "decided_stop", "published", "published_stop", "has_model", "was_healthy", "healed")


def _layout(members: int, ranks: int) -> np.dtype:
    """Return how the words of a group lie. `not_finite` is of even updates and of odd ones."""
    member = [*((word, "i8") for word in _MEMBER), ("not_finite", "i8", 2)]
    head = [*((word, "i8") for word in _HEAD), ("included", "i8", members), ("living", "i8", ranks)]
    return np.dtype([("members", member, members), ("head", [*head, ("steps", "u8", ranks)])])


class Decision(NamedTuple):
    """Choice of the leader for an update."""

    included: Sequence[int]  # members whose gradients count
    stop: Stop  # why training ends here: there is no such update
    living: Sequence[int]  # ranks of the job that train, as far as the leader knows
    steps: np.ndarray  # of all ranks, likewise: uint64 [ranks]


class GroupMemory:
    """One block of memory, by the ranks' numbers in the job.

    | part | content | who writes |
    |---|---|---|
    | `members` | by rank: what a member says | each its own |
    | `head` | what the leader says | the leader |
    | gradients | float32 [members, parameters] | each its row |
    | `mean` | float32 [parameters] | each a slice |
    | `model` | float32 [parameters] | the leader |
    """

    def __init__(self, comm: Communicator, members: Sequence[int], num_parameters: int) -> None:
        """Share the block among `members`, sorted. Collective for the job. Raises PalaError if there is not as much
        shared memory."""
        self._place = {rank: place for place, rank in enumerate(members)}
        self._rank = comm.rank
        n, layout = len(members), _layout(len(members), comm.size)  # all words begin with 0
        self._block = comm.share_memory(layout.itemsize + (n + 2) * num_parameters * 4, members)
        words = self._block.data[: layout.itemsize].view(layout)[0]
        self.head = words["head"]
        self.members = {rank: words["members"][place] for rank, place in self._place.items()}
        floats = torch.from_numpy(self._block.data[layout.itemsize :].view(np.float32).reshape(n + 2, num_parameters))
        self._gradients, self.mean, self.model = floats[:n], floats[n], floats[n + 1]

    # ---- what each member says -------------------------------------------------------------------------------------

    def arrive(self, update: int, gradient: Tensor, is_finite: bool, heard: int) -> None:
        """Bring this rank's gradient to an update. `heard`: the reason to end of which it has been told, or 0."""
        own = self.members[self._rank]
        self._gradients[self._place[self._rank]].copy_(gradient)
        own["not_finite"][update % 2] = not is_finite
        own["heard"] = heard
        self._announce(own, "arrived", update)

    def end(self, reason: int) -> None:
        """Say that this rank brings no gradient any more."""
        self._announce(self.members[self._rank], "ends", reason)

    def leave(self) -> None:
        """Say that this rank is no member any more."""
        self._announce(self.members[self._rank], "left", 1)

    def not_finite(self, update: int, ranks: Sequence[int]) -> list[int]:
        """Return those of the members whose gradients of the update are not finite, though some may have arrived at the
        next."""
        return [rank for rank in ranks if self.members[rank]["not_finite"][update % 2]]

    # ---- what the leader says --------------------------------------------------------------------------------------

    def decide(self, update: int, decision: Decision) -> None:
        """Say whose gradients an update has, or that there is none."""
        head = self.head
        head["included"][:] = [rank in decision.included for rank in self._place]
        head["living"][:] = 0
        head["living"][list(decision.living)] = 1
        head["steps"][:] = decision.steps
        head["decided_stop"] = decision.stop
        self._announce(head, "decided", update)

    def is_decided(self, update: int) -> bool:
        """Return whether the leader has spoken about an update."""
        return bool(self.head["decided"] >= update)

    def decision(self) -> Decision:
        """Return what `decide` was last given."""
        self._block.fence()
        head = self.head
        included = [rank for rank, place in self._place.items() if head["included"][place]]
        living = np.flatnonzero(head["living"]).tolist()
        return Decision(included, Stop(head["decided_stop"]), living, head["steps"].copy())

    def publish(self, update: int, model: Tensor | None, healthy: bool, healed: bool, stop: int) -> None:
        """Say what gossip has made of the model after an update; None: nothing. `healthy`: it was finite before;
        `healed`: a peer's took its place; `stop`: the reason why training ends here, or 0."""
        if model is not None:
            self.model.copy_(model)
        head = self.head
        head["has_model"], head["was_healthy"], head["healed"] = model is not None, healthy, healed
        head["published_stop"] = stop
        self._announce(head, "published", update)

    def is_published(self, update: int) -> bool:
        """Return whether the leader has said what became of the model after an update."""
        return bool(self.head["published"] >= update)

    def published(self) -> tuple[bool, bool, bool, int]:
        """Return what `publish` was last given: whether there is a model, healthy, healed, stop."""
        self._block.fence()
        head = self.head
        has_model, was_healthy, healed = bool(head["has_model"]), bool(head["was_healthy"]), bool(head["healed"])
        return has_model, was_healthy, healed, int(head["published_stop"])

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
        self._announce(self.members[rank], "reduced", update)

    def _slice(self, rank: int, included: Sequence[int]) -> slice:
        share, of, num_all = included.index(rank), len(included), len(self.mean)
        return slice(num_all * share // of, num_all * (share + 1) // of)

    def _announce(self, row: np.void, word: str, value: int) -> None:
        """Write a word when all that was written before can be seen."""
        self._block.fence()
        row[word] = value
        self._block.fence()
