"""Environments: three kinds of end told apart, whole unclipped episodes reported, final observations handed over."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import ale_py
import gymnasium
import numpy as np
import pytest
from ale_py import roms

from pala.config import EnvConfig
from pala.envs import failures, vector
from pala.envs import processes as processes_module
from pala.envs.vector import Envs, Episode, Step, make_by_id, make_envs
from pala.system.errors import PalaError
from support.environments import Placed


def played(envs: Envs, seeds: list[int], actions: np.ndarray) -> list[Step]:
    """The steps that `actions` [T, B] give."""
    envs.reset(np.array(seeds, np.int32))
    steps = [envs.step(action) for action in actions]
    envs.close()
    return steps


def random_actions(steps: int, envs: int, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, (steps, envs))


# ---- Atari -----------------------------------------------------------------------------------------------------------


def ordinary_game(rom: str, seed: int, actions: np.ndarray) -> Iterator[tuple[float, bool, bool, float, int]]:
    """One bare emulator: (reward, a life is lost, the game is over, its return and length so far) of every step."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path(rom))
    choices = ale.getMinimalActionSet()

    def start() -> tuple[int, float, int]:
        ale.reset_game()
        if ale_py.Action.FIRE in choices:
            ale.act(ale_py.Action.FIRE)
        return ale.lives(), 0.0, 0

    lives, total, length = start()
    for action in actions:
        reward = sum(ale.act(choices[action]) for _ in range(4) if not ale.game_over())
        total, length, over, lost = total + reward, length + 1, ale.game_over(), ale.lives() < lives
        lives = ale.lives()
        yield reward, lost, over, total, length
        if over:
            lives, total, length = start()


