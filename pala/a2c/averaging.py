"""One state for all ranks from those that an earlier job's ranks saved, for a resume with another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pala.run.checkpoint import OF_ANOTHER_ALGORITHM, RankState, joint_counters, load_all, load_rank
from pala.system.errors import PalaError

_NEEDED = {"parameters", "mean_square"}  # of the whole network; RMSprop's mean squares


def average_of(segment: Path, signature: int, first_only: bool) -> tuple[RankState, int]:
    """Make one state, for another number of ranks, of the checkpoints in a folder, and return it with the number of
    their ranks. Reads one at a time.

    Kept: parameters, RMSprop's mean squares and momentum's mean move, averaged with the push-sum weights; all
    steps made, and the longest time; the other counters, and `rank`, are the first's. Not kept: each rank's random
    streams. A rank whose parameters are not finite, or that made no update while others did, is left out; raises
    PalaError if that leaves none. `first_only`: not averaged, but the first's; of independent learners an average means
    nothing.
    """
    states = load_all(segment, signature, whole=False)
    read = {state.rank: state for state in states}
    first: RankState | None = None
    sums: dict[str, Tensor] = {}
    weights = 0.0
    # If others trained, one that was killed before its first checkpoint has weights that were not learned.
    for known in [state for state in states if state.counters["updates"]] or states:
        state = load_rank(segment, known.rank, signature, known.ranks)  # a live job may have saved since
        check_actor_critic(state)
        both = zip(known.counters["steps_by_rank"], state.counters["steps_by_rank"], strict=True)
        counters = state.counters | {"steps_by_rank": [max(steps) for steps in both]}
        read[state.rank] = replace(state, tensors={}, random_states={}, counters=counters)
        if not state.tensors["parameters"].isfinite().all():
            continue
        if first is None:
            first, sums = read[state.rank], dict.fromkeys(state.tensors, torch.zeros(()))
        if state.tensors.keys() != sums.keys():
            raise PalaError(
                "The checkpoints of the ranks are of unlike settings: some are with momentum, some without."
            )
        weight = counters["weight"]
        sums = {name: total + weight * state.tensors[name] for name, total in sums.items()}
        weights += weight
        if first_only:
            break
    if first is None:
        raise PalaError("The checkpoints of all ranks hold parameters that are not finite; nothing can be resumed.")
    tensors = {name: total / weights for name, total in sums.items()}
    joint = first.counters | joint_counters(list(read.values()))
    return replace(first, tensors=tensors, counters=joint), len(states)


def check_actor_critic(state: RankState) -> None:
    """Raise PalaError for the checkpoint of another algorithm."""
    num_squares(state.counters)
    if not state.tensors.keys() >= _NEEDED:
        raise PalaError(OF_ANOTHER_ALGORITHM)


def num_squares(counters: dict[str, Any]) -> int:
    """Return `A2C.num_squares` of a checkpoint. Those of earlier commits have the update after which the mean squares
    were 0. Raises PalaError for the checkpoint of another algorithm."""
    if "warms_up_from" in counters:
        return int(counters["updates"] - counters["warms_up_from"])
    if "num_squares" not in counters:
        raise PalaError(OF_ANOTHER_ALGORITHM)
    return int(counters["num_squares"])
