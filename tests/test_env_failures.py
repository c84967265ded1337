"""Environments that break Gymnasium's interface, raise, die or do not answer: named, made again, and in no value."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from pala.config import EnvConfig
from pala.envs import processes as processes_module
from pala.envs.vector import Envs, Step, make_envs
from pala.system.errors import PalaError
from support.failing import (
    DiesFirst,
    DiesInAStep,
    Hanging,
    IsCancelled,
    Killed,
    Lengthy,
    NotFiniteFirst,
    OfADict,
    OfBytes,
    OfFour,
    OtherKeys,
    Plain,
    RaisesFirst,
    Raising,
    ResetsAlone,
    ResetsBySeed,
    StepsWrongly,
    WithoutInfo,
    exits_at_once,
    like_step,
    with_value,
)
from support.helpers import slow_but_for
from support.learning import ENVS, STEPS, Clock, Run, configured

KINDS = pytest.mark.parametrize("vectorization", slow_but_for(["sync", "async"], "sync"))
SEEDS = np.array([5, 6], np.int32)


FAULTS = [
    (WithoutInfo, "'reset' of .* expected an info that is a dict, but got None. Without infos return {}"),
    (Lengthy, r"'reset' of .* expected an observation of shape \(2,\) and type float32, .* of shape \(3,\)"),
    (OfBytes, r"'reset' of .* of shape \(2,\) and type uint8, but got .* type int64.*astype\(np.uint8\)"),
    (OfADict, r"'reset' of .* expected an observation\['a'\] in Discrete\(3\), but got 3 \(of type int\)"),
    (OtherKeys, r"'reset' of .* with the keys \['a', 'b'\], but got \['a'\]"),
    (like_step(lambda v: (v[0], v[1], v[2], v[4])), "'step' of .* truncated, info.*, but got 4 values.*for Gym before"),
    (like_step(list), r"'step' of .* expected \(observation, reward, .* but got \[.*of type list"),
    (
        with_value(1, np.array([1.0])),
        r"expected a reward that is one number, .* shape \(1,\).*Return `float\(reward\)`",
    ),
    (with_value(1, "1"), "expected a reward that is one number, but got '1' .of type str"),
    (with_value(1, None), "expected a reward that is one number, but got None"),
    (with_value(2, np.array([True])), r"expected a 'terminated' that is True or False, .* Return `bool\(terminated\)`"),
    (with_value(2, None), "expected a 'terminated' that is True or False, but got None"),
    (with_value(3, "no"), "expected a 'truncated' that is True or False, but got 'no' .of type str"),
    (with_value(4, None), "'step' of .* expected an info that is a dict, but got None"),
    (with_value(0, np.zeros(3, np.float32)), r"'step' of .* of shape \(2,\) .* but got .* of shape \(3,\)"),
    (with_value(0, None), r"'step' of .* an observation of shape \(2,\) and type float32, but got None"),
]


def play(envs: Envs, steps: int) -> list[Step]:
    envs.reset(SEEDS[: envs.num_envs])
    return [envs.step(np.zeros(envs.num_envs, np.int64)) for _ in range(steps)]


@pytest.mark.parametrize(("make_env", "sentence"), FAULTS)
@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.wrappers.PassiveEnvChecker])
def test_a_fault_in_the_first_reset_or_step_is_told(make_env, sentence, wrap):
    with (
        pytest.raises(
            PalaError, match=f"of the environment '{make_env.__name__}' breaks Gymnasium's interface: "
        ) as told,
        make_envs(EnvConfig(num_envs=2), make_env=lambda: wrap(make_env())) as envs,
    ):
        play(envs, 1)
    assert told.match(sentence)


@pytest.mark.parametrize(("make_env", "sentence"), [FAULTS[0], FAULTS[10]])
def test_processes_tell_the_same(make_env, sentence, capfd):
    with (
        pytest.raises(PalaError, match=sentence),
        make_envs(EnvConfig(num_envs=2, vectorization="async"), make_env=make_env) as envs,
    ):
        play(envs, 1)
    assert not capfd.readouterr().err and not multiprocessing.active_children()


@pytest.mark.parametrize(
    "make_env",
    [
        with_value(0, [1.0, 2.0]),
        with_value(0, np.zeros(2)),
        with_value(0, np.zeros(2, np.int64)),
        with_value(1, np.float32(1)),
        with_value(1, np.array(1.0)),
        with_value(1, 1),
        with_value(1, torch.tensor(1.0)),
        with_value(2, np.False_),
        with_value(2, 0),
        with_value(3, np.array(False)),
    ],
)
def test_what_comes_to_the_same_is_taken(make_env):
    with make_envs(EnvConfig(num_envs=2), make_env=make_env) as envs:
        for step in play(envs, 3):
            assert step.rewards.tolist() == [1, 1] and not (step.terminated | step.failed).any()


# ---- failures --------------------------------------------------------------------------------------------------------


def failing(at: int, how: Any) -> Callable[[], Plain]:
    """Makes Plains of which the second fails in its step `at`; what takes its place does not. `how` raises, or gives
    the values that are returned."""

    class Failing(Plain):
        is_bad = False

        def step(self, action):
            values = super().step(action)
            if self.is_bad and at == self.steps:
                return how(self, list(values))
            return values

    made = []

    def make() -> Plain:
        env = Failing()
        made.append(env)
        env.is_bad = len(made) == 2
        return env

    return make


def raises(env: Plain, values: list) -> Any:
    raise ConnectionError("the simulator is gone")


def exits(env: Plain, values: list) -> Any:
    raise SystemExit(3)


def gives(index: int, value: Any) -> Callable[[Plain, list], Any]:
    return lambda env, values: (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (raises, r"'step' raised ConnectionError: the simulator is gone \(.*test_env_failures.py, line \d+\)"),
        (exits, "'step' raised SystemExit: 3"),
        (gives(1, math.nan), "'step' returned a reward that is not finite: nan"),
        (gives(1, -math.inf), "'step' returned a reward that is not finite: -inf"),
        (gives(1, 1e39), "'step' returned a reward that is not finite: 1e\\+39"),  # in float32
        (gives(0, np.array([0, np.nan], np.float32)), "'step' returned an observation that is not finite"),
        (gives(0, np.zeros(3, np.float32)), r"expected an observation of shape \(2,\) and type float32, but got"),
        (gives(1, None), "expected a reward that is one number, but got None"),
        (lambda env, values: tuple(values[:4]), "but got 4 values"),
    ],
)
def test_a_step_in_which_an_environment_fails_ends_nothing_and_its_episode_is_left_out(how, text, capsys):
    """The second of two environments fails in its third step; its next episodes are whole again."""
    with make_envs(EnvConfig(num_envs=2), make_env=failing(3, how)) as envs:
        steps = play(envs, 8)
        assert envs.num_failures == 1
    assert [step.failed.tolist() for step in steps] == [[False, k == 2] for k in range(8)]
    bad = steps[2]
    assert bad.rewards.tolist() == [1, 0] and not (bad.terminated | bad.truncated).any()
    assert bad.observations[1].tolist() == [0, 0]  # the first of a new one
    assert [step.terminated.tolist() for step in steps] == [[k in (3, 7), k == 6] for k in range(8)]
    episodes = [(k, episode.env_index, episode.episode_return) for k in range(8) for episode in steps[k].episodes]
    assert episodes == [(3, 0, 4), (6, 1, 4), (7, 0, 4)]
    said = capsys.readouterr().err
    assert "Environment 1 ('Failing') has failed: " in said and "It is made again" in said
    assert re.search(text, said)


class Grows(gymnasium.Env):
    """An environment of which a part of an observation has another shape in the third step."""

    observation_space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(3)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return {"a": np.zeros(2, np.float32), "b": 0}, {}

    def step(self, action):
        self.steps += 1
        return {"a": np.zeros(5 if self.steps == 3 else 2, np.float32), "b": 1}, 1.0, self.steps == 9, False, {}


def test_a_part_of_an_observation_that_changes_its_shape_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with make_envs(EnvConfig(num_envs=2), make_env=Grows) as envs:
        steps = play(envs, 4)
    assert [step.failed.tolist() for step in steps] == [[k == 2] * 2 for k in range(4)]
    assert "'step' returned an observation of shape (8,), not (5,)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_env", "text"),
    [
        (Killed, "its process has ended (signal 9)"),
        (Hanging, "it has not answered for 1.5 s"),
        (Raising, "'step' raised ConnectionError: the simulator is gone"),
    ],
)
def test_an_environment_whose_process_fails_is_made_anew(make_env, text, capfd, monkeypatch):
    """It is killed, does not answer, or raises: each once beside one that plays on."""
    with make_envs(EnvConfig(num_envs=2, vectorization="async"), make_env=make_env) as envs:
        envs.reset(SEEDS)
        processes_module._limit_waits(envs.vector_env.pipes[1], 1.5)
        monkeypatch.setattr(processes_module, "_ANSWER_S", 1.5 if make_env is Hanging else 300.0)
        steps = [envs.step(np.array([0, 0])) for _ in range(2)]
        monkeypatch.setattr(processes_module, "_limit_waits", lambda pipe, seconds: None)
        before = envs.vector_env.processes[1].pid
        steps.append(envs.step(np.array([0, 1])))
        assert (envs.vector_env.processes[1].pid == before) == (make_env is Raising)
        steps += [envs.step(np.array([0, 0])) for _ in range(5)]
    assert [step.failed.tolist() for step in steps] == [[False, k == 2] for k in range(8)]
    assert steps[2].observations.tolist() == [[3, 3], [0, 0]]
    assert steps[2].rewards.tolist() == [1, 0] and not steps[2].terminated.any()
    episodes = [(k, episode.env_index, episode.episode_return) for k in range(8) for episode in steps[k].episodes]
    assert episodes == [(3, 0, 4), (6, 1, 4), (7, 0, 4)]
    said = capfd.readouterr().err
    assert text in said and said.count("Traceback") == (make_env is Raising) and said.count("\n") < 15
    assert not multiprocessing.active_children()


@KINDS
def test_more_failures_in_a_row_than_restarts_end_the_rank(vectorization, capfd):
    with (
        pytest.raises(
            PalaError, match=r"'Raising' has failed 3 times without a whole .* 'env.restarts' is 2; the last"
        ),
        make_envs(EnvConfig(num_envs=1, restarts=2, vectorization=vectorization), make_env=Raising) as envs,
    ):
        envs.reset(SEEDS[:1])
        for _ in range(4):  # of the two that may be, one comes after a whole episode: they begin again
            for action in (0, 1, 0, 0, 0, 0):
                assert envs.step(np.array([action])).failed[0] == action
        for _ in range(2):
            assert envs.step(np.array([1])).failed[0]
        envs.step(np.array([1]))
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and said.count("It is made again") == 3  # of the 1st, 2nd and 4th
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_deaths_in_a_row_end_the_rank(capfd):
    with (
        pytest.raises(
            PalaError, match=r"'Killed' has failed 3 times .*; the last time its process has ended \(signal 9"
        ),
        make_envs(EnvConfig(num_envs=1, restarts=2, vectorization="async"), make_env=Killed) as envs,
    ):
        envs.reset(SEEDS[:1])
        for each in (0, 1, 0, 1, 1):
            envs.step(np.array([each]))
    assert "Traceback" not in capfd.readouterr().err


@KINDS
def test_a_reset_that_fails_after_an_episode_leaves_the_episode_whole(vectorization):
    class Once(Plain):
        def reset(self, *, seed=None, options=None):
            if self.total == 4:
                raise ConnectionError
            return super().reset(seed=seed)

    with make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=Once) as envs:
        steps = play(envs, 6)
        assert envs.num_failures == 1
    assert not any(step.failed.any() for step in steps)
    assert steps[3].terminated[0] and steps[3].episodes[0].episode_return == 4
    assert steps[3].observations.tolist() == [[0, 0]] and steps[4].observations.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("make_env", "vectorization", "sentence"),
    [
        (RaisesFirst, "sync", r"'reset' raised ValueError: level file not found\. \(.*\.py, line \d+\)\."),
        pytest.param(
            RaisesFirst,
            "async",
            r"'reset' raised ValueError: level file not found\. \(.*\.py, line \d+\)\.",
            marks=pytest.mark.slow,
        ),
        pytest.param(DiesFirst, "async", r"its process has ended \(status 3\)\.", marks=pytest.mark.slow),
        (NotFiniteFirst, "sync", r"'reset' returned an observation that is not finite\."),
        (StepsWrongly, "sync", r"'step' raised ValueError: level file not found\. \(.*\.py, line \d+\)\."),
        pytest.param(
            StepsWrongly,
            "async",
            r"'step' raised ValueError: level file not found\. \(.*\.py, line \d+\)\.",
            marks=pytest.mark.slow,
        ),
        pytest.param(DiesInAStep, "async", r"its process has ended \(status 3\)\.", marks=pytest.mark.slow),
        pytest.param(IsCancelled, "async", r"it raised CancelledError \(.*\.py, line \d+\)\.", marks=pytest.mark.slow),
        (with_value(1, np.nan), "sync", r"'step' returned a reward that is not finite: nan\."),
        (ResetsAlone, "sync", r"'reset' raised TypeError: .*'seed' .*; define it as `def reset.*options=None\):`\."),
        (ResetsBySeed, "sync", r"'reset' raised TypeError: .*'options' .*; define it as `def reset.*:`\."),
        (
            lambda: gymnasium.wrappers.TimeLimit(OfFour(), 9),
            "sync",
            r"'step' raised ValueError: .*; 'step' must return \(observation, reward, terminated, truncated, info\)\.",
        ),
    ],
)
def test_what_fails_as_it_is_tried_out_is_told_and_no_environment_made_anew(make_env, vectorization, sentence, capfd):
    with (
        pytest.raises(PalaError, match=rf"^The environment '\w+' fails at the start: {sentence}$"),
        make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=make_env) as envs,
    ):
        envs.try_out(5)
    assert not capfd.readouterr().err and not multiprocessing.active_children()


@KINDS
@pytest.mark.parametrize("number", [0, 7, 15])
def test_faults_show_as_an_environment_is_tried_out(number, vectorization, capfd):
    make_env, sentence = FAULTS[number]
    with (
        pytest.raises(PalaError, match=sentence),
        make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=make_env) as envs,
    ):
        envs.try_out(5)
    assert not capfd.readouterr().err and not multiprocessing.active_children()


@KINDS
def test_an_environment_that_was_tried_out_plays_as_one_that_was_not(vectorization):
    class Random(Plain):
        def look(self):
            return np.array([self.steps, self.np_random.random()], np.float32)

    def observations(tried: bool) -> np.ndarray:
        with make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=Random) as envs:
            if tried:
                envs.try_out(7)
            first = envs.reset(SEEDS)
            steps = [envs.step(np.zeros(2, np.int64)) for _ in range(5)]
            assert [len(step.episodes) for step in steps] == [0, 0, 0, 2, 0] and envs.num_failures == 0
            assert steps[3].episodes[0].length_steps == 4
            return np.stack([first, *(step.observations for step in steps)])

    np.testing.assert_array_equal(observations(True), observations(False))


@KINDS
def test_a_first_reset_that_fails_once_is_made_good_by_a_new_environment(vectorization, tmp_path, capfd):
    """As of an evaluation, or a spare: others of the kind have played."""
    failed = tmp_path / "failed"

    class FailsOnce(Plain):
        def reset(self, *, seed=None, options=None):
            if not failed.exists():
                failed.touch()
                raise ConnectionError("the simulator is busy")
            return super().reset(seed=seed)

    with make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=FailsOnce) as envs:
        steps = play(envs, 4)
        assert envs.num_failures == 1 and steps[3].episodes[0].episode_return == 4
    said = capfd.readouterr().err
    assert said.count("'reset' raised ConnectionError: the simulator is busy") == said.count("Traceback") == 1


@KINDS
def test_a_new_environment_that_breaks_the_interface_at_once_is_made_anew_as_well(vectorization, tmp_path):
    made = tmp_path / "made"
    made.write_text("")

    class OfNothing(Raising):
        def __init__(self):
            made.write_text(made.read_text() + "+")
            self.number = len(made.read_text()) - (vectorization == "async")  # whose first is for its spaces

        def step(self, action):
            values = super().step(action)
            return None if self.number == 2 else values

    with make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=OfNothing) as envs:
        envs.reset(SEEDS[:1])
        steps = [envs.step(np.array([action])) for action in (0, 1, 0, 0, 0, 0, 0)]
    assert [step.failed.item() for step in steps] == [False, True, True, False, False, False, False]
    assert steps[6].episodes[0].episode_return == 4


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError("gone"), BaseException("odd")])
def test_exceptions_that_are_no_errors_are_told_as_others_from_a_process(error, capfd):
    class Odd(Raising):
        def how(self):
            raise error

    with (
        pytest.raises(
            PalaError, match=rf"has failed 3 times .*; the last time it raised {type(error).__name__}.* line"
        ),
        make_envs(EnvConfig(num_envs=1, restarts=2, vectorization="async"), make_env=Odd) as envs,
    ):
        envs.reset(SEEDS[:1])
        for action in (0, 1, 0, 1, 1):
            assert envs.step(np.array([action])).failed[0] == action
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and said.count("It is made again") == 2 and said.count("\n") < 15
    assert not multiprocessing.active_children()


@KINDS
def test_an_environment_that_ends_the_process_as_it_is_made_or_closed_ends_no_rank(vectorization, capfd):
    with pytest.raises(PalaError, match=r"cannot be made \(SystemExit: no licence; .*line \d+\)"):
        make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=exits_at_once)

    class Exits(Raising):
        def close(self):
            exits_at_once()

    with make_envs(EnvConfig(num_envs=1, vectorization=vectorization), make_env=Exits) as envs:
        envs.reset(SEEDS[:1])
        assert envs.step(np.array([1])).failed[0]
    said = capfd.readouterr().err
    assert "cannot be closed (SystemExit: no licence)" in said and said.count("Traceback") == 1


def test_an_environment_that_takes_another_s_place_plays_other_episodes_and_a_repeatable_one():
    class Random(Raising):
        def look(self):
            return np.array([self.steps, self.np_random.random()], np.float32)

    def observations() -> np.ndarray:
        with make_envs(EnvConfig(num_envs=2), make_env=Random) as envs:
            first = envs.reset(SEEDS)
            return np.stack([first, *(envs.step(np.array([0, k == 1])).observations for k in range(6))])

    first = observations()
    np.testing.assert_array_equal(first, observations())
    assert first[2, 1, 0] == 0 and first[2, 1, 1] != first[0, 1, 1]


def test_failures_end_before_the_environments_are_all_closed():
    """Each that failed is closed before another takes its place, and none is kept."""

    class Closing(Raising):
        open = 0

        def __init__(self):
            type(self).open += 1

        def close(self):
            type(self).open -= 1
            raise OSError("cannot be closed either")

    with make_envs(EnvConfig(num_envs=2, restarts=10), make_env=Closing) as envs:
        envs.reset(SEEDS)
        for _ in range(5):
            assert envs.step(np.array([0, 1])).failed.tolist() == [False, True]
            assert Closing.open == 2


# ---- what the learner makes of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
@pytest.mark.slow
def test_advantages_around_a_failure_are_those_of_a_cut_before_its_step(gae_lambda):
    """Environment 1 fails in its third step (in the first rollout). What was before is bootstrapped by V of the
    observation that the step began with, the step itself has no advantage, and what follows knows nothing of it."""
    made = []

    class FailsOnce(Clock):
        limit = 100

        def __init__(self):
            made.append(self)
            self.is_bad = len(made) == 2

        def step(self, action):
            if self.is_bad and self.steps == 2:
                raise ConnectionError
            return super().step(action)

    config = configured(2 * ENVS * STEPS, gae_lambda=gae_lambda)
    run = Run(config, make_env=FailsOnce)
    run.go()
    (rollout, bootstrap_B, *_), gamma = run.updates[0], config.a2c.gamma
    from pala.a2c.update import advantages_and_returns

    rewards, ended = torch.stack(rollout.rewards), torch.stack(rollout.ended)
    values = torch.stack(rollout.values)
    got, returns = advantages_and_returns(rewards, ended, values, bootstrap_B, gamma, gae_lambda)
    assert ended.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]]

    def slow(pieces: list[tuple[int, int, torch.Tensor]]) -> list[float]:
        """Advantages of steps `begin` to `end`, of reward 1 each, that the value after them bootstraps."""
        advantages = []
        for begin, end, value_after in pieces:
            after = [*(float(values[t, 1]) for t in range(begin + 1, end)), float(value_after)]
            deltas = [1 + gamma * after[t - begin] - float(values[t, 1]) for t in range(begin, end)]
            advantages += [
                sum((gamma * gae_lambda) ** (s - t) * deltas[s - begin] for s in range(t, end))
                for t in range(begin, end)
            ]
        return advantages

    expected = slow([(0, 2, values[2, 1])])
    torch.testing.assert_close(got[:2, 1], torch.tensor(expected))
    assert got[2, 1] == 0 and returns[2, 1] == values[2, 1]
    torch.testing.assert_close(got[3:, 1], torch.tensor(slow([(3, 5, bootstrap_B[1])])))
    assert sum(record["env_failures"] for record in run.of_type("interval")) == 1


def test_a_failure_is_in_no_episode_of_the_metrics():
    class FailsInTheFifthStep(Clock):
        """Pays 1 a step for 3 steps; each new one fails in its fifth step, the second of its second episode."""

        count = 0

        def step(self, action):
            self.count += 1
            if self.count == 5:
                raise ConnectionError
            return super().step(action)

    config = configured(20 * ENVS * STEPS)
    run = Run(replace(config, env=replace(config.env, restarts=1)), make_env=FailsInTheFifthStep)
    run.go()
    episodes = run.of_type("episode")
    assert len(episodes) > 20 and {(e["return"], e["length_steps"]) for e in episodes} == {(3, 3)}
    assert sum(record["env_failures"] for record in run.of_type("interval")) == 2 * (100 // 5)