@pytest.mark.parametrize(
    ("game", "rom", "length", "life_loss"),
    [
        pytest.param("Breakout", "breakout", 500, True, marks=pytest.mark.slow),
        pytest.param("Breakout", "breakout", 500, False, marks=pytest.mark.slow),
        ("SpaceInvaders", "space_invaders", 450, True),
        pytest.param("Pong", "pong", 800, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_atari_is_the_ordinary_game(game, rom, length, life_loss):
    """A lost life terminates, and the game continues; whole games are reported unclipped; only the sign is learned."""
    config = EnvConfig(f"ALE/{game}-v5", num_envs=2, noop_max=0, terminal_on_life_loss=life_loss)
    envs = make_envs(config, num_threads=2)
    actions, seeds = random_actions(length, 2, envs.action_space.n), [3, 4]
    steps = played(envs, seeds, actions)
    episodes = lives_lost = 0
    for b in range(2):
        reference = ordinary_game(rom, seeds[b], actions[:, b])
        for step, (reward, lost, over, total, played_steps) in zip(steps, reference, strict=True):
            assert step.rewards[b] == np.sign(reward)
            assert step.terminated[b] == (over or (lost and life_loss))
            assert [e for e in step.episodes if e.env_index == b] == [Episode(total, played_steps, b)] * over
            episodes, lives_lost = episodes + over, lives_lost + (lost and not over)
    assert episodes
    assert lives_lost or game == "Pong"


def test_atari_rewards_can_stay_unclipped():
    config = EnvConfig("ALE/SpaceInvaders-v5", num_envs=1, noop_max=0, clip_rewards="none")
    actions = random_actions(100, 1, 6)
    rewards = [step.rewards[0] for step in played(make_envs(config), [3], actions)]
    assert rewards == [reward for reward, *_ in ordinary_game("space_invaders", 3, actions[:, 0])]
    assert max(rewards) > 1


@pytest.mark.slow
def test_atari_time_limit_truncates_and_hands_over_the_last_observation():
    """The final observation is the one of a game without the limit, not that of the next game."""
    actions = random_actions(25, 2, 6)
    *_, free = played(make_envs(EnvConfig("ALE/Pong-v5", num_envs=2)), [3, 4], actions)
    *before, limited = played(make_envs(EnvConfig("ALE/Pong-v5", num_envs=2, max_episode_frames=100)), [3, 4], actions)
    assert not any(step.truncated.any() or step.episodes for step in before)
    assert limited.truncated.tolist() == [True, True]
    assert not limited.terminated.any()
    assert [episode.length_steps for episode in limited.episodes] == [25, 25]
    np.testing.assert_array_equal(limited.final_observations[:, :3], free.observations[:, :3])
    # ale-py leaves the very last emulator frame out of the maximum of two: some pixels of the ball and paddles differ.
    assert (limited.final_observations != free.observations).mean() < 0.005
    assert (limited.observations[:, :3] != free.observations[:, :3]).any(axis=(1, 2, 3)).all()


@pytest.mark.slow
def test_atari_is_determined_by_its_seeds():
    actions = random_actions(40, 3, 4)

    def observations(seeds: list[int], threads: int) -> np.ndarray:
        envs = make_envs(EnvConfig("ALE/Breakout-v5", num_envs=3), threads)
        return np.stack([step.observations for step in played(envs, seeds, actions)], axis=1)

    first, other = observations([1, 2, 3], threads=1), observations([1, 2, 4], threads=1)
    np.testing.assert_array_equal(first, observations([1, 2, 3], threads=2))
    np.testing.assert_array_equal(first[:2], other[:2])
    assert not np.array_equal(first[2], other[2])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ALE/Pnog-v5", "ALE/Pong-v5"),
        ("ALE/Space_Invaders-v5", "ALE/SpaceInvaders-v5"),
        ("Pong-v5", "Pong"),
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("not an id", ""),
    ],
)
def test_unknown_ids_are_named_with_the_nearest(name, nearest):
    with pytest.raises(PalaError, match=name) as caught:
        make_envs(EnvConfig(name, num_envs=1))
    assert nearest in str(caught.value)


# ---- any environment -------------------------------------------------------------------------------------------------


def counter(limit: int = 3) -> Callable[[], gymnasium.Env]:
    """Makes environments [a number of the episode, steps]: action 2 terminates, `limit` steps truncate, reward 5a - 2.

    The class is local, so that a process can only get it by cloudpickle.
    """

    class Counter(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.state = np.array([self.np_random.random(), 0], np.float32)
            return self.state.copy(), {}

        def step(self, action):
            self.state[1] += 1
            return self.state.copy(), 5.0 * action - 2, bool(action == 2), bool(self.state[1] == limit), {}

    return Counter


def test_time_limit_truncates_and_hands_over_the_last_observation():
    envs = make_envs(EnvConfig(num_envs=2), make_env=counter())
    first = envs.reset(np.array([1, 2], np.int32))
    for _ in range(2):
        step = envs.step(np.array([0, 1]))
        assert not step.truncated.any()
        assert step.final_observations.shape == (0, 2)
    step = envs.step(np.array([0, 1]))
    assert step.truncated.tolist() == [True, True]
    assert step.episodes == [Episode(-6.0, 3, 0), Episode(9.0, 3, 1)]
    np.testing.assert_array_equal(step.final_observations, np.stack([first[:, 0], [3, 3]], axis=1))
    assert step.observations[:, 1].tolist() == [0, 0]
    assert (step.observations[:, 0] != first[:, 0]).all()


def test_final_observations_are_those_of_the_truncated_only():
    envs = make_envs(EnvConfig(num_envs=3), make_env=counter(limit=1))
    first = envs.reset(np.array([1, 2, 3], np.int32))
    step = envs.step(np.array([0, 2, 1]))  # the second meets both ends at once: it is terminated
    assert step.terminated.tolist() == [False, True, False]
    assert step.truncated.tolist() == [True, False, True]
    np.testing.assert_array_equal(step.final_observations[:, 0], first[[0, 2], 0])
    assert [episode.env_index for episode in step.episodes] == [0, 1, 2]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("max_episode_steps", [None, 2])
@pytest.mark.slow
def test_final_observations_outlive_the_reset_of_an_environment_with_one_array(vectorization, max_episode_steps):
    class OneArray(counter(limit=3)):
        state = np.zeros(2, np.float32)

        def reset(self, *, seed=None, options=None):
            gymnasium.Env.reset(self, seed=seed)
            self.state[:] = 0
            return self.state, {}

        def step(self, action):
            return self.state, *super().step(action)[1:]

    config = EnvConfig(num_envs=1, vectorization=vectorization)
    envs = make_envs(config, make_env=OneArray, max_episode_steps=max_episode_steps)
    steps = max_episode_steps or 3
    last = played(envs, [1], np.zeros((steps, 1), int))[-1]
    assert last.final_observations.tolist() == [[0, steps]] and last.observations.tolist() == [[0, 0]]


def test_infos_may_be_anything():
    class Telling(counter(limit=2)):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], self.info(seed or 0)

        def step(self, action):
            return *super().step(action)[:4], self.info(int(action))

        def info(self, number):
            return {"winner": None if number else 1, "path": np.zeros(number), "final_obs": "a user's own"}

    steps = played(make_envs(EnvConfig(num_envs=2), make_env=Telling), [0, 1], np.array([[0, 1], [1, 0]]))
    assert steps[1].final_observations[:, 1].tolist() == [2, 2]


def test_rewards_of_others_are_clipped_only_if_asked():
    for choice, expected in (("auto", [-2, 3, 8]), ("none", [-2, 3, 8]), ("sign", [-1, 1, 1])):
        envs = make_envs(EnvConfig(num_envs=3, clip_rewards=choice), make_env=counter(1))
        (step,) = played(envs, [1, 2, 3], np.arange(3)[None])
        assert step.rewards.tolist() == expected
        assert step.rewards.dtype == np.float32
        assert [episode.episode_return for episode in step.episodes] == [-2, 3, 8]


def test_cartpole_falls():
    steps = played(make_envs(EnvConfig("CartPole-v1", num_envs=2)), [1, 2], np.ones((12, 2), int))
    fallen = next(step for step in steps if step.terminated[0])
    assert not any(step.truncated.any() for step in steps)
    assert 8 <= fallen.episodes[0].length_steps == fallen.episodes[0].episode_return <= 11
    assert np.abs(fallen.observations[0]).max() <= 0.05


def test_processes_give_what_this_process_gives():
    actions = random_actions(12, 2, 3)
    trajectories = [
        played(make_envs(EnvConfig(num_envs=2, vectorization=kind), make_env=counter()), [5, 6], actions)
        for kind in ("sync", "async")
    ]
    for here, there in zip(*trajectories, strict=True):
        assert here.episodes == there.episodes
        for a, b in zip(here[:5], there[:5], strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(step.truncated.any() for step in trajectories[0])
    assert any(step.terminated.any() for step in trajectories[0])


@pytest.mark.slow
def test_of_workers_that_are_abandoned_only_those_in_a_step_are_killed(monkeypatch, capfd):
    class Slow(counter()):
        def step(self, action):
            time.sleep(100 * multiprocessing.current_process().name.endswith("-1"))
            return super().step(action)

        def close(self):
            print("closed", flush=True)

    envs = make_envs(EnvConfig(num_envs=2, vectorization="async"), make_env=Slow)
    envs.reset(np.zeros(2, np.int32))
    capfd.readouterr()
    idle, busy = envs.vector_env.processes

    def later() -> float:
        """The patience is over when the worker that is not in a step has ended, however long that takes."""
        return time.monotonic() + (0 if idle.is_alive() else 1000)

    monkeypatch.setattr(processes_module, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(processes_module, "time", SimpleNamespace(monotonic=later))
    for pipe in envs.vector_env.pipes:
        pipe.send(("step", 0))
    envs.abandon()
    assert (idle.exitcode, busy.exitcode) == (0, -signal.SIGKILL) and not multiprocessing.active_children()
    envs.close()
    assert capfd.readouterr() == ("closed\n", "")


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_a_process_whose_environment_does_not_close_is_killed(monkeypatch, capfd):
    class Stuck(counter()):
        def close(self):
            time.sleep(1000 * (multiprocessing.parent_process() is not None))

    monkeypatch.setattr(vector, "CLOSE_S", 0.1)
    envs = make_envs(EnvConfig(num_envs=2, vectorization="async"), make_env=Stuck)
    envs.reset(np.zeros(2, np.int32))
    processes = envs.vector_env.processes
    envs.close()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    assert "2 of the environments did not close within 0.1 s; their processes were killed." in capfd.readouterr().err


STUCK = """
import time, gymnasium, numpy as np
from pala.config import EnvConfig
from pala.envs.vector import make_envs

class Stuck(gymnasium.Wrapper):
    def step(self, action):
        print("it steps", flush=True)
        time.sleep(1000)

envs = make_envs(EnvConfig(num_envs=1, vectorization="async"), make_env=lambda: Stuck(gymnasium.make("CartPole-v1")))
envs.reset(np.zeros(1, np.int32))
envs.step(np.zeros(1, int))
"""


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_a_process_in_a_step_ends_with_a_rank_that_is_killed():
    rank = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    with rank, rank.stdout as output:
        assert output.readline() == "it steps\n"
        rank.kill()
        assert output.read() == ""  # nobody holds it any more


def test_a_wait_for_environments_that_do_not_close_is_told(monkeypatch):
    told = threading.Event()

    class Slow(counter()):
        def close(self):
            assert told.wait(60)

    monkeypatch.setattr(failures, "CLOSE_S", 0.01)
    monkeypatch.setattr(failures, "log", lambda text: told.set() if "has not returned" in text else None)
    make_envs(EnvConfig(num_envs=1), make_env=Slow).close()
    assert told.is_set()


def test_environments_are_closed_if_a_later_one_cannot_be_made():
    class Closing(counter()):
        def close(self):
            closed.append(self)

    def make():
        if len(made) == 2:
            raise ValueError("no licence")
        made.append(Closing())
        return made[-1]

    made, closed = [], []
    with pytest.raises(PalaError, match="no licence"):
        make_envs(EnvConfig(num_envs=3), make_env=make)
    assert closed == made and len(made) == 2


@pytest.mark.slow
def test_threads_that_start_processes_at_once_leave_the_variables_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one kept what the other had set, and every later Python program of this process heeded it."""
    start, has_begun = BaseProcess.start, threading.Event()

    def slow(process: BaseProcess) -> None:
        has_begun.set()
        time.sleep(0.2)
        start(process)

    def make_one() -> None:
        with make_envs(EnvConfig("CartPole-v1", num_envs=1, vectorization="async")):
            pass

    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(BaseProcess, "start", slow)
    first = threading.Thread(target=make_one)
    first.start()
    assert has_begun.wait(60)
    make_one()
    first.join()
    assert "PYTHONSAFEPATH" not in os.environ


def _keeps_its_handlers() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with make_envs(EnvConfig("CartPole-v1", num_envs=1, vectorization="async")):
        sys.exit(signal.getsignal(signal.SIGTERM) is not signal.default_int_handler)


@pytest.mark.slow
def test_a_rank_in_a_process_of_a_search_keeps_its_signals():
    process = multiprocessing.get_context("spawn").Process(target=_keeps_its_handlers)
    process.start()
    try:
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_a_limit_of_the_system_names_the_setting(monkeypatch):
    def start(process):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    with pytest.raises(PalaError, match=r"'env.vectorization' .* 1 of 3 .*temporarily unavailable\. .*'env.num_envs'"):
        make_envs(EnvConfig(num_envs=3, vectorization="async"), make_env=counter())


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_cannot_be_used_is_closed(vectorization):
    class Spaceless(counter()):
        action_space = None

        def close(self):
            closed.append(self)

    closed = []
    with pytest.raises(PalaError, match="has no 'action_space'"):
        make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=Spaceless)
    assert len(closed) == 1


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_in_its_process_ends_them_all(capfd):
    def make():
        if multiprocessing.current_process().name.endswith("-1"):
            raise ValueError("no licence")
        return counter()()

    with pytest.raises(PalaError, match=r"cannot be made in a process of its own: .*ValueError: no licence; .*, line"):
        make_envs(EnvConfig(num_envs=3, vectorization="async"), make_env=make)
    assert not multiprocessing.active_children()
    assert not capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*ERROR: ")
@pytest.mark.timeout(60)
@pytest.mark.slow
def test_what_an_environment_in_its_process_raises_is_shown_and_named(capfd):
    """Though it cannot be sent: its class is of this function, and made of two arguments."""

    class OddError(Exception):
        def __init__(self, code, words):
            super().__init__(code, words)

    class Breaking(counter()):
        def step(self, action):
            raise OddError(7, "5% gone %d")

    envs = make_envs(EnvConfig(num_envs=1, vectorization="async", restarts=0), make_env=Breaking)
    envs.reset(np.zeros(1, np.int32))
    with pytest.raises(PalaError, match=r"'Breaking' has failed: 'step' raised OddError: .*5% gone %d.*, line \d"):
        envs.step(np.zeros(1, int))
    envs.abandon()
    trace = capfd.readouterr().err
    assert trace.count("Traceback") == 1 and trace.count("\n") < 15


def test_a_factory_that_fails_is_told_in_a_sentence():
    class Needs(counter()):
        def __init__(self, port):
            pass

    with pytest.raises(PalaError, match=r"The environment cannot be made \(TypeError: .*port.*test_envs.py, line"):
        make_envs(EnvConfig(num_envs=1), make_env=lambda: Needs())
    with pytest.raises(PalaError, match=r"'make_env' returns None, but must return a gymnasium.Env"):
        make_envs(EnvConfig(num_envs=1), make_env=lambda: None)


@pytest.mark.parametrize("key", ["observation_space", "action_space"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.Wrapper])
def test_an_environment_without_spaces_is_told(key, vectorization, wrap):
    class Bare(gymnasium.Env):
        pass

    def make():
        env = Bare()
        env.observation_space = env.action_space = gymnasium.spaces.Discrete(2)
        delattr(env, key)
        return wrap(env)

    with pytest.raises(PalaError, match=f"The environment 'Bare' has no '{key}' that is a gymnasium.Space; let it"):
        make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=make)


def test_an_environment_of_old_gym_is_told():
    class Old(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 1, (2,)), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32)

    envs = make_envs(EnvConfig(num_envs=2), make_env=Old)
    with pytest.raises(PalaError, match=r"expected \(observation, info\), but got an array .*written for Gym before"):
        envs.reset(np.zeros(2, np.int32))
    envs.close()


def test_an_id_may_have_arguments():
    envs = make_envs(EnvConfig("FrozenLake-v1(is_slippery=False, map_name='8x8')", num_envs=1))
    envs.reset(np.zeros(1, np.int32))
    assert envs.name == "FrozenLake-v1" and envs.observation_space.shape == (64,)
    for place in (1, 2, 3):  # to the right, without a slip
        assert envs.step(np.array([2])).observations[0].argmax() == place
    envs.close()
    assert EnvConfig("my.envs:Grid/World-v0(a='b:c/d')").short_id == "World-v0"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("FrozenLake-v1(is_slipery=False)", "The environment cannot be made .*is_slipery"),
        ("FrozenLake-v1(False)", "write `Id-v0`"), ("FrozenLake-v1(is_slippery=f())", "write `Id-v0`"),
        ("FrozenLake-v1(", "write `Id-v0`"), ("FrozenLak-v1(is_slippery=False)", "did you mean 'FrozenLake-v1'"),
        ("ALE/Pong-v5(mode=1)", "Atari games take no arguments"), (" ALE/Pong-v5", "no environment"),
    ],
)  # fmt: skip
def test_arguments_that_are_none_are_told(name, sentence):
    with pytest.raises(PalaError, match=sentence):
        make_envs(EnvConfig(name, num_envs=1))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.slow
def test_every_reset_gets_the_options(vectorization):
    """The first, that after an episode of five steps, and that of an environment that takes a failed one's place."""
    config = EnvConfig(num_envs=2, vectorization=vectorization, reset_options="place=[0.5, -0.5], more='x'")
    steps, zeros, placed = [[0, 0]] * 5 + [[1, 0]], [0, 0], [0.5, -0.5]
    with make_envs(config, make_env=partial(Placed, breaks=True)) as envs:
        shown = [envs.reset(np.array([1, 2], np.int32)).tolist()]
        shown += [envs.step(np.array(actions)).observations.tolist() for actions in steps]
    assert shown == [[placed] * 2, *[[zeros] * 2] * 4, [placed] * 2, [placed, zeros]]


def test_options_of_a_reset_reach_gymnasiums_environments():
    for options, most in (("low=-0.001, high=0.001", 0.001), ("low=0.04, high=0.05", 0.05)):
        envs = make_envs(EnvConfig("CartPole-v1", num_envs=2, reset_options=options))
        first = np.abs(envs.reset(np.array([1, 2], np.int32)))
        assert (first <= most).all() and (first >= (0.04 if most > 0.01 else 0)).all()
        envs.close()


@pytest.mark.parametrize("options", ["**{}", "low", "low=f()", "low=1) or f(", "{'low': 1}"])
def test_options_of_a_reset_that_are_none_are_told(options):
    with pytest.raises(PalaError, match=r"'env.reset_options' is .*: write keys with plain values"):
        make_envs(EnvConfig("CartPole-v1", num_envs=1, reset_options=options))


def test_episodes_without_an_end_get_one():
    def lengths(of_training, of_evaluation):
        config = EnvConfig(num_envs=1, max_episode_steps=of_training)
        envs = make_envs(config, make_env=counter(limit=10**9), max_episode_steps=of_evaluation)
        return {e.length_steps for step in played(envs, [1], np.zeros((20, 1), int)) for e in step.episodes}

    assert [lengths(7, None), lengths(7, 5), lengths(0, 6), lengths(0, None)] == [{7}, {5}, {6}, set()]


def test_a_rom_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(PalaError, match=r"The ROM of 'ALE/Pong-v5' \('pong'\) cannot be read: .*ALE_ROMS_DIR"):
        make_envs(EnvConfig("ALE/Pong-v5", num_envs=1))


@pytest.mark.parametrize(("full", "count"), [(False, 6), (True, 18)])
def test_all_actions_can_be_asked_for(full, count):
    envs = make_envs(EnvConfig("ALE/Pong-v5", num_envs=1, full_action_space=full))
    assert envs.action_space.n == count
    envs.close()


@pytest.mark.parametrize(
    "name", ["Pong-v5", "PongNoFrameskip-v4", "Pong-v0", "PongDeterministic-v4", "ALE/Pong-v4", "ALE/Pong"]
)
def test_a_game_under_a_former_name_is_told_its_name(name: str):
    with pytest.raises(PalaError, match=r"^'env.id': no environment '.*' is registered; did you mean 'ALE/Pong-v5'"):
        make_envs(EnvConfig(name))


@pytest.mark.parametrize(
    ("name", "hint"), [("CartPol-v1", "; did you mean 'CartPole-v1'?"), ("NoEnv-v0", " (Environment `NoEnv`")]
)
def test_an_unknown_id_gets_the_hint_that_is_near(name: str, hint: str) -> None:
    """`UpNDown-v0` is not."""
    with pytest.raises(PalaError) as caught:
        make_envs(EnvConfig(name))
    assert str(caught.value).startswith(f"'env.id': no environment '{name}' is registered{hint}")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_package_that_is_there_and_does_not_load_is_not_called_missing(is_there: bool) -> None:
    def make() -> None:
        cause = ImportError("libGL.so.1: cannot open") if is_there else ModuleNotFoundError("No module named 'mujoco'")
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed, run `pip install mujoco`") from cause

    gymnasium.register("Broken-v0", make)
    try:
        with pytest.raises(PalaError if is_there else gymnasium.error.DependencyNotInstalled) as raised:
            make_by_id("Broken-v0")
    finally:
        del gymnasium.registry["Broken-v0"]
    assert ("does not load: libGL.so.1: cannot open" in str(raised.value)) == is_there
