"""The replay of a rank: how often it may be sampled, by whom, and of what."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.gorila.replay import Experience, Replay
from pala.gorila.store import ReplayStore, check_memory
from pala.system.errors import PalaError

SPACE = Box(0, 255, (1,), np.uint8)
NUM_ENVS = 3


def make_store(actors=(0,), capacity_steps=30, minibatch_size=2, **limits) -> ReplayStore:
    limits = {"min_steps": 0, "update_period_steps": 1} | limits
    rng = np.random.default_rng(0)
    store = ReplayStore(actors, capacity_steps, NUM_ENVS, SPACE, 1, minibatch_size=minibatch_size, rng=rng, **limits)
    for actor in actors:
        store.begin(actor, np.zeros((NUM_ENVS, 1), np.uint8))
    return store


def play(store: ReplayStore, actor: int, steps: int = 1, truncated: bool = False) -> None:
    """The rewards tell who played, and when."""
    actions, frames = np.zeros(NUM_ENVS, np.int64), np.zeros((NUM_ENVS, 1), np.uint8)
    ends, nowhere = np.full(NUM_ENVS, truncated), np.zeros(NUM_ENVS, bool)
    for step in range(steps):
        rewards = np.arange(NUM_ENVS, dtype=np.float32) + 1000 * actor + NUM_ENVS * step
        store.add(actor, Experience(actions, rewards, nowhere, ends, ends, frames, frames[ends]))


def serve(store: ReplayStore) -> list[int]:
    return [learner for learner, _ in store.serve()]


# ---- how often -------------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(["add", "ask", "ask", "serve", "forget"]), st.sampled_from([4, 7, 9])), max_size=80
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(moves, st.integers(0, 40), st.integers(1, 10))
@pytest.mark.slow
def test_a_minibatch_for_each_period_of_steps(moves, min_steps, period):
    """Never more, never fewer while somebody waits, and in the order of asking."""
    store = make_store((4, 7, 9), min_steps=min_steps, update_period_steps=period)
    steps = served = 0
    waiting: list[int] = []
    for what, rank in moves:
        if what == "add":
            play(store, rank)
            steps += NUM_ENVS
        elif what == "ask":
            store.ask(rank)
            if rank not in waiting:
                waiting.append(rank)
        elif what == "forget":
            store.forget(rank)
            waiting = [other for other in waiting if other != rank]
        else:
            paid = len(range(min_steps + period, steps + 1, period))  # after which step each may come
            due = waiting[: paid - served]
            assert serve(store) == due
            served += len(due)
            waiting = waiting[len(due) :]
            assert store.owed == paid - served


@pytest.mark.slow
def test_nothing_is_served_before_enough_is_there_and_then_without_drift():
    store = make_store(min_steps=100, update_period_steps=7, capacity_steps=30)  # overwritten ones count as well
    for learner in range(5000):
        store.ask(learner)
    counts = []
    for _ in range(3000):
        play(store, 0)
        counts.append(len(store.serve()))
    assert sum(counts) == (3000 * NUM_ENVS - 100) // 7
    assert counts.index(1) == -(-(100 + 7) // NUM_ENVS) - 1
    assert max(counts) == 1


def test_a_memory_of_gaps_serves_nobody():
    store = make_store(capacity_steps=NUM_ENVS)
    store.ask(1)
    play(store, 0, truncated=True)
    assert (len(store), serve(store)) == (0, [])
    play(store, 0)
    assert serve(store) == [1]


# ---- of what ---------------------------------------------------------------------------------------------------------


def test_all_transitions_of_all_actors_are_as_likely():
    """A replay's share is its length's: choosing the replay first would draw the shortest eight times as often."""
    lengths = {2: 4, 5: 12, 6: 32}  # steps of three environments
    store = make_store(tuple(lengths), capacity_steps=1000, minibatch_size=64)
    for actor, steps in lengths.items():
        play(store, actor, steps)
    assert len(store) == NUM_ENVS * 48
    for learner in range(store.owed):
        store.ask(learner)
    rewards = np.concatenate([batch.rewards for _, batch in store.serve()])
    expected = len(rewards) / len(store)
    assert expected == 64
    drawn, counts = np.unique(rewards, return_counts=True)
    assert len(drawn) == len(store)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    by_actor = np.bincount(rewards.astype(int) // 1000)[list(lengths)]
    assert np.abs(by_actor / len(rewards) - np.array([4, 12, 32]) / 48).max() < 0.02


def test_of_a_dead_actor_the_replay_stays():
    store = make_store((1, 2), minibatch_size=200)
    play(store, 1, 2)
    play(store, 2, 2)  # and then no more of 1
    store.ask(3)
    ((_, batch),) = store.serve()
    assert set(batch.rewards // 1000) == {1, 2}
    assert all(len(array) == 200 for array in batch)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("available_bytes", [1 << 30, 3 << 29, 100 << 20])
def test_the_capacity_that_is_named_fits(available_bytes):
    """Two of a job's four ranks are on this host; nothing of it is written."""

    def reserved_bytes(capacity_steps: int) -> int:
        return 2 * Replay(capacity_steps // 4, 4, Box(0, 255, (4, 84, 84), np.uint8), 4).memory_bytes

    reserved = reserved_bytes(1_000_000)
    check_memory(reserved, int(reserved / 0.89), 1_000_000)
    with pytest.raises(PalaError, match="a tenth must stay free"):
        check_memory(reserved, int(reserved / 0.91), 1_000_000)
    with pytest.raises(PalaError, match=r"3\.3 GiB, but .* lower 'gorila.replay_capacity_steps'") as caught:
        check_memory(reserved, available_bytes, 1_000_000)
    fitting = int(re.search(r"to about ([\d,]+),", str(caught.value))[1].replace(",", ""))
    check_memory(reserved_bytes(fitting), available_bytes, fitting)
    assert 0.85 * available_bytes < reserved_bytes(fitting)
