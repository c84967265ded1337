"""The replay memory against a slow list of all that was really played."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.config import EnvConfig
from pala.envs.vector import Step, make_envs
from pala.gorila.replay import Batch, Replay, experience_of, reset_frames
from pala.system.errors import PalaError
from support.played import FRAMES, VECTORS, Game, Row, told


class History:
    """A replay memory, and beside it a list of every environment's transitions and gaps, whole stacks and all."""

    def __init__(self, replay: Replay, num_envs: int, capacity: int, frame_stack: int) -> None:
        self.replay, self.rows_per_env, self.frame_stack = replay, capacity // num_envs, frame_stack
        self.played: list[list[Row]] = [[] for _ in range(num_envs)]
        self.observations: np.ndarray | None = None
        self.missing = [0] * num_envs  # rows to come that are gaps, since a step was lost

    def begin(self, observations: np.ndarray) -> None:
        if self.observations is not None:  # new games follow
            for rows in self.played:
                rows.append(())
        self.observations = observations.copy()
        self.missing = [0] * len(self.missing)
        self.replay.begin(reset_frames(observations, self.frame_stack))

    def add(self, actions: np.ndarray, step: Step) -> None:
        after = step.observations.copy()
        after[step.truncated] = step.final_observations
        made = told(Batch(self.observations, actions, step.rewards, after, step.terminated))
        over = {episode.env_index for episode in step.episodes}
        for env, (rows, row, cut) in enumerate(zip(self.played, made, step.truncated, strict=True)):
            is_transition = np.isfinite(step.rewards[env]) and not step.failed[env]
            told_row = row if is_transition and not self.missing[env] else ()
            rows.extend([told_row, ()] if cut else [told_row])
            self.missing[env] = 0 if env in over or step.failed[env] else max(0, self.missing[env] - 1)
        self.observations = step.observations.copy()
        self.replay.add(experience_of(actions, step, self.frame_stack))

    def lose(self, step: Step) -> None:
        """A step that was played does not come."""
        self.observations = step.observations.copy()
        self.missing = [self.frame_stack] * len(self.missing)
        self.replay.lose_step()

    def newest(self) -> list[Row]:
        return [row for rows in self.played for row in rows[-self.rows_per_env :] if row]

    def check(self, rng: np.random.Generator, draws: int = 40) -> None:
        """What can be drawn is what was played last: all of it, and nothing else."""
        newest = self.newest()
        assert len(self.replay) == len(newest)
        if newest:  # of n transitions, k n draws leave one out with a probability below n exp(-k)
            drawn = {row for _ in range(draws) for row in told(self.replay.sample(len(newest), rng))}
            assert drawn == set(newest)


# ---- a planted game --------------------------------------------------------------------------------------------------


def planted(num_envs: int, rows_per_env: int, frame_stack: int, kind: tuple = FRAMES) -> tuple[Game, History]:
    game, capacity = Game(num_envs, frame_stack, kind), rows_per_env * num_envs
    history = History(Replay(capacity, num_envs, game.space, frame_stack), num_envs, capacity, frame_stack)
    history.begin(game.reset())
    return game, history


def play(game: Game, history: History, ends: list[str]) -> None:
    history.add(np.arange(len(ends)) + game.num_frames, game.step(ends))


@pytest.mark.parametrize("frame_stack", [255, 256, 257])
@pytest.mark.slow
def test_stacks_may_be_longer_than_a_byte_counts(frame_stack):
    game, history = planted(1, 300, frame_stack)
    for _ in range(290):
        play(game, history, [""])
    history.check(np.random.default_rng(0), draws=40)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_what_is_drawn_was_played(data):
    """Any ends, life losses, failures, new starts, lost steps and rewards that are not finite, checked on the way: also
    while the oldest is overwritten."""
    num_envs, kind = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([FRAMES, VECTORS]))
    frame_stack = data.draw(st.integers(1, 4)) if kind is FRAMES else 1
    game, history = planted(num_envs, data.draw(st.integers(1, 9)), frame_stack, kind)
    rng = np.random.default_rng(0)
    end = st.sampled_from(["on", "on", "on", "life", "over", "limit", "fail"])
    moves = st.lists(end, min_size=num_envs, max_size=num_envs) | st.sampled_from(["reset", "check", "lose", "NaN"])
    for move in data.draw(st.lists(moves, max_size=40)):
        if move == "reset":
            history.begin(game.reset())
        elif move == "check":
            history.check(rng)
        elif move == "lose":
            history.lose(game.step(data.draw(st.lists(end, min_size=num_envs, max_size=num_envs))))
        elif move == "NaN":
            step = game.step(["on"] * num_envs)
            step.rewards[data.draw(st.integers(0, num_envs - 1))] = data.draw(st.sampled_from([np.nan, np.inf]))
            history.add(np.arange(num_envs) + game.num_frames, step)
        else:
            play(game, history, move)
    history.check(rng)


