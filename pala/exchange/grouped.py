"""Gossip between groups of ranks: the ranks of a group average their gradients at each update and hold one model.

The lowest living rank of a group, its *leader*, gossips for it. An update of a group of two:

        the leader                                          the other
    1   arrive: gradient, heard of the end ──▶ ◀──────────  arrive: gradient, heard of the end
    2   decide, when all that live are here ─────────────▶  whose gradients count, or that training ends here
    3   reduce: the mean, first half ──▶ ◀────────────────  reduce: the mean, second half; both read it whole
    4   step                                                the same step
    5   send and mix as every rank of gossip; publish ───▶  take over what has become of the model

All waits are asleep; whoever waits looks for deaths, which its own data proxy is told of. What a rank that died has
announced holds, and what it has not announced never happened: the next leader carries on from there, and writes the
slices that the dead owed. Whatever changes a step (the number of learners, the steps of all) is in the leader's
decision, so all ranks of a group take the same. SGP ran so: all-reduce in a node, gossip between nodes (Assran et al.
2019, arXiv 1811.10792, section 6).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pala.comm.agreement import collectively
from pala.exchange.base import Setup
from pala.exchange.budget import Stop
from pala.exchange.gossip.exchange import GossipExchange
from pala.exchange.group_memory import Decision, GroupMemory
from pala.exchange.groups import groups_of, members_of
from pala.system.errors import PalaError
from pala.system.output import log
from pala.system.text import named
from pala.system.waiting import LongWait, wait_asleep

_LONGEST_SLEEP_S = 5e-4


class GroupedGossip(GossipExchange):
    """Gossip of a rank that shares its model with the others of its group."""

    def __init__(self, setup: Setup) -> None:
        """Gossip as `GossipExchange` does. The parameters are equal within each group. Collective."""
        comm, parameters, config, start, *_ = setup
        self._groups: Sequence[int] = groups_of(comm.allgather(comm.host), config.exchange.group)
        self._members: Sequence[int] = members_of(self._groups)[self._groups[comm.rank]]  # those of the newest decision
        everybody = self._members
        self._memory = collectively(comm, lambda: GroupMemory(comm, everybody, parameters.numel()))
        super().__init__(setup, groups=self._groups)
        self._update = 0  # that the group makes, or has made last
        self._made = np.array(start.steps_by_rank, np.uint64)  # steps of every rank, those of this group exactly
        self._trained_by: Sequence[int] = range(comm.size)  # ranks, as the newest decision knows them
        self._known_steps = start.global_steps
        self._end = Stop.NONE  # why training ends on this rank
        self._all_end = False  # and on the others of its group, after the same update
        self._has_closed = False
        self._gossips = comm.rank == self._members[0]
        self._num_published = 0  # mixes that all ranks of the group have

    # ---- what the loop asks ----------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        if self._has_closed or self._state.has_left:
            return super().global_steps
        return self._known_steps

    @property
    def num_learners(self) -> int:
        return max(1, len(self._trained_by))

    @property
    def num_models(self) -> int:
        return max(1, len({self._groups[rank] for rank in self._trained_by}))

    @property
    def stop(self) -> Stop:
        self._transport.raise_failure()
        return self._state.budget.stop if self._state.has_left else self._end

    def stop_now(self, reason: Stop) -> None:
        super().stop_now(reason)
        if self._end is Stop.NONE:
            self._end = self._state.budget.stop
        self._memory.end(self._end)
        if self._is_leader and not self._all_end and not self._memory.is_decided(self._update + 1):
            self._decide(self._update + 1, (), self._end)

    def leave(self) -> bool:
        goes = super().leave()
        if self._state.has_left:
            self._memory.leave()
        return goes

    def _may_leave(self) -> bool:
        """Return whether another rank, which stays, has a model of use. Where all ranks are one group, those that are
        not gone have the same."""
        if set(self.living) - set(self._members):
            return super()._may_leave()
        return any(rank != self._comm.rank and not self._is_gone(rank) for rank in self._members)

    def _may_hear_who_stays(self) -> bool:
        return bool(set(self.living) - set(self._members))

    # ---- an update -------------------------------------------------------------------------------------------------

    def average_gradient(self, gradient: Tensor) -> bool:
        memory, rank = self._memory, self._comm.rank
        self._arrive(gradient)
        self._wait_for_group(self._decide_if_leader, "the gradients of its group")
        if not self._take_decision():
            return False
        if len(self._members) > 1:
            memory.reduce_slice(self._update, rank, self._members)
            self._wait_for_group(self._complete_mean, "the mean of its group's gradients")
            gradient.copy_(memory.mean)
        guilty = memory.not_finite(self._update, self._members)
        self.culprits = () if rank in guilty else guilty
        return True

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._has_updated = True
        self._count(steps)
        self._wait_for_group(lambda: self._memory.is_published(self._update) or self._is_leader, "its leader's model")
        self._gossip_if_leader(healthy)  # a rank that leads by now has waits of its own
        return self._take_published(healthy)

    def _arrive(self, gradient: Tensor) -> None:
        """Bring this rank's gradient to the next update."""
        self._update += 1
        is_finite = math.isfinite(float(gradient.norm()))
        self._memory.arrive(self._update, gradient, is_finite, self._state.budget.stop)

    def _decide_if_leader(self) -> bool:
        """Decide on this update, as its group's leader, when that can be done. Return whether it is decided."""
        update, memory = self._update, self._memory
        if self.interrupt.signal is not None:
            memory.end(Stop.SIGNAL)
        if memory.is_decided(update):
            return True
        if not self._is_leader:
            return False
        here = [rank for rank in self._members if not self._is_gone(rank)]
        stop = max(memory.members[rank]["ends"] for rank in here)
        if not stop:
            if any(memory.members[rank]["arrived"] < update for rank in here):
                return False
            stop = max(memory.members[rank]["heard"] for rank in here)
        self._decide(update, here, Stop(stop))
        return True

    def _decide(self, update: int, included: Sequence[int], stop: Stop) -> None:
        budget = self._state.budget
        self._memory.decide(update, Decision(included, stop, budget.living, budget.steps_by_rank))

    def _take_decision(self) -> bool:
        """Take over what the leader has decided. False if training ends here. Raises PalaError if the group has taken
        this rank for dead."""
        decision = self._memory.decision()
        self._trained_by = decision.living
        self._know(decision.steps)
        if decision.stop is not Stop.NONE:
            self._end_together(decision.stop)
            return False
        if self._comm.rank not in decision.included:
            raise PalaError(
                f"[rank {self._comm.rank}] its group has taken it for dead and continues without it. Its last "
                "checkpoint is kept."
            )
        self._members = decision.included
        return True

    def _complete_mean(self) -> bool:
        """Write the slices of ranks that have died, as the group's leader. Return whether the mean is whole."""
        for rank in self._members:
            if self._memory.members[rank]["reduced"] < self._update:
                if not (self._is_leader and self._is_gone(rank)):
                    return False
                self._memory.reduce_slice(self._update, rank, self._members)
        return True

    def _gossip_if_leader(self, healthy: bool) -> bool:
        """Gossip for the group, if this rank leads it. Return whether the leader has said what became of the model."""
        if self._memory.is_published(self._update):
            return True
        if self._is_leader:
            self._gossip(healthy)
            return True
        return False

    def _take_published(self, healthy: bool) -> bool:
        """Take over what the leader has published. Returns whether the model is finite now. Raises PalaError if this
        rank's model is not that of its group."""
        has_model, was_healthy, healed, stop = self._memory.published()
        if healthy != was_healthy:
            raise PalaError(
                f"[rank {self._comm.rank}] its model is no longer that of its group: one of them is not finite, so "
                "memory was damaged. This rank ends; the others may continue."
            )
        if not self._gossips:
            if has_model:
                self._parameters.copy_(self._memory.model)
            self.driver.heals += healed
        if stop:
            self._end_together(Stop(stop))
        return healthy or healed

    def _gossip(self, healthy: bool) -> None:
        """Send and mix as is due, as the group's leader, and publish what came of it. May wait."""
        if not self._gossips:
            self._gossips = True
            with self.driver.lock:
                for rank in self._members:
                    if self._memory.members[rank]["left"]:  # the message that says so may be on its way
                        self._state.budget.rank_left(rank)
            self.driver.begin()
            living = [rank for rank in self._members if not self._is_gone(rank)]
            log(f"[rank {self._comm.rank}] gossips for its group from now on: {named(living)}.")
        heals = self.driver.heals
        super().after_update(0, healthy)  # its steps have been counted
        has_moved = self.driver.num_mixes > self._num_published
        self._num_published = self.driver.num_mixes
        model = self._parameters if has_moved else None
        healed = self.driver.heals > heals
        self._memory.publish(self._update, model, healthy, healed, self._state.budget.stop)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> Stop:
        if not self._all_end and not self._state.has_left:
            self._arrive_at_end()
            # The others are at it, or will be.
            self._wait_for_group(self._decide_if_leader, "the end of its group", timeout_s)
        self._end = super().close(timeout_s)
        self._has_closed = True
        return self._end

    def metrics(self) -> dict[str, Any]:
        return super().metrics() | {"group": self._groups[self._comm.rank], "group_ranks": len(self._members)}

    @property
    def _is_fresh(self) -> bool:
        """Whether this rank's model counts in the final average: each group's once, by its leader."""
        return super()._is_fresh and self._comm.rank in self._state.budget.leaders

    def _arrive_at_end(self) -> None:
        """Come to the next update without a gradient."""
        self._update += 1
        self._memory.end(self._end)

    def _end_together(self, stop: Stop) -> None:
        """End training with the group, after the same update."""
        self._all_end = True
        super().stop_now(stop)
        if self._end is Stop.NONE:
            self._end = stop

    # ---- the group -------------------------------------------------------------------------------------------------

    @property
    def _is_leader(self) -> bool:
        """Whether this rank is the lowest of its group that lives and trains, as far as it has heard."""
        return next((rank for rank in self._members if not self._is_gone(rank)), None) == self._comm.rank

    def _is_gone(self, rank: int) -> bool:
        return rank not in self._state.budget.living or bool(self._memory.members[rank]["left"])

    def _count(self, steps: int) -> None:
        """Count an update of the group: the steps of every rank whose gradient it had."""
        self._made[list(self._members)] += np.uint64(steps)
        self._know(self._made)

    def _know(self, local_steps: np.ndarray) -> None:
        """Merge what is known of all ranks' steps, uint64 [ranks]; all ranks of the group are given the same."""
        self._made = np.maximum(self._made, local_steps)
        budget = self._state.budget
        self._known_steps = budget.base_steps + int(self._made.sum())
        with self.driver.lock:
            budget.merge(self._made, Stop.NONE)

    def _wait_for_group(self, done: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait asleep until `done()`, and look after messages, which tell of deaths, meanwhile."""
        if done():
            return
        begin = time.perf_counter()

        def look() -> bool:
            self._transport.raise_failure()
            self._transport.poll()
            return done()

        wait_asleep(look, timeout_s, self.interrupt, _LONGEST_SLEEP_S, LongWait(self._comm.rank, what))
        self._waited_since(begin)
