"""What A2C goes on from when the job is another: one state for all, from those that the ranks have saved."""

from __future__ import annotations

import torch

from pala.run.checkpoint import ACTOR_CRITIC, OF_ANOTHER_ALGORITHM, RankState, joint_counters
from pala.system.errors import PalaError


def average(states: list[RankState], first_only: bool = False) -> RankState:
    """One state from many, for another number of ranks.

    Kept: parameters, RMSprop's mean squares and momentum's movement, averaged with the push-sum weights; all
    steps made, and the longest time; the other counters, and `rank`, are the first's. Not kept: each rank's random
    streams. A rank whose parameters are not finite, or that made no update beside others that did, is left out; raises
    PalaError if that leaves none. `first_only`: not averaged, but the first's; of independent learners an average means
    nothing.
    """
    for state in states:
        check_actor_critic(state)
    if any(state.tensors.keys() != states[0].tensors.keys() for state in states):
        raise PalaError("The checkpoints of the ranks are of unlike settings: some are with momentum, some without.")
    joint = joint_counters(states)
    # One that was killed before its first checkpoint, beside others that trained, has weights that nobody learned.
    states = [state for state in states if state.counters["updates"]] or states
    states = [state for state in states if bool(state.tensors["parameters"].isfinite().all())]
    if not states:
        raise PalaError("The checkpoints of all ranks hold parameters that are not finite; nothing can be resumed.")
    states = states[: 1 if first_only else None]
    weights = [state.counters["weight"] for state in states]
    tensors = {
        name: sum((w * state.tensors[name] for w, state in zip(weights, states, strict=True)), torch.zeros(()))
        / sum(weights)
        for name in states[0].tensors
    }
    first = states[0]
    return RankState(first.rank, first.ranks, first.signature, tensors, {}, first.counters | joint)


def check_actor_critic(state: RankState) -> None:
    """Raise PalaError for another algorithm's."""
    if set(state.tensors) not in ACTOR_CRITIC or type(state.counters.get("warms_up_from")) is not int:
        raise PalaError(OF_ANOTHER_ALGORITHM)
