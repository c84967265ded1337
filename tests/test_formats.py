"""Experience and minibatches to bytes and back: nothing is lost."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.gorila.formats import batch_format, experience_format, frames_format
from pala.gorila.replay import Batch, Experience, Replay, experience_of, reset_frames
from pala.system.errors import PalaError
from support.played import FRAMES, VECTORS, Game, told

reproducible = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Box, int]:
    """A space and a frame stack."""
    dtype = draw(st.sampled_from([np.uint8, np.float32, np.float64, np.int16, np.bool_]))
    stack = draw(st.integers(1, 3))
    frame = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    return Box(0, 1, frame if stack == 1 else (stack, *frame), dtype), stack


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def some_experience(rng: np.random.Generator, num_envs: int, space: Box, stack: int) -> Experience:
    ends = rng.choice(["on", "life", "over", "limit"], num_envs)
    frame = space.shape if stack == 1 else space.shape[1:]
    return Experience(
        rng.integers(0, 5, num_envs),
        rng.normal(size=num_envs).astype(np.float32),
        np.isin(ends, ["life", "over"]),
        ends == "limit",
        np.isin(ends, ["over", "limit"]),
        numbers(rng, (num_envs, *frame), space.dtype),
        numbers(rng, (np.count_nonzero(ends == "limit"), *frame), space.dtype),
    )


@reproducible
@given(spaces(), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_what_is_encoded_is_decoded(spaces, num_envs, seed):
    (space, stack), rng = spaces, np.random.default_rng(seed)
    experience = some_experience(rng, num_envs, space, stack)
    observations = [numbers(rng, (num_envs, *space.shape), space.dtype) for _ in range(2)]
    batch = Batch(observations[0], experience.actions, experience.rewards, observations[1], experience.terminated)
    for of, value in (
        (experience_format(num_envs, space, stack), experience),
        (batch_format(num_envs, space), batch),
        (frames_format(num_envs, space, stack), experience.frames),
    ):
        buffer = np.full(of.sizes[-1] + 9, 0xEE, np.uint8)
        data = of.encode(value, buffer)
        assert len(data) in of.sizes
        assert np.shares_memory(data, buffer)
        assert (buffer[len(data) :] == 0xEE).all()
        arrays, decoded = ([one] if isinstance(one, np.ndarray) else one for one in (value, of.decode(data)))
        assert type(arrays) is type(decoded)
        assert all(map(same, arrays, decoded))
        assert all(array.flags.aligned and np.shares_memory(array, data) for array in decoded if array.size)


def test_the_layout_by_hand():
    """Another version must not read this one's bytes as something else."""
    experience = Experience(
        np.array([1, 4]), np.array([0.5, -1.0], np.float32), np.array([True, False]), np.array([False, True]),
        np.array([False, True]), np.array([[1, 2], [3, 4]], np.uint8), np.array([[5, 6]], np.uint8),
    )  # fmt: skip
    of = experience_format(2, Box(0, 255, (4, 2), np.uint8), frame_stack=4)
    data = of.encode(experience, np.zeros(100, np.uint8))
    flags, frames = [1, 0, 0, 1, 0, 1], [1, 2, 3, 4, 5, 6]
    assert data.tobytes() == struct.pack("<2q2f6B6B", 1, 4, 0.5, -1.0, *flags, *frames)
    assert list(of.sizes) == [34, 36, 38]
    observations = np.arange(3, dtype=np.float32).reshape(1, 3)
    batch = Batch(observations, np.array([2]), np.array([9.0], np.float32), observations + 5, np.array([True]))
    data = batch_format(1, Box(-1, 1, (3,))).encode(batch, np.zeros(100, np.uint8))
    assert data.tobytes() == struct.pack("<q3ff3fB", 2, 0.0, 1.0, 2.0, 9.0, 5.0, 6.0, 7.0, 1)


def test_what_cannot_be_sent_is_one_sentence():
    with pytest.raises(PalaError, match=r"more than 2 GiB .* 'gorila.minibatch_size'"):
        batch_format(1_000_000, Box(0, 255, (4, 84, 84), np.uint8))


@pytest.mark.parametrize(("kind", "frame_stack"), [(FRAMES, 3), (VECTORS, 1)])
def test_a_memory_fed_by_messages_is_the_same(kind, frame_stack):
    """One buffer for all messages: what is kept must have been copied."""
    game, rng = Game(3, frame_stack, kind), np.random.default_rng(0)
    near, far = (Replay(60, 3, game.space, frame_stack) for _ in range(2))
    experiences = experience_format(3, game.space, frame_stack)
    resets, batches = frames_format(3, game.space, frame_stack), batch_format(8, game.space)
    buffer = np.zeros(max(of.sizes[-1] for of in (experiences, resets, batches)), np.uint8)
    frames = reset_frames(game.reset(), frame_stack)
    near.begin(frames)
    far.begin(resets.decode(resets.encode(frames, buffer)))
    for step in range(50):
        ends = rng.choice(["on", "on", "on", "life", "over", "limit"], 3)
        experience = experience_of(np.arange(3) + step, game.step(list(ends)), frame_stack)
        near.add(experience)
        far.add(experiences.decode(experiences.encode(experience, buffer)))
        ours, theirs = (replay.sample(8, np.random.default_rng(step)) for replay in (near, far))
        assert told(ours) == told(batches.decode(batches.encode(theirs, buffer)))
    for here, there in zip([near._heads, *near._rings()], [far._heads, *far._rings()], strict=True):
        assert here.tobytes() == there.tobytes()