def test_sampling_is_uniform_over_environments_and_around_gaps():
    game, history = planted(num_envs=2, rows_per_env=10, frame_stack=4)
    for _ in range(5):
        play(game, history, ["limit", "on"])
        play(game, history, ["on", "life"])
    transitions = history.newest()
    assert len(transitions) == 7 + 10  # the limits' own rows are in the first environment's ten
    drawn = told(history.replay.sample(17_000, np.random.default_rng(0)))
    counts = np.array([drawn.count(row) for row in transitions])
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_the_same_generator_draws_the_same():
    game, history = planted(num_envs=2, rows_per_env=10, frame_stack=2)
    for _ in range(8):
        play(game, history, ["on", "over"])
    batches = [told(history.replay.sample(32, np.random.default_rng(seed))) for seed in (1, 1, 2)]
    assert batches[0] == batches[1] != batches[2]


def test_nothing_is_drawn_from_an_empty_memory():
    game, history = planted(num_envs=2, rows_per_env=3, frame_stack=4)
    assert len(history.replay) == 0
    with pytest.raises(ValueError, match="empty"):
        history.replay.sample(1, np.random.default_rng(0))
    play(game, history, ["over", "limit"])
    history.check(np.random.default_rng(0))


def test_frames_that_are_not_stacked_as_ale_stacks_them_are_refused():
    with pytest.raises(PalaError, match="frame stack of 1"):
        reset_frames(np.ones((2, 4, 2, 2), np.uint8), frame_stack=4)
    game = Game(2, 4, FRAMES)
    game.reset()
    step = game.step(["over", "on"])
    step.observations[0, 0] = 1
    with pytest.raises(PalaError, match="frame stack of 1"):
        experience_of(np.zeros(2, np.int64), step, frame_stack=4)
    assert experience_of(np.zeros(2, np.int64), game.step(["on", "on"]), frame_stack=4).frames.shape == (2, 2, 2)


# ---- Atari -----------------------------------------------------------------------------------------------------------


def atari(game: str, **settings: object) -> Iterator[tuple[np.ndarray, Step]]:
    """First (observations, None), then (actions, step) forever, at random."""
    envs = make_envs(EnvConfig(f"ALE/{game}-v5", num_envs=2, **settings))
    rng = np.random.default_rng(0)
    yield envs.reset(np.array([1, 2], np.int32)), None
    while True:
        actions = rng.integers(0, envs.action_space.n, 2)
        yield actions, envs.step(actions)


@pytest.mark.parametrize(
    ("game", "settings", "steps", "ends"),
    [
        pytest.param("Breakout", {}, 260, {"life", "over"}, marks=pytest.mark.slow),
        pytest.param("Breakout", {"terminal_on_life_loss": False}, 260, {"over"}, marks=pytest.mark.slow),
        pytest.param("Seaquest", {"max_episode_frames": 500}, 260, {"life", "limit"}, marks=pytest.mark.slow),
        ("Pong", {"max_episode_frames": 100, "frame_stack": 2}, 110, {"limit"}),
        pytest.param(
            "SpaceInvaders", {"frame_stack": 1, "frame_skip": 12}, 260, {"life", "over"}, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_rebuilt_stacks_are_what_the_emulators_gave(game, settings, steps, ends):
    config = EnvConfig(**settings)
    space = Box(0, 255, (config.frame_stack, 84, 84), np.uint8)
    replay, rng = Replay(80, 2, space, config.frame_stack), np.random.default_rng(0)
    history = History(replay, 2, 80, config.frame_stack)
    playing, seen = atari(game, **settings), set()
    history.begin(next(playing)[0])
    for count, (actions, step) in zip(range(1, steps + 1), playing, strict=False):
        history.add(actions, step)
        over = np.isin([0, 1], [episode.env_index for episode in step.episodes])
        seen |= {name for name, which in (
            ("life", step.terminated & ~over), ("over", step.terminated & over), ("limit", step.truncated)
        ) if which.any()}  # fmt: skip
        if count % 36 == 0 or count == steps:
            history.check(rng, draws=12)
    assert seen == ends


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_million_atari_frames_fit_in_8_gib():
    space = Box(0, 255, (4, 84, 84), np.uint8)
    replay = Replay(1_000_000, 16, space, frame_stack=4)  # no page of it is written here
    assert 84 * 84 * 1_000_000 < replay.memory_bytes < 8 << 30
    arrays = [value for value in vars(replay).values() if isinstance(value, np.ndarray)]
    assert replay.memory_bytes <= sum(array.nbytes for array in arrays) <= replay.memory_bytes + 2 * 8 * 16


@pytest.mark.parametrize(
    ("capacity", "words"), [(3, "3 transitions is too small for 4 environments"), (10**15, "lower"), (10**19, "lower")]
)
def test_a_capacity_that_cannot_be_is_one_sentence(capacity, words):
    with pytest.raises(PalaError, match=words):
        Replay(capacity, 4, Box(0, 255, (4, 84, 84), np.uint8), frame_stack=4)
