"""Gorila after hostile messages: nothing that was not played is joined, and the ranks learn on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pala.comm.base import Bytes
from pala.envs.vector import Step
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.wire import Message, Refusal
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.gorila.node import Node, Rules
from pala.gorila.replay import Batch, experience_of, reset_frames
from pala.gorila.roles import assign
from pala.gorila.store import ReplayStore
from pala.networks.network import FlatParameters
from support.fuzzing import damaged, damages, fuzz
from support.gorila_ranks import CPU, GLOBAL, Rank, make_config, make_network, make_ranks, play
from support.gorila_ranks import without_patience as without_patience
from support.played import Game, Row, told

# ---- what is joined --------------------------------------------------------------------------------------------------

REPLAY, ACTOR = 1, 3
NUM_ENVS, CAPACITY = 2, 60
ends = st.lists(st.sampled_from(["on", "on", "on", "life", "over", "limit"]), min_size=NUM_ENVS, max_size=NUM_ENVS)


class Pair:
    """An actor and its replay, whose messages pass through the test's hands; and all that was really played."""

    def __init__(self, frame_stack: int) -> None:
        self.game, self.frame_stack = Game(NUM_ENVS, frame_stack, (np.uint8, (2, 2))), frame_stack
        config = make_config(NUM_ENVS, **GLOBAL)
        flat, roles = FlatParameters(make_network(), CPU), assign(config.gorila, 4)
        self.rules = Rules.of(config, roles, 4, flat, self.game.space, 10**6, frame_stack)
        self.store = ReplayStore(
            [ACTOR], CAPACITY, NUM_ENVS, self.game.space, frame_stack, min_steps=1, update_period_steps=1,
            minibatch_size=200, rng=np.random.default_rng(0),
        )  # fmt: skip
        self.sent: list[bytes] = []
        self.actor, self.replay = self.node(ACTOR, None), self.node(REPLAY, self.store)
        self.played: set[Row] = set()
        self.newest: set[Row] = set()
        self.reset()

    def node(self, rank: int, store: ReplayStore | None) -> Node:
        def send(peer: int, data: np.ndarray) -> Bytes:
            self.sent.append(data.tobytes())
            return Bytes(data)

        return Node(StepBudget(rank, 4, 10**9), self.rules, 0, None, store, send)

    def reset(self) -> bytes:
        self.observations = self.game.reset()
        self.actor.reset(reset_frames(self.observations, self.frame_stack))
        return self.sent[-1]

    def step(self, how: list[str]) -> bytes:
        step: Step = self.game.step(how)
        actions = np.arange(NUM_ENVS) + self.game.num_frames
        after = step.observations.copy()
        after[step.truncated] = step.final_observations
        self.newest = set(told(Batch(self.observations, actions, step.rewards, after, step.terminated)))
        self.played |= self.newest
        self.observations = step.observations.copy()
        self.actor.experienced(experience_of(actions, step, self.frame_stack))
        return self.sent[-1]

    def hear(self, data: bytes) -> None:
        self.replay.on_message(ACTOR, np.frombuffer(bytearray(data), np.uint8))

    def tells_the_truth(self, data: bytes, of: bytes) -> bool:
        """Whether these bytes, made of those, are refused or say of a step what they said before: in any other case
        nobody can tell."""
        header, bytes_ = self.rules.wire.control_bytes, np.frombuffer(bytearray(data), np.uint8)
        message = self.rules.wire.decode(bytes_)
        if isinstance(message, Refusal) or message.sender != ACTOR:
            return True
        formats = {Kind.EXPERIENCE: self.rules.experience, Kind.RESET: self.rules.frames}
        if message.kind in formats and isinstance(formats[message.kind].decode(bytes_[header:]), Refusal):
            return True
        was = self.rules.wire.decode(np.frombuffer(of, np.uint8))
        assert not isinstance(was, Refusal)
        return (message.kind, message.round, data[header:]) == (was.kind, was.round, of[header:])

    def drawn(self) -> set[Row]:
        return set(told(self.store.sample())) | set(told(self.store.sample())) if len(self.store) else set()


fates = st.one_of(
    st.sampled_from(["comes", "comes", "comes", "lost", "twice", "reset", "reset lost"]),
    damages,
    st.binary(max_size=200),
    st.integers(0, 50),
)


