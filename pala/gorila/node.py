"""One rank of Gorila as a state machine: what it does with messages, in all its roles. No MPI, no threads, no clock.

    actor ──EXPERIENCE──▶ replay ──BATCH──▶ learner ──GRADIENT──▶ shards ──PARAMETERS──▶ learner, actor

What a rank has to tell itself goes without a message. Every message carries everybody's steps (`StepBudget`). Once
training ends, a rank answers no more: it applies the gradients that still come, and that is all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from pala.comm.base import Bytes
from pala.config import Config, GorilaConfig
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.wire import NOTHING, Format, Message, Sizes, Wire
from pala.gorila.formats import ArraysFormat, batch_format, experience_format, frames_format
from pala.gorila.members import Members
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.gorila.replay import Batch, Experience
from pala.gorila.roles import Roles
from pala.gorila.shard import Shard, slices, targets_at
from pala.gorila.store import ReplayStore
from pala.networks.network import FlatParameters

Send = Callable[[int, Message, np.ndarray], Bytes]
"""(rank, message, its bytes) -> the packet, which takes the bytes over."""


class Rules(NamedTuple):
    """The configuration, first roles, layout and messages that all ranks of a run share."""

    config: GorilaConfig
    roles: Roles  # when training begins
    slices: list[slice]  # of the flat parameters, each shard's
    frames: ArraysFormat[np.ndarray]
    experience: ArraysFormat[Experience]
    batch: ArraysFormat[Batch]
    wire: Wire

    @classmethod
    def of(
        cls,
        config: Config,
        roles: Roles,
        num_ranks: int,
        flat: FlatParameters,
        space: gymnasium.Space,
        frame_stack: int,
    ) -> Rules:
        """Return the rules of these roles. `flat`: any rank's parameters. Raises PalaError for more shards than
        parameters."""
        num_envs = config.env.num_envs
        parts = slices(flat.data.numel(), len(roles.shards))
        frames = frames_format(num_envs, space, frame_stack)
        experience = experience_format(num_envs, space, frame_stack)
        batch = batch_format(config.gorila.minibatch_size, space)
        arrays = {Kind.RESET: frames.sizes, Kind.EXPERIENCE: experience.sizes, Kind.BATCH: batch.sizes}
        return cls(config.gorila, roles, parts, frames, experience, batch, _make_wire(num_ranks, flat, parts, arrays))


def _make_wire(num_ranks: int, flat: FlatParameters, parts: list[slice], arrays: dict[Kind, range]) -> Wire:
    """Return the messages of a run of Gorila. `arrays`: bytes that those of steps may have."""
    lengths = [4 * (part.stop - part.start) for part in parts]
    part: Sizes = {Format.FLOAT32: range(min(lengths), max(lengths) + 1, 4)}
    sizes: dict[Kind, Sizes] = {
        **dict.fromkeys((Kind.GRADIENT, Kind.GRADIENT_AND_FETCH, Kind.PARAMETERS, Kind.TARGET), part),
        **dict.fromkeys((*_QUESTIONS.values(), *ABOUT_MEMBERS), NOTHING),
        **{kind: {Format.ARRAYS: bytes_} for kind, bytes_ in arrays.items()},
    }
    return Wire(num_ranks, flat.data.numel(), flat.signature, sizes)


class Copy:
    """A rank's copy of what the shards serve: the version of each slice that it took last, and what has come since."""

    def __init__(self, version: int, num_shards: int) -> None:
        self.versions = [version] * num_shards
        self.arrived: dict[int, tuple[int, Tensor]] = {}  # shard -> version and slice

    def take(self, flat: Tensor, parts: list[slice]) -> bool:
        """Copy what has come into the network's flat parameters; return whether it is of another version."""
        before = list(self.versions)
        for index, (version, values) in self.arrived.items():
            flat[parts[index]].copy_(values)
            self.versions[index] = version
        self.arrived.clear()
        return self.versions != before

    def newest(self, index: int) -> int:
        """Return the newest version of a slice that is here."""
        return self.arrived[index][0] if index in self.arrived else self.versions[index]

    def take_own(self, index: int, version: int, values: Tensor) -> None:
        """Let a slice that this rank serves itself come, if it is new."""
        if version > self.versions[index]:
            self.arrived[index] = version, values


