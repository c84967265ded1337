"""Gorila's exchange: a rank's `Node` and its transport put together, under one lock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Bytes, Communicator, Received, Receiver, Survivors
from pala.exchange.base import Exchange, agree_on_end
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.wire import Message
from pala.gorila.members import Members
from pala.gorila.node import Node, Send
from pala.gorila.replay import Batch, Experience
from pala.gorila.roles import Roles
from pala.gorila.sleeping import SleepingGorila
from pala.system.errors import EndError
from pala.system.interrupt import LEAVE
from pala.system.output import log
from pala.system.waiting import LongWait

_NAP_S = 0.005  # what was sent leaves without a word
_MOST_UNDER_WAY = 4  # steps that an actor may be ahead of what its replay has received


class GorilaExchange(Exchange, Receiver):
    """The others as the loop of one rank sees them: its node, under a lock, and what waits."""

    def __init__(
        self, comm: Communicator, make_node: Callable[[Send], Node], slept: SleepingGorila | None = None
    ) -> None:
        """Make the rank's node and open its transport. Collective, except for a spare.

        `slept`: the sleeping Gorila of a spare that is needed, with whose members its node is made; it has to `join`.
        """
        self._comm, self.interrupt = comm, comm.interrupt
        self._experience: list[Bytes] = []  # that may not have left
        self._said_not_finite = False
        if slept is None:
            self._changed, self._transport = threading.Condition(), comm.open_transport()
            self._node = make_node(self._send)
            self._transport.start(self)
        else:
            self._changed, self._transport = slept.changed, slept.transport
            with self._changed:
                self._node = make_node(self._send)
                slept.awake = self
        self.message_bytes = self._node.rules.wire.most_bytes

    @property
    def _members(self) -> Members:
        return self._node.members

    # ---- the loop's thread ---------------------------------------------------------------------------------------

    @contextmanager
    def node(self) -> Iterator[Node]:
        """Lock the rank's node for the block. Nothing in it waits."""
        with self._changed:
            yield self._node

    @property
    def global_steps(self) -> int:
        return self._node.budget.global_steps

    @property
    def living(self) -> Sequence[int]:
        return self._node.budget.living

    @property
    def left(self) -> Collection[int]:
        return self._node.budget.left

    @property
    def roles(self) -> Roles:
        """The ranks that have each role now."""
        return self._node.roles

    @property
    def stop(self) -> Stop:
        self._raise_failure()
        return self._node.budget.stop

    def stop_now(self, reason: Stop) -> None:
        with self._changed:
            self._node.budget.stop_now(reason)
            self._members.send_stop()

    def join(self, flat: Tensor, target: Tensor) -> bool:
        """Train from now on, as a spare that has slept; wait for the model, and copy it. False if training ends before
        it comes. Not collective."""
        with self._changed:
            if self._node.budget.stop is not Stop.NONE:
                return False
            self._node.join()
        self._wait_until(lambda: self._node.has_model)
        with self._changed:
            if not self._node.has_model:
                return False
            self._node.take_target(target)
            self._node.take_parameters(flat)
        return True

    def leave(self) -> bool:
        rank, members = self._comm.rank, self._members
        with self._changed:
            if members.budget.stop is not Stop.NONE:
                return False
            if members.why_stay:
                log(
                    f"[rank {rank}] was told to leave ({LEAVE.name}), but {members.why_stay}: it stays. SIGUSR1 ends "
                    "the whole job, with a checkpoint."
                )
                return False
            members.leave()
            others = len(self.living)
        self._transport.wait_until_sent(members.watch.patience_s)
        log(f"[rank {rank}] leaves ({LEAVE.name}); {others} continue.")
        return True

    def stepped(self, steps: int, experience: Experience) -> None:
        """Count steps of this rank's environments, and hand them to the replay. Waits while many are under way."""
        with self._changed:
            self._node.stepped(steps)
            self._members.send_stop()
            block = self._node.experienced(experience)
        if block is not None:
            self._experience.append(block)
        self._transport.poll()
        self._wait_until(self._replay_keeps_up)

    def next_batch(self, timeout_s: float = 0.0) -> Batch | None:
        """Return a minibatch to learn from, if there is one or one comes within `timeout_s`."""
        self._transport.poll()
        with self._changed:
            batch = self._node.next_batch()
            if batch is None and timeout_s > 0:
                self.wait(timeout_s)
                batch = self._node.next_batch()
        return batch

    @property
    def samples_itself(self) -> bool:
        """True if this rank's learner samples its own replay and no other."""
        return self._node.samples_itself

    def poll(self) -> None:
        """Move messages on, in the midst of something long."""
        self._transport.poll()

    def send_gradient(self, gradient: Tensor) -> None:
        """Send a gradient to the shards, when they have answered the one before."""
        self._wait_until(lambda: self._node.may_send_gradient)
        with self._changed:
            if self._node.budget.stop is Stop.NONE:
                self._node.send_gradient(gradient)
        self._transport.poll()

    def idle(self) -> None:
        """Wait asleep until a message comes, on a rank that only answers others."""
        with self._changed:
            self.wait(0.1)

    def close(self, timeout_s: float) -> Stop:
        with self._changed:
            self._members.send_stop()  # after the barrier that the transport closes with, nothing may be sent
        self._transport.close(timeout_s)
        self._raise_failure()
        budget = self._node.budget
        has_left = self._members.has_left
        end = agree_on_end(self._comm, budget.stop, budget.steps_by_rank, timeout_s, has_left)
        budget.agreed(end.steps_by_rank, end.stop)
        self._forget_all_but(end.living)
        budget.stayed(end.stayed)
        return end.stop

    def abandon(self) -> None:
        self._transport.abandon()

    def final_parameters(self, timeout_s: float) -> Tensor:
        """Put the shards' slices together."""

        def join(survivors: Survivors) -> tuple[Tensor, Sequence[int]]:
            rules, shard = self._node.rules, self._node.shard
            whole = torch.zeros(rules.wire.num_parameters)
            if shard is not None:
                whole[rules.slices[rules.roles.shards.index(self._comm.rank)]] = shard.parameters
            survivors.reduce(whole.numpy(), "sum")
            return whole, survivors.members

        final, members = self._comm.with_survivors(join, timeout_s)
        self._forget_all_but(members)
        self._members.judge_deaths()  # also if this rank had left: it may be the first of those that are there
        self._raise_failure()
        return final

    def metrics(self) -> dict[str, Any]:
        node = self._node
        with self._changed:
            counts, node.counts = node.counts, Counter()
            figures = {key: counts[key] for key in _COUNTS}
            for part in (node.shard, node.store):
                figures |= part.take_figures() if part is not None else {}
        not_finite = figures.get("rewards_not_finite", 0)
        if not_finite and not self._said_not_finite:
            self._said_not_finite = True
            log(
                f"[rank {self._comm.rank}] left {not_finite} transitions out in which environments failed. "
                "Later ones are only counted ('rewards_not_finite')."
            )
        return figures

    def state(self) -> ExchangeState:
        self._raise_failure()  # a dead shard's last checkpoint is to be read
        with self._changed:
            budget, shards = self._node.budget, self.roles.shards
            lost = [rank for rank in budget.lost if rank not in shards]  # so, too, if this rank was about to leave
            return ExchangeState(budget.steps_by_rank.tolist(), budget.base_steps, lost=lost)

    def shard_state(self) -> tuple[dict[str, Tensor], int]:
        """Return copies of this rank's slices and their version, for the checkpoint; ({}, 0) without a shard."""
        with self._changed:
            shard = self._node.shard
            if shard is None:
                return {}, 0
            tensors = {"parameters": shard.parameters, "squares": shard.squares, "target": shard.target}
            return {name: tensor.clone() for name, tensor in tensors.items()}, shard.version

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until `condition()` holds or training ends. With the lock held, it is looked at after each message."""
        wait = LongWait(self._comm.rank, "the answer of a shard or a replay")
        while True:
            with self._changed:
                if condition() or self.stop is not Stop.NONE:
                    return
                self.wait(_NAP_S)
            if self.interrupt.signal is not None:
                self.stop_now(Stop.SIGNAL)
            wait.look()

    def wait(self, timeout_s: float) -> None:
        """Wait asleep until a message comes. With the lock held, which is given up meanwhile."""
        begin = time.perf_counter()
        self._transport.hurry(True)
        self._changed.wait(timeout_s)
        self._transport.hurry(False)
        self._waited_since(begin)

    def _replay_keeps_up(self) -> bool:
        self._experience = [block for block in self._experience if block.pending]
        return len(self._experience) <= _MOST_UNDER_WAY or self._node.replay_is_silent

    def _forget_all_but(self, living: Sequence[int]) -> None:
        """Count the ranks that have not come to the end as dead. Raises EndError if one served a shard."""
        for rank in set(self._node.budget.living) - set(living):
            self._members.peer_died(rank)
        self._raise_failure()

    def _raise_failure(self) -> None:
        self._transport.raise_failure()
        if self._members.fault:
            raise EndError(self._members.fault)

    # ---- whichever thread has the lock ---------------------------------------------------------------------------

    def _send(self, rank: int, message: Message, data: np.ndarray) -> Bytes:
        begin_s, packet = time.perf_counter(), Bytes(data)
        self._transport.send(rank, packet)
        if self.trace is not None:
            self.trace.sent(message.kind.name, rank, message.round, len(data), begin_s)
        return packet

    def on_message(self, message: Received) -> None:
        begin_s = time.perf_counter()
        came = self._take_in(message)
        if self.trace is not None:
            kind, round_ = (came.kind.name, came.round) if came is not None else ("unreadable", 0)
            self.trace.received(kind, message.source, round_, message.took_s, begin_s)

    def _take_in(self, message: Received) -> Message | None:
        """Do what a message asks for, as `Node.on_message`."""
        with self._changed:
            came = self._node.on_message(message.source, message.data)
            self._members.send_stop()
            while self._node.refusals:
                log(f"[rank {self._comm.rank}] {self._node.refusals.popleft()}. Later ones are only counted.")
                if self.trace is not None:
                    self.trace.mark("refused a message", message.source)
            self._changed.notify_all()
        return came

    def on_tick(self) -> None:
        with self._changed:
            watch = self._members.watch
            before = set(watch.silent)
            self._members.look(self._transport.now_s())
            for rank in sorted(before ^ watch.silent):
                answers = f"has not answered for {watch.patience_s:g} s" if rank in watch.silent else "answers again"
                log(f"[rank {self._comm.rank}] rank {rank} {answers}")

    def on_death(self, rank: int) -> None:
        with self._changed:
            self._members.peer_died(rank)
            self._members.send_stop()
            self._changed.notify_all()
        if self.trace is not None:
            self.trace.mark("death", rank)


_COUNTS = ("gradients_sent", "parameters_received", "bytes_sent", "messages_refused", "steps_not_sent")