@pytest.mark.slow
def test_nothing_is_joined_that_was_not_played_whatever_was_refused() -> None:
    @fuzz(60)
    @given(st.sampled_from([1, 4]), st.lists(st.tuples(ends, fates), max_size=25))
    def check(frame_stack: int, steps: list[tuple[list[str], Any]]) -> None:
        pair = Pair(frame_stack)
        pair.hear(pair.sent[0])
        for how, fate in steps:
            if fate in ("reset", "reset lost"):
                first = pair.reset()
                if fate == "reset":
                    pair.hear(first)
            data = pair.step(how)
            if isinstance(fate, bytes):
                pair.hear(fate)
            elif isinstance(fate, int):  # an old one once more
                pair.hear(pair.sent[fate % len(pair.sent)])
            elif isinstance(fate, list):
                harmed = damaged(data, fate)
                pair.hear(harmed if pair.tells_the_truth(harmed, data) else data)
                continue
            for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                pair.hear(data)
        assert pair.drawn() <= pair.played
        for _ in range(6):
            pair.hear(pair.step(["on"] * NUM_ENVS))
        assert pair.newest <= pair.drawn() <= pair.played

    check()


# ---- who learns on ---------------------------------------------------------------------------------------------------

HOSTILE = (
    st.tuples(st.sampled_from([kind for kind in Kind if kind not in ABOUT_MEMBERS]), damages)
    | st.tuples(
        st.sampled_from([kind for kind in ABOUT_MEMBERS if kind is not Kind.STOP]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 40) | st.integers(0, 2**64 - 1),
    )
    | st.tuples(st.integers(0, 3), st.integers(0, 3), st.binary(max_size=300) | st.sampled_from(list(Kind)))
)


def forget_the_end(cluster: list[Rank]) -> None:
    """What counters say that no rank can check."""
    for rank in cluster:
        budget = rank.node.budget
        budget.stop, budget.stop_told, budget.sum_steps = Stop.NONE, False, 0
        budget.steps_by_rank = np.zeros(len(cluster), np.uint64)


def be_hostile(cluster: list[Rank], what: tuple) -> None:
    """A message of the last ones harmed, or in another's place."""
    last = {kind: (rank.rank, *sent) for rank in cluster for kind, sent in rank.last.items()}
    if len(what) == 2:
        kind, harm = what
        if kind in last:
            sender, receiver, data = last[kind]
            cluster[receiver].hear(sender, damaged(data, harm))
        return
    if len(what) == 4:
        kind, source, receiver, number = what
        if kind is Kind.LEAVE and number == 1 + source * len(cluster) + source:
            return  # then it has left
        data = np.empty(cluster[source].wire.control_bytes, np.uint8)
        message = Message(kind, source, number, 1.0, Stop.NONE, np.zeros(len(cluster), np.uint64))
        cluster[source].wire.encode(message, data)
        cluster[receiver].hear(source, data.tobytes())
        return
    source, receiver, data = what
    if not isinstance(data, bytes):
        data = last[data][2] if data in last else b""
    cluster[receiver].hear(source, data)


@pytest.mark.slow
def test_after_whatever_was_refused_or_taken_the_ranks_learn_on() -> None:
    """Once they have asked again for what was lost."""

    @fuzz(25)
    @given(st.lists(st.tuples(HOSTILE, st.booleans()), min_size=1, max_size=8))
    def check(hostile: list[tuple[tuple, bool]]) -> None:
        cluster, times_s = make_ranks(4, make_config(**GLOBAL)), itertools.count(step=15.0)
        shard = cluster[0].shard
        assert shard is not None

        def time_passes(*_: float) -> None:
            now_s = next(times_s)
            for rank in cluster:
                rank.node.look(now_s)

        for rank in cluster:
            rank.exchange.wait = time_passes  # type: ignore[method-assign]
        lockstep = play(cluster)
        for _ in range(30):
            next(lockstep)
        for what, goes_on in hostile:
            be_hostile(cluster, what)
            forget_the_end(cluster)
            for _ in range(2 * goes_on):
                next(lockstep)
        for _ in range(20):
            time_passes()
        before = shard.version
        for _ in range(40):
            next(lockstep)
        assert shard.version >= before + 8
        assert bool(shard.parameters.isfinite().all()) and len(cluster[2].node.batches) <= 1

    check()