class Node:
    """One rank. The loop's thread calls the methods; `on_message` comes with messages.

    `members` know who is there, and hear of deaths.
    """

    def __init__(
        self,
        budget: StepBudget,
        rules: Rules,
        version: int,
        shard: Shard | None,
        store: ReplayStore | None,
        send: Send,
        members: Members | None = None,
    ) -> None:
        """Begin with parameters of this `version`. `shard`, `store`: None on a rank without that role.

        `members`: the knowledge of a spare that has slept; it has to `join`.
        """
        self.budget, self._rank = budget, budget.rank
        self.rules, self._config = rules, rules.config
        self._wire = rules.wire
        self._parts, self._send_bytes = rules.slices, send
        self.shard, self.store = shard, store
        self.parameters = Copy(version, len(self._parts))
        self.target = Copy(targets_at(version, self._config), len(self._parts))
        self._open: set[tuple[int, Kind]] = set()  # rank and what it owes
        # Steps of all ranks before which no replay is sampled: all begin empty. A spare's peers have learned.
        self._learns_after = budget.global_steps + self._config.min_replay_steps if members is None else 0
        self._samples = False  # whether this rank has begun to learn
        self._sampled: tuple[int, ...] = ()  # ranks whose replay it samples then
        self._num_gradients = self._steps_since_fetch = self._num_steps = 0
        self.batches: deque[tuple[int, Batch]] = deque()  # replay rank, minibatch
        self.counts: Counter[str] = Counter()
        self.refusals: deque[str] = deque()  # sentences, the first of each sender
        self._next_step: dict[int, int] = {}  # actor -> number of its step, or new games, that is to come
        self._refused: set[int] = set()
        self.members = members or Members(budget, rules.roles, self._config.patience_s, self._send)
        self.members.tell = self._send  # of a rank that has slept, its sleeping node's before
        self.members.on_gone, self.members.on_change = self._forget, self._share_out_replays

    @property
    def roles(self) -> Roles:
        """The ranks that have each role now."""
        return self.members.roles

    # ---- actor ---------------------------------------------------------------------------------------------------

    def stepped(self, steps: int) -> None:
        """Count steps of this rank's environments; ask for parameters if it is time and no learner did."""
        self.budget.add_steps(steps)
        period = self._config.parameters_period_updates * self._config.update_period_steps
        # Before learners can learn, parameters are what all begin with. Others hear too late how far learners are.
        knows_better = self._rank in self.roles.learners and self.budget.global_steps < self._learns_after
        if self._steps_since_fetch >= period and not knows_better:
            self.ask_for_parameters()
        self._steps_since_fetch += steps  # those just made: a learner on this rank may still fetch after them

    def reset(self, frames: np.ndarray) -> None:
        """Begin new games in this rank's environments; frames [B, *frame]."""
        replay = self.roles.replay_of(self._rank)
        if replay == self._rank and self.store is not None:
            self.store.begin(self._rank, frames)
        else:
            self._num_steps += 1
            self._send_arrays(replay, Kind.RESET, self.rules.frames, frames, self._num_steps)

    def experienced(self, experience: Experience) -> Bytes | None:
        """Hand a step to the replay, after `stepped`. Returns the message, if one is needed: a silent replay gets
        none."""
        replay = self.roles.replay_of(self._rank)
        if replay == self._rank and self.store is not None:
            self.store.add(self._rank, experience)
            self._serve()
            return None
        self._num_steps += 1
        if self.replay_is_silent:
            self.counts["steps_not_sent"] += len(experience.actions)
            return None
        return self._send_arrays(replay, Kind.EXPERIENCE, self.rules.experience, experience, self._num_steps)

    @property
    def replay_is_silent(self) -> bool:
        """True if the replay of this actor does not answer, or is gone."""
        replay = self.roles.replay_of(self._rank)
        return replay in self.members.watch.silent or replay not in self.budget.living

    def take_parameters(self, flat: Tensor) -> bool:
        """Copy what has come since the last call, and tell whether anything has. `flat`: the network's parameters."""
        if self.shard is not None:
            self.parameters.take_own(self._shard_index, self.shard.version, self.shard.parameters)
        changed = self.parameters.take(flat, self._parts)
        for index, rank in enumerate(self.roles.shards):
            is_old = targets_at(self.parameters.versions[index], self._config) > self.target.newest(index)
            is_asked = rank == self._rank or (rank, Kind.TARGET) in self._open
            if is_old and not is_asked and self._rank in self.roles.learners:
                self._ask(rank, Kind.TARGET)
        return changed

    def take_target(self, flat: Tensor) -> bool:
        """Copy what has come of the target network since the last call, and tell whether anything has."""
        if self.shard is not None:
            self.target.take_own(self._shard_index, self.shard.num_targets, self.shard.target)
        return self.target.take(flat, self._parts)

    @property
    def _shard_index(self) -> int:
        return self.roles.shards.index(self._rank)

    # ---- learner -------------------------------------------------------------------------------------------------

    def ask_for_batches(self) -> None:
        """Ask every replay that this learner samples for one minibatch, once, when training begins."""
        self._samples = True
        self._share_out_replays()

    def next_batch(self) -> Batch | None:
        """Return the next minibatch, if there is one, and ask for another."""
        self._serve()
        if not self.batches:
            return None
        rank, batch = self.batches.popleft()
        if rank in self._sampled:
            self._ask(rank, Kind.BATCH)
        return batch

    @property
    def samples_itself(self) -> bool:
        """True if this learner samples its own rank's replay and no other."""
        return self._sampled == (self._rank,)

    @property
    def may_send_gradient(self) -> bool:
        """False while the answer to the last gradient that asked for one is still to come, if the next one asks."""
        return not (self._next_fetches and self._is_owed(Kind.PARAMETERS))

    def send_gradient(self, gradient: Tensor) -> None:
        """Send each shard its part of a flat gradient, which is finite and of the parameters that were last taken."""
        kind = Kind.GRADIENT_AND_FETCH if self._next_fetches else Kind.GRADIENT
        self._num_gradients += 1
        host = gradient.detach().cpu()
        for index, rank in enumerate(self.roles.shards):
            part, version = host[self._parts[index]], self.parameters.versions[index]
            if rank == self._rank and self.shard is not None:
                self.shard.apply(part, version, is_finite=True)
                continue
            if kind is Kind.GRADIENT_AND_FETCH:
                self._open.add((rank, Kind.PARAMETERS))
                self._steps_since_fetch = 0
            self._send(rank, kind, version, part.numpy())
        self.counts["gradients_sent"] += 1

    def ask_for_parameters(self) -> None:
        """Ask the shards, unless parameters are on their way already. For a learner without a gradient to send, too,
        whose period would never end."""
        if self._is_owed(Kind.PARAMETERS):
            return
        self._steps_since_fetch = 0
        for rank in self.roles.shards:
            if rank != self._rank:
                self._ask(rank, Kind.PARAMETERS)

    @property
    def _next_fetches(self) -> bool:
        return (self._num_gradients + 1) % self._config.parameters_period_updates == 0

    # ---- spare ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Train from now on, as a spare that is needed, and ask for a model; `has_model` tells when it has come."""
        self.members.join()
        for rank in self.roles.shards:
            self._ask(rank, Kind.PARAMETERS)
            self._ask(rank, Kind.TARGET)

    @property
    def has_model(self) -> bool:
        """True if nothing of the model is still to come."""
        return not (self._is_owed(Kind.PARAMETERS) or self._is_owed(Kind.TARGET))

    # ---- what comes ----------------------------------------------------------------------------------------------

    def on_message(self, source: int, data: np.ndarray) -> Message | None:
        """Take in a message from any rank, and return it; None if it is refused, as its header is not of this job."""
        message = self._wire.decode_from(source, data)
        if isinstance(message, Message):
            self.members.hear(message)
            self._act_on(message, data[self._wire.control_bytes :])
            return message
        self.counts["messages_refused"] += 1
        if source not in self._refused:
            self._refused.add(source)
            self.refusals.append(f"refused a message from rank {source}: {message.reason}")
        return None

    def _forget(self, rank: int) -> None:
        """Expect nothing more of a rank that has died or left."""
        self._open = {(of, what) for of, what in self._open if of != rank}
        if self.store is not None:
            self.store.forget(rank)

    def _act_on(self, message: Message, payload: np.ndarray) -> None:
        """Do what a message of another role asks for, or take in what it brings."""
        if message.kind in _TO_A_SHARD:
            self._as_shard(message, payload)
        elif message.kind in _TO_A_REPLAY:
            self._as_replay(message, payload)
        elif message.kind is Kind.BATCH:
            self._open.discard((message.sender, Kind.BATCH))
            self.batches.append((message.sender, self.rules.batch.decode(payload)))
        elif message.kind in (Kind.PARAMETERS, Kind.TARGET):
            self._from_shard(message, payload)

    def _as_shard(self, message: Message, payload: np.ndarray) -> None:
        shard = self.shard
        assert shard is not None
        if message.kind in (Kind.GRADIENT, Kind.GRADIENT_AND_FETCH):
            shard.apply(torch.from_numpy(payload.view(np.float32)), message.round)
        if self.budget.stop is not Stop.NONE:
            return
        if message.kind in (Kind.FETCH, Kind.GRADIENT_AND_FETCH):
            self._send(message.sender, Kind.PARAMETERS, shard.version, shard.parameters.numpy())
        elif message.kind is Kind.FETCH_TARGET:
            self._send(message.sender, Kind.TARGET, shard.num_targets, shard.target.numpy())

    def _from_shard(self, message: Message, payload: np.ndarray) -> None:
        index, values = self.roles.shards.index(message.sender), torch.from_numpy(payload.view(np.float32))
        self._open.discard((message.sender, Kind(message.kind)))
        if message.kind is Kind.TARGET:
            self.target.arrived[index] = message.round, values
            return
        self.parameters.arrived[index] = message.round, values
        self.counts["parameters_received"] += 1

    def _as_replay(self, message: Message, payload: np.ndarray) -> None:
        source, store = message.sender, self.store
        assert store is not None
        if message.kind is Kind.SAMPLE:
            if self.budget.stop is Stop.NONE:
                store.ask(source)
                self._serve()
            return
        expected, self._next_step[source] = self._next_step.get(source), message.round + 1
        if message.kind is Kind.RESET:
            store.begin(source, self.rules.frames.decode(payload))
            return
        if message.round != expected:  # steps between were not sent
            store.lose_step(source)
        store.add(source, self.rules.experience.decode(payload))
        self._serve()

    # ---- within --------------------------------------------------------------------------------------------------

    def _share_out_replays(self) -> None:
        """Share replays out among the learners that live, and ask those that are new to this one for a minibatch."""
        if not self._samples:
            return
        self._sampled = self.roles.sampled_by(self._rank, set(self.budget.living))
        have = {rank for rank, _ in self.batches}
        for rank in self._sampled:
            if rank not in have and (rank, Kind.BATCH) not in self._open:
                self._ask(rank, Kind.BATCH)

    def _ask(self, rank: int, what: Kind) -> None:
        """Ask `rank` for `what`."""
        self._open.add((rank, what))
        if rank != self._rank:
            self._send(rank, _QUESTIONS[what])
        elif self.store is not None:
            self.store.ask(rank)

    def _is_owed(self, what: Kind) -> bool:
        return any(kind is what for _, kind in self._open)

    def _serve(self) -> None:
        if self.store is None or self.budget.stop is not Stop.NONE:
            return
        for learner, batch in self.store.serve():
            if learner == self._rank:
                self._open.discard((learner, Kind.BATCH))
                self.batches.append((learner, batch))
            else:
                self._send_arrays(learner, Kind.BATCH, self.rules.batch, batch)

    def _send(self, rank: int, kind: Kind, round_: int = 0, values: np.ndarray | None = None) -> Bytes:
        """Send a message with nothing, or with float32 values, which are copied."""
        payload = np.empty(0, np.uint8) if values is None else values.view(np.uint8)
        data = np.empty(self._wire.control_bytes + len(payload), np.uint8)
        data[self._wire.control_bytes :] = payload
        return self._post(rank, kind, round_, Format.FLOAT32, data)

    def _send_arrays(self, rank: int, kind: Kind, format_: ArraysFormat[Any], value: Any, round_: int = 0) -> Bytes:
        header = self._wire.control_bytes
        data = np.empty(header + format_.sizes[-1], np.uint8)
        used = format_.encode(value, data[header:])
        return self._post(rank, kind, round_, Format.ARRAYS, data[: header + len(used)])

    def _post(self, rank: int, kind: Kind, round_: int, format_: Format, data: np.ndarray) -> Bytes:
        """Write the header and the counters to the front of `data`, and send it."""
        message = Message(kind, self._rank, round_, 1.0, self.budget.stop, self.budget.steps_by_rank, format_)
        self._wire.encode(message, data)
        self.counts["bytes_sent"] += len(data)
        return self._send_bytes(rank, message, data)


# The question that asks for each kind.
_QUESTIONS = {Kind.PARAMETERS: Kind.FETCH, Kind.TARGET: Kind.FETCH_TARGET, Kind.BATCH: Kind.SAMPLE}
_TO_A_SHARD = (Kind.GRADIENT, Kind.GRADIENT_AND_FETCH, Kind.FETCH, Kind.FETCH_TARGET)
_TO_A_REPLAY = (Kind.RESET, Kind.EXPERIENCE, Kind.SAMPLE)
