"""What PALA offers from Python: fit, policies that act, callbacks that stop, networks and wrappers; the examples and
the blocks of docs/python.md and of its neighbours as written, but for fewer steps."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from torch import nn

import pala
from pala.comm import agreement
from pala.config import Config, EnvConfig, EvaluationConfig, GorilaConfig, NetworkConfig, checked
from pala.config.catalogue import KINDS
from pala.config.influence import differences, unused_overrides
from pala.envs.spaces import inputs_of
from pala.envs.vector import make_envs
from pala.evaluation import evaluate, play
from pala.evaluation.policy import policy_of
from pala.evaluation.scoring import Acting
from pala.evaluation.video import Window, _rendered_env, filmed
from pala.job import entry
from pala.job.conclusion import conclude
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.networks.make import actor_critic
from pala.networks.network import ActorCritic
from pala.networks.own import OwnNetwork
from pala.run import provenance, user_code
from pala.run.agent import make_generator
from pala.run.hooks import NO_CALLBACKS, Callbacks, Moment, UserCode, asks_to_stop
from pala.run.metrics import read_run
from pala.system.errors import CollectiveError, PalaError
from pala.system.interrupt import note_on_thread
from pala.testing.memory import MemoryCommunicator, run_ranks
from support import REPOSITORY
from support.environments import Deadly, Locked, Placed, Sparkle, Told
from support.helpers import record_of
from support.memory_jobs import configure, gorila
from support.policies import CARTPOLE, make_run, network_of

pytestmark = pytest.mark.often(
    "test_a_policy_acts_on_one_observation_or_a_batch",
    "test_a_policy_says_what_it_cannot_take",
    "test_a_policy_takes_what_the_environment_gives",
    "test_the_policy_of_a_box_and_of_gorila",
    "test_whatever_a_trunk_gives_reaches_the_heads_as_float32",
    "test_a_network_that_cannot_be_is_told",
    "test_a_named_network_that_cannot_be_is_told",
    "test_a_wrapper_that_cannot_be_is_told",
    "test_a_run_that_was_stopped_early_goes_on",
    "test_one_rank_alone_may_have_a_callback",
    "test_fit_leaves_a_scripts_random_numbers_as_they_were",
    "test_a_network_may_be_lazy",
    "test_what_is_no_function_is_told",
    "test_a_result_names_its_run",
    "test_an_argument_of_another_type_is_told",
    "test_a_module_that_fails_is_named_with_the_line",
    "test_what_counts_as_false",
)

PAGE = REPOSITORY / "docs" / "python.md"
EXAMPLES = REPOSITORY / "examples"


def train(
    ranks: int, config: Config, callbacks: Callbacks = NO_CALLBACKS, make_env: Any = None, make_network: Any = None,
    **options: Any,
) -> list[Any]:  # fmt: skip
    request = Request(config, UserCode(make_env, make_network), callbacks, **options)

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, request)

    return run_ranks(ranks, main)


class MyNetwork(nn.Module):
    """As docs/python.md has it."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...], inputs: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, outputs) for outputs in num_outputs)


# ---- callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "gorila"])
@pytest.mark.parametrize("callback", ["on_update", "on_interval"])
def test_a_callback_that_returns_false_stops_all_ranks(kind: str, callback: str, tmp_path: Path) -> None:
    config = replace(gorila(tmp_path), total_steps=10**9) if kind == "gorila" else configure(tmp_path, kind, 10**9)
    moments: list[Moment] = []

    def enough(moment: Moment) -> bool | None:
        moments.append(moment)
        both_were_asked = {m.rank for m in moments} == {0, 1}  # one may begin after the other has made 100 steps
        return False if moment.rank == 1 and moment.local_steps >= 100 and both_were_asked else None

    results = train(2, config, Callbacks(**{callback: enough}))
    assert [(r.status, r.stopped_early, r.exit_status) for r in results] == [("completed", True, 0)] * 2
    record = record_of(tmp_path / "r")
    assert record["completed"] and record["segments"][0]["stopped_early"] is True
    assert record["segments"][0]["global_steps"] == results[0].global_steps < 10**8
    intervals = [moment.records[-1]["type"] for moment in moments if moment.records]
    assert intervals == (["interval"] * len(moments) if callback == "on_interval" else [])
    if callback == "on_interval" and kind != "gorila":  # and no empty one after that
        assert all(moment.records[-1]["loss_value"] is not None for moment in moments if moment.rank == 1)


def test_one_rank_alone_may_have_a_callback(tmp_path: Path) -> None:
    config = configure(tmp_path, "none", 10**9)

    def main(comm: MemoryCommunicator) -> Result:
        callbacks = Callbacks(on_update=(lambda moment: moment.updates < 5) if comm.rank == 0 else None)
        return run_rank(comm, Request(config, callbacks=callbacks))

    assert [result.stopped_early for result in run_ranks(2, main)] == [True, True]


def test_the_last_callback_of_a_rank_that_leaves_does_not_end_training(tmp_path: Path) -> None:
    config = configure(tmp_path, steps=2000)
    config = replace(config, run=replace(config.run, log_interval_s=1000.0))  # one interval: the last
    asked: list[int] = []

    def main(comm: MemoryCommunicator) -> Result:
        def leave(moment: Moment) -> None:
            comm.interrupt.leave_requested |= moment.updates == 5

        def end(moment: Moment) -> bool:
            asked.append(moment.rank)
            return False

        callbacks = Callbacks(on_update=leave, on_interval=end) if comm.rank == 1 else Callbacks()
        return run_rank(comm, Request(config, callbacks=callbacks))

    first, second = run_ranks(2, main)
    assert second.status == "left" and asked == [1]
    assert first.status == "completed" and not first.stopped_early and first.global_steps >= 2000


def test_a_run_that_was_stopped_early_goes_on(tmp_path: Path) -> None:
    config = configure(tmp_path, steps=400)
    first = train(2, config, Callbacks(on_update=lambda moment: moment.updates < 5))[0]
    assert first.stopped_early and first.global_steps < 400
    second = train(2, config, resume=first.run)[0]
    assert not second.stopped_early and second.global_steps >= 400


def test_what_counts_as_false() -> None:
    for answer in (False, np.bool_(False), torch.tensor(False)):
        assert asks_to_stop(answer)
    for answer in (None, True, 0, "", np.array([]), torch.tensor(0), np.float32(0)):
        assert not asks_to_stop(answer)


def test_a_moment_knows_the_mean_return() -> None:
    episodes: list[dict[str, Any]] = [{"type": "episode", "return": value} for value in (1.0, 3.0)]
    assert Moment(0, 1, 1, 1, 1.0, [*episodes, {"type": "interval"}]).mean_return == 2
    assert Moment(0, 1, 1, 1, 1.0, [{"type": "interval"}]).mean_return is None
    nan = {"type": "episode", "return": math.nan}
    assert Moment(0, 1, 1, 1, 1.0, [*episodes, nan]).mean_return == 2
    assert Moment(0, 1, 1, 1, 1.0, [nan]).mean_return is None


# ---- the end of a training -------------------------------------------------------------------------------------------


def test_a_training_ends_with_an_evaluation_on_the_cores_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    monkeypatch.setattr("pala.job.job.cores_of_hosts", lambda comm: {comm.host: one})
    seen: list[set[int]] = []

    def look(*arguments: Any) -> Any:
        seen.append(os.sched_getaffinity(0))
        return conclude(*arguments)

    config = replace(configure(tmp_path, steps=200), evaluation=EvaluationConfig(episodes=3, num_envs=1))
    after: list[set[int]] = []  # of each rank, whose thread is the one that was on those cores

    def main(comm: MemoryCommunicator) -> Result:
        result = run_rank(comm, Request(config, conclude=look))
        after.append(os.sched_getaffinity(0))
        return result

    results = run_ranks(2, main)
    assert seen == [one] and after == [cores] * 2
    (first,) = [result for result in results if result.leads]
    assert first.evaluation.episodes == 3 and first.learning_curve.exists()
    other = pala._with_evaluation(next(result for result in results if not result.leads))
    assert other.evaluation == first.evaluation and other.learning_curve == first.learning_curve
    assert other.outcomes == first.outcomes == {"evaluation": "done", "learning curve": "done"}


@pytest.mark.parametrize("failed", ["evaluation", "learning curve"])
def test_what_an_earlier_start_left_is_not_given_back_as_new(tmp_path: Path, failed: str) -> None:
    config = replace(configure(tmp_path, steps=200), evaluation=EvaluationConfig(episodes=3, num_envs=1))
    results = run_ranks(2, lambda comm: run_rank(comm, Request(config, conclude=conclude)))
    first, other = sorted(results, key=lambda result: not result.leads)
    record = json.loads((first.run / "run.json").read_text())
    record["segments"][-1]["conclusion"][failed] = "failed"
    (first.run / "run.json").write_text(json.dumps(record))
    assert pala._with_evaluation(first) == first
    other = pala._with_evaluation(other)
    assert (other.evaluation is None) == (failed == "evaluation")
    assert (other.learning_curve is None) == (failed == "learning curve")


def test_an_evaluation_that_is_left_out_was_not_done(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = replace(configure(tmp_path, steps=200), evaluation=EvaluationConfig(episodes=0))
    (result,) = run_ranks(1, lambda comm: run_rank(comm, Request(config, conclude=conclude)))
    assert result.evaluation is None and result.outcomes == {"learning curve": "done"}
    assert "evaluation: left out ('evaluation.episodes' is 0)" in capsys.readouterr().out


def test_an_evaluation_leaves_as_many_threads_as_there_were(tmp_path: Path) -> None:
    config = replace(configure(tmp_path, steps=200), evaluation=EvaluationConfig(episodes=1, num_envs=1))

    def conclude_with(*arguments: Any) -> Any:
        torch.set_num_threads(7)
        result = conclude(*arguments)
        left.append(torch.get_num_threads())
        return result

    left: list[int] = []
    before = torch.get_num_threads()
    try:
        run_ranks(1, lambda comm: run_rank(comm, Request(config, conclude=conclude_with)))
        assert left == [7]
    finally:
        torch.set_num_threads(before)


def test_fit_leaves_a_scripts_random_numbers_as_they_were(one_rank, tmp_path: Path) -> None:
    """Or each training of a random search would be followed by the same numbers."""

    def draw() -> list[float]:
        return [*torch.rand(3).tolist(), *np.random.random(3), random.random()]  # noqa: NPY002

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    expected = draw()
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    random.setstate(before[2])
    one_rank(lambda: pala.fit(configure(tmp_path, steps=50)))
    assert draw() == expected


class Diced(gymnasium.Env):
    """Draws from the generators of the whole process, as many an old environment does."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return np.random.random(2).astype(np.float32), {}  # noqa: NPY002

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.random.random(2).astype(np.float32), random.random(), random.random() < 0.2, False, {}  # noqa: NPY002


def test_a_seed_covers_the_random_numbers_of_the_whole_process(one_rank, tmp_path: Path) -> None:
    """With `sync` two trainings of one seed played other games."""

    def returns(name: str, seed: int) -> list[float]:
        config = replace(configure(tmp_path / name, "none", steps=100), seed=seed)
        result = one_rank(lambda: pala.fit(config, make_env=Diced))
        return [record["return"] for record in read_run(result.run)[0] if record["type"] == "episode"]

    first = returns("a", 1)
    assert len(first) > 3 and first == returns("b", 1) != returns("c", 2)


def test_the_cores_of_a_host_are_those_that_its_ranks_may_use() -> None:
    found = run_ranks(2, lambda comm: agreement.cores_of_hosts(comm)[comm.host])
    assert found == [os.sched_getaffinity(0)] * 2


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    return pala.load_policy(make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE)))


def test_a_policy_acts_on_one_observation_or_a_batch(policy: Any) -> None:
    batch = policy.observation_space.sample()[None].repeat(50, 0)
    actions = policy.act(batch)
    assert actions.shape == (50,) and set(actions.tolist()) == {0, 1}, "sampled"
    assert policy.action_space.contains(policy.act(batch[0]))
    assert len(set(policy.act(batch, greedy=True).tolist())) == 1
    policy.seed(3)
    first = policy.act(batch)
    policy.seed(3)
    assert (policy.act(batch) == first).all() and (policy.act(batch) != first).any()
    assert policy.act([0.0, 0.0, 0.0, 0.0]) in (0, 1), "as lists too"


def test_a_policy_says_what_it_cannot_take(policy: Any) -> None:
    with pytest.raises(PalaError, match=r"of shape \(3,\), but the policy takes \(4,\)"):
        policy.act(np.zeros(3))
    with pytest.raises(PalaError, match="are complex128"):
        policy.act(np.zeros(4, complex))
    with pytest.raises(PalaError, match=r"`env.reset\(\)` gives a pair"):
        policy.act((np.zeros(4), {}))
    with pytest.raises(PalaError, match="hold NaN or infinity"):
        policy.act(np.array([0.0, np.nan, 0.0, 0.0]))


def test_a_policy_takes_what_the_environment_gives(policy: Any) -> None:
    fields = Discrete(4)
    policy = replace(policy, inputs=inputs_of(fields))
    assert policy.act(3) in (0, 1) and policy.act(np.array([0, 3, 1])).shape == (3,)
    assert policy.act(np.zeros(0, np.int64)).shape == (0,)
    with pytest.raises(PalaError, match=r"Observations are not of Discrete\(4\)"):
        policy.act(99)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"make_env": "CartPole-v1"},
            "'make_env' is 'CartPole-v1', but must be a function that returns an environment",
        ),
        ({"make_network": nn.Linear(4, 2)}, "but must be a function that returns a torch module"),
        ({"on_update": True}, "'on_update' is True, but must be a function of a `Moment`"),
    ],
)
def test_what_is_no_function_is_told(given: dict[str, Any], words: str) -> None:
    pala._check_callable(make_env=None, make_network=MyNetwork, on_update=print)  # a class is one
    with pytest.raises(PalaError, match=words):
        pala._check_callable(**given)


def test_a_policy_is_exported_as_a_program_of_torch(policy: Any, tmp_path: Path, recwarn: Any) -> None:
    policy.export(tmp_path / "policy.pt2")
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    batch = torch.randn(5, 4)
    for mine, theirs in zip(policy.network(batch), exported(batch), strict=True):
        torch.testing.assert_close(theirs, mine)
    assert len(recwarn) == 0
    with pytest.raises(PalaError, match=r"no/policy.pt2' cannot be written"):
        policy.export(tmp_path / "no" / "policy.pt2")


def test_the_policy_of_a_box_and_of_gorila(tmp_path: Path) -> None:
    result = train(2, gorila(tmp_path, steps=100))[0]
    act = pala.load_policy(result.run).act
    batch = np.zeros((200, 4), np.float32)
    assert len(set(act(batch).tolist())) == 2 and len(set(act(batch, greedy=True).tolist())) == 1
    config = replace(configure(tmp_path, steps=40), env=EnvConfig("Pendulum-v1", num_envs=2))
    (result,) = train(1, replace(config, run=replace(config.run, name="box")))
    pendulum = pala.load_policy(result.run)
    assert pendulum.act(np.zeros((5, 3))).shape == (5, 1) and pendulum.action_space.contains(pendulum.act(np.zeros(3)))


def test_a_policy_is_evaluated_with_the_runs_own_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    threads = torch.get_num_threads()
    evaluation = pala.evaluate_policy(run)
    assert (evaluation.episodes, evaluation.num_envs, evaluation.greedy) == (3, 2, False)
    assert pala.evaluate_policy(str(run), episodes=1, greedy=True, seed=1).greedy
    assert torch.get_num_threads() == threads and not (run / "evaluation.json").exists()


def test_a_result_names_its_run(tmp_path: Path) -> None:
    result = Result(make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE)), "completed", 1000, None, True, 0)
    assert pala.load_config(result) == CARTPOLE
    assert pala.load_policy(result).act(np.zeros(4)) in (0, 1)
    assert pala.evaluate_policy(result, episodes=1).episodes == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: pala.load_policy(3), "named by its folder or its result, not by 3"),
        (lambda run: pala.fit(CARTPOLE, resume=3), "named by its folder or its result, not by 3"),
        (lambda run: pala.load_policy(run, seed="x"), "'seed' is 'x' but must be a whole number"),
        (lambda run: pala.evaluate_policy(run, episodes="5"), "'episodes' is '5' but must be a whole number"),
        (lambda run: pala.evaluate_policy(run, seed="x"), "'seed' is 'x' but must be a whole number"),
    ],
)
def test_an_argument_of_another_type_is_told(call: Any, words: str, one_rank: Any, tmp_path: Path) -> None:
    with pytest.raises(PalaError, match=words):
        one_rank(lambda: call(make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))))


@pytest.mark.parametrize(("vectorization", "algorithm"), [("sync", "a2c"), ("async", "a2c"), ("sync", "gorila")])
def test_numbers_of_an_episodes_info_are_recorded_and_evaluated(
    vectorization: Literal["sync", "async"], algorithm: str, tmp_path: Path
) -> None:
    config = gorila(tmp_path, steps=200) if algorithm == "gorila" else configure(tmp_path, steps=200)
    env = replace(config.env, num_envs=2, vectorization=vectorization, episode_info=("is_success",))
    config = replace(config, env=env)
    results = train(2, config, make_env=Told)
    assert [result.status for result in results] == ["completed"] * 2
    num_told = 0
    for records in read_run(results[0].run):
        told, since = list[float](), list[float]()  # all; of an interval
        for record in records:
            if record["type"] == "episode":
                told.append(record["info_is_success"])
                since.append(told[-1])
            elif record["type"] == "interval":
                assert record.get("info_is_success") == (pytest.approx(statistics.fmean(since)) if since else None)
                since.clear()
        assert told[:: config.env.num_envs] == [i % 2 for i in range(len(told[:: config.env.num_envs]))]
        num_told += len(told)
    assert num_told > 0  # one rank may find the budget met by the other
    evaluation = pala.evaluate_policy(results[0].run, episodes=4, num_envs=1)
    assert evaluation.mean_info == {"is_success": 0.5} and "over 4 episodes, is_success 0.5, " in str(evaluation)


@pytest.mark.filterwarnings("ignore:.*ERROR: ")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("key", "said"), [("is_sucess", "is not there; there are ['is_success', 'unseen']"), ("unseen", "is None")]
)
def test_a_number_that_no_info_has_is_told(
    key: str, said: str, vectorization: Literal["sync", "async"], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    config = configure(tmp_path, steps=200)
    env = replace(config.env, num_envs=1, vectorization=vectorization, episode_info=(key,))
    (error,) = train(1, replace(config, env=env), make_env=Told)
    assert isinstance(error, PalaError) and said in str(error) and "Traceback" not in capfd.readouterr().err
    with pytest.raises(PalaError, match=r"'env.episode_info' is \['x'\], but 'ALE/Pong-v5'"):
        make_envs(EnvConfig(episode_info=("x",)))


class Grid(gymnasium.Env[dict[str, Any], int]):
    """Observations in parts; infos that training never sees."""

    observation_space = gymnasium.spaces.Dict({"at": Discrete(4), "near": gymnasium.spaces.Box(0, 1, (2,))})
    action_space = Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return {"at": 0, "near": np.zeros(2, np.float32)}, {"map": "small"}

    def step(self, action: int) -> Any:
        assert self.action_space.contains(action)
        return {"at": 1, "near": np.ones(2, np.float32)}, 1.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "make_env", "length"),
    [
        (EnvConfig("CartPole-v1", max_episode_steps=7, wrappers=("TimeAwareObservation",)), None, 7),
        (EnvConfig("Grid-v0", max_episode_steps=5), Grid, 5),
        (EnvConfig("ALE/Pong-v5", max_episode_frames=80), None, 20),
    ],
    ids=["wrapped", "parts", "Atari"],
)
def test_the_environments_of_a_run_give_what_its_policy_takes(
    env: EnvConfig, make_env: Any, length: int, tmp_path: Path
) -> None:
    code = user_code.UserCode(make_env)
    config = replace(CARTPOLE, env=env)
    with make_envs(replace(env, num_envs=1), 1, make_env) as one:
        network = ActorCritic(one.observation_space, one.action_space, config.network)
    run = make_run(tmp_path / "run", config, network)
    user_code.keep(run, code)
    user_code.trust_own(run)
    policy, envs = pala.load_policy(run), pala.make_envs(run, num_envs=2)
    assert envs.num_envs == 2 and envs.single_observation_space == policy.observation_space
    observations, infos = envs.reset(seed=1)
    assert ("map" in infos) == (make_env is Grid)
    for step in range(1, 2 * length):
        observations, _, terminated, truncated, _ = envs.step(policy.act(observations, greedy=True))
        ended = terminated | truncated
        assert ended.tolist() == [step == length] * 2 or (env.id == "CartPole-v1" and step > length)
    envs.close()
    with pytest.raises(PalaError, match="'num_envs' is 0 but must be a whole number, at least 1"):
        pala.make_envs(run, num_envs=0)


def test_the_environments_of_a_run_cut_games_where_its_evaluation_does(tmp_path: Path) -> None:
    """Where training never ends an episode, a script that plays one to its end would continue forever."""
    env = EnvConfig("Grid-v0")
    config = replace(CARTPOLE, env=env, evaluation=EvaluationConfig(max_episode_steps=6))
    run = make_run(tmp_path / "run", config)
    user_code.keep(run, user_code.UserCode(Grid))
    user_code.trust_own(run)
    envs = pala.make_envs(run)
    envs.reset(seed=1)
    cut = [bool(envs.step(np.array([1]))[3][0]) for _ in range(6)]
    envs.close()
    assert cut == [False] * 5 + [True]


def test_the_options_of_a_reset_reach_training_evaluation_and_films(tmp_path: Path) -> None:
    """The environment fails in a reset without them."""
    config = configure(tmp_path, steps=40)
    env = EnvConfig(num_envs=2, restarts=0, reset_options="place=[0.5, -0.5]")
    (result,) = train(1, replace(config, env=env), make_env=partial(Placed, "rgb_array"))
    assert result.status == "completed"
    assert pala.evaluate_policy(result.run, episodes=3, num_envs=2).returns == [5.0] * 3
    envs = pala.make_envs(result.run)
    assert envs.reset(seed=0)[0].tolist() == [[0.5, -0.5]]
    envs.close()
    with filmed(result.run, 2, Acting()) as film:
        assert len(list(film.pictures)) == 10


def test_a_run_whose_environment_from_python_is_missing_is_not_played_with_another(tmp_path: Path) -> None:
    """As one that was copied without its pickles: its id may be that of an environment that is registered."""
    make_env = partial(gymnasium.make, "CartPole-v1", max_episode_steps=20)
    config = configure(tmp_path, steps=100)
    (result,) = train(1, config, make_env=make_env)
    assert pala.evaluate_policy(result.run, episodes=1).mean_length_steps <= 20
    (result.run / "make_env.pkl").unlink()
    with pytest.raises(PalaError, match=r"`make_env` from Python, but the file that keeps it, 'make_env.txt'"):
        pala.evaluate_policy(result.run, trust_run=True)
    (error,) = train(1, replace(config, total_steps=200), resume=result.run)
    assert isinstance(error, PalaError) and "copy it from where the run was made" in str(error)
    assert train(1, replace(config, total_steps=200), make_env=make_env, resume=result.run)[0].status == "completed"


def test_a_factory_that_needs_what_its_script_registered_is_told_so(tmp_path: Path) -> None:
    (error,) = train(1, configure(tmp_path), make_env=lambda: gymnasium.make("Nowhere/Grid-v0"))
    assert isinstance(error, PalaError) and "has to be imported in the factory, or named in the id" in str(error)


def test_a_factory_that_cannot_be_sent_to_a_process_is_told(tmp_path: Path) -> None:
    lock = threading.Lock()

    def make_env() -> gymnasium.Env:
        with lock:
            return Sparkle()

    config = configure(tmp_path)
    config = replace(config, env=replace(config.env, vectorization="async"))
    (error,) = train(1, config, make_env=make_env)
    assert isinstance(error, PalaError) and "cannot be sent to a process (cannot pickle" in str(error)


def test_a_run_that_left_its_evaluation_out_can_be_evaluated(tmp_path: Path) -> None:
    short = replace(CARTPOLE.env, max_episode_steps=7)
    config = replace(CARTPOLE, env=short, evaluation=replace(CARTPOLE.evaluation, episodes=0))
    run = make_run(tmp_path / "run", config, network_of(config))
    assert pala.evaluate_policy(run).episodes == 100


# ---- networks of the user's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["a2c", "gorila"])
def test_a_network_of_ones_own_trains_and_is_kept(algorithm: str, tmp_path: Path) -> None:
    config = gorila(tmp_path, steps=200) if algorithm == "gorila" else configure(tmp_path, steps=200)
    results = train(2, config, make_network=MyNetwork)
    assert [result.status for result in results] == ["completed"] * 2
    assert record_of(results[0].run)["segments"][0]["python_network"]
    policy = policy_of(results[0].run)
    assert isinstance(policy.network, OwnNetwork) and isinstance(policy.network.own, MyNetwork)
    assert policy.act(np.zeros(4)) in (0, 1)
    resumed = train(2, replace(config, total_steps=400), resume=results[0].run)
    assert [result.status for result in resumed] == ["completed"] * 2


class TwoNames(MyNetwork):
    """Its heads have names of their own as well, and so the same parameters twice."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        self.policy, self.value = self.heads


def test_a_network_whose_parameters_have_two_names(tmp_path: Path) -> None:
    results = train(2, configure(tmp_path, steps=200), make_network=TwoNames)
    assert [result.status for result in results] == ["completed"] * 2
    own = policy_of(results[0].run).network.own
    assert own.policy.weight.equal(own.heads[0].weight)


def test_a_resume_that_is_refused_leaves_the_network_that_the_run_was_made_with(tmp_path: Path) -> None:
    (result,) = train(1, configure(tmp_path, steps=200), make_network=MyNetwork)

    def files() -> dict[str, bytes]:  # but the lock, which names the second in which it was taken last
        return {file.name: file.read_bytes() for file in result.run.glob("[!.]*") if file.is_file()}

    before = files()

    def other(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        return nn.Sequential(OneLayer(space, num_outputs))[0]

    (refused,) = train(1, configure(tmp_path, steps=400), make_network=other, resume=result.run)
    assert isinstance(refused, CollectiveError) and "is of another network" in str(refused)
    assert f"environment ({configure(tmp_path).env.id}) and network sizes" in str(refused)
    assert {"run.json", "make_network.txt"} <= before.keys() and files() == before
    lock = threading.Lock()

    class Unkept(MyNetwork):
        held = lock

    code = {"make_env": lambda: gymnasium.make("CartPole-v1"), "make_network": Unkept}
    (refused,) = train(1, configure(tmp_path, steps=400), resume=result.run, **code)
    assert isinstance(refused, CollectiveError) and "'make_network' cannot be kept with the run" in str(refused)
    assert files() == before
    assert isinstance(policy_of(result.run).network.own, MyNetwork)


class OneLayer(MyNetwork):
    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(4, 8))
        self.trunk[1].bias = None


def test_training_says_that_images_go_through_autograd(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    env = EnvConfig("ALE/Pong-v5", num_envs=1, max_episode_frames=40)
    config = replace(configure(tmp_path, steps=10), env=env)
    assert train(1, config, make_network=Pixels)[0].status == "completed"
    assert "The network is your own: autograd makes its passes" in capfd.readouterr().err


class Pixels(MyNetwork):
    """A network for a stack of Atari's frames."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs, inputs=4 * 84 * 84)


class PlainList(MyNetwork):
    """With heads that torch does not know of."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        heads = list(self.heads)
        del self.heads
        self.heads = heads  # type: ignore[assignment]


class Properties(MyNetwork):
    """Its parts are registered under other names."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        self.body, self.policy, self.value = self.trunk, *self.heads
        del self.trunk, self.heads

    @property
    def trunk(self) -> nn.Module:
        return nn.Sequential(self.body, nn.Tanh())

    @property
    def heads(self) -> list[nn.Module]:
        return [nn.Sequential(self.policy), self.value]


def test_parts_may_be_made_of_what_is_registered(tmp_path: Path) -> None:
    (result,) = train(1, configure(tmp_path, steps=100), make_network=Properties)
    assert result.status == "completed"


class Pairs(MyNetwork):
    """Its trunk gives no tensor."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        self.trunk, layers = Twice(), self.heads
        self.heads = nn.ModuleList(OfPair(layer) for layer in layers)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class OfPair(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Linear(4, 8)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.layer(self.first(pair[0] + pair[1]))


class Feature(NamedTuple):
    x: torch.Tensor


def test_a_trunk_may_give_anything(tmp_path: Path) -> None:
    (result,) = train(1, configure(tmp_path, steps=100), make_network=Pairs)
    assert result.status == "completed"


@pytest.mark.parametrize("gives", [lambda x: (x, x), lambda x: [x, 3], lambda x: {"x": x}, Feature])
def test_whatever_a_trunk_gives_reaches_the_heads_as_float32(gives: Callable[[torch.Tensor], Any]) -> None:
    class Trunk(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return gives(super().forward(x))

    class Head(nn.Linear):
        def forward(self, features: Any) -> torch.Tensor:
            return super().forward(features["x"] if isinstance(features, dict) else features[0])

    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        made.trunk, made.heads = Trunk(4, 8), nn.ModuleList(Head(8, n) for n in num_outputs)
        return made

    network = actor_critic(gymnasium.spaces.Box(-1, 1, (4,)), Discrete(2), Config(), make)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(output.dtype == torch.float32 for output in network.outputs(torch.zeros(3, 4)))


class Ten(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sub_(10)


def test_what_works_in_place_changes_neither_observations_nor_another_heads_features() -> None:
    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        made.trunk, heads = nn.Identity(), [nn.Sequential(Ten(), nn.Linear(4, n)) for n in num_outputs]
        made.heads = nn.ModuleList([*heads[:1], nn.Linear(4, 1)])
        return made

    network = actor_critic(gymnasium.spaces.Box(-1, 1, (4,)), Discrete(2), Config(), make)
    observations = torch.rand(3, 4)
    before = observations.clone()
    policy, value = network.outputs(observations)
    assert observations.equal(before)
    assert policy.equal(network.heads[0][1](before - 10)) and value.equal(network.heads[1](before))


def test_a_network_may_begin_with_layers_of_another_run(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", CARTPOLE, network_of(CARTPOLE))

    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        pala.load_policy(old)  # whose network is made in the meantime
        return made

    (result,) = train(1, configure(tmp_path, steps=100), make_network=make)
    assert result.status == "completed"


def test_a_policy_that_is_loaded_leaves_torchs_random_stream_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        pala.load_policy(run)
        assert torch.rand(3).equal(expected)


def test_ranks_and_segments_have_random_streams_of_their_own_for_dropout() -> None:
    drawn = []
    with torch.random.fork_rng():
        for rank, purpose in ((0, ""), (1, ""), (0, "segment segment-001"), (0, "")):
            make_generator(1, rank, torch.device("cpu"), purpose)
            drawn.append(torch.rand(3).tolist())
    assert drawn[3] == drawn[0] and len({tuple(each) for each in drawn}) == 3


def _without(part: str) -> Callable[..., nn.Module]:
    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        delattr(made, part)
        return made

    return make


def _with_heads(heads: nn.Module) -> nn.Module:
    made = nn.Module()
    made.trunk, made.heads = nn.Linear(4, 8), heads
    return made


def masked(space: gymnasium.Space, num_outputs: tuple[int, ...], value: float = 0.0) -> nn.Module:
    made = MyNetwork(space, num_outputs)
    made.mask = nn.Parameter(torch.tensor([0.0, value]), requires_grad=False)
    return made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_without("trunk"), "must be a torch.nn.Module with a 'trunk' and 'heads'"),
        (_without("heads"), "must be a torch.nn.Module with a 'trunk' and 'heads'"),
        (lambda space, num_outputs: None, "is a NoneType"),
        (lambda space, num_outputs: MyNetwork(space, num_outputs[:1]), "has 1 heads, but 2 are needed"),
        (lambda space, num_outputs: MyNetwork(space, (3, 1)), r"not \[\(2, 2\), \(2, 1\)\]"),
        (lambda space, num_outputs: MyNetwork(space, num_outputs, inputs=5), "fails .RuntimeError"),
        (lambda space, num_outputs: MyNetwork(space, num_outputs).double(), "'trunk.1.weight' is not float32"),
        (lambda space, num_outputs: masked(space, num_outputs, math.nan), "the parameter 'mask' holds NaN or infinity"),
        (
            lambda space, num_outputs: masked(space, num_outputs, -math.inf),
            "the parameter 'mask' holds NaN or infinity",
        ),
        (
            lambda space, num_outputs: MyNetwork(space, num_outputs).requires_grad_(False),
            "no parameters that learn",
        ),
        (lambda space, num_outputs: nn.Sequential(), "with a 'trunk' and 'heads'"),
        (lambda space, num_outputs: PlainList(space, num_outputs), "not registered with the module"),
        (lambda space, num_outputs: _with_heads(nn.Linear(8, 1)), "'heads' must be a torch.nn.ModuleList"),
    ],
)
def test_a_network_that_cannot_be_is_told(make: Any, says: str) -> None:
    spaces = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    with pytest.raises(PalaError, match=says):
        actor_critic(*spaces, Config(), make)


def sized(space: gymnasium.Space, num_outputs: tuple[int, ...], inputs: int = 4, width: int = 8) -> nn.Module:
    """A network whose size is an argument."""
    made = MyNetwork(space, num_outputs, inputs)
    made.trunk.append(nn.Linear(8, width))
    made.heads = nn.ModuleList(nn.Linear(width, number) for number in num_outputs)
    return made


def _custom(text: str) -> Config:
    return Config(network=NetworkConfig(custom=text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("MyNetwork", "'network.custom' names 'MyNetwork', which is no function or class of a module"),
        (f"{__name__}:NoSuch", "'network.custom' names .*NoSuch', which cannot be loaded"),
        ("no_such_module:Net", "'network.custom' names the module 'no_such_module', which cannot be loaded"),
        (f"{__name__}:sized(2)", "'network.custom' is .*: write `module:Name` or"),
        (f"{__name__}:sized(width=-1)", "makes no network .RuntimeError"),
        (f"{__name__}:sized(inputs=5)", "Your own network fails .RuntimeError"),
    ],
)
def test_a_named_network_that_cannot_be_is_told(text: str, says: str) -> None:
    spaces = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    with pytest.raises(PalaError, match=says):
        actor_critic(*spaces, _custom(text))


def test_a_network_is_named_or_given() -> None:
    spaces = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    with pytest.raises(PalaError, match="but there is a 'make_network', too"):
        actor_critic(*spaces, _custom(f"{__name__}:sized"), MyNetwork)


@pytest.mark.parametrize("algorithm", ["a2c", "gorila"])
def test_a_run_of_a_named_network_acts_and_goes_on(algorithm: str, tmp_path: Path) -> None:
    """By its configuration alone."""
    config = gorila(tmp_path, steps=200) if algorithm == "gorila" else configure(tmp_path, steps=200)
    config = replace(config, network=NetworkConfig(custom=f"{__name__}:sized(width=6)"))
    results = train(2, config)
    assert [result.status for result in results] == ["completed"] * 2
    run = results[0].run
    assert not list(run.glob("make_network*")) and not record_of(run)["segments"][0]["python_network"]
    policy = policy_of(run)
    assert policy.network.own.heads[0].in_features == 6 and policy.act(np.zeros(4)) in (0, 1)
    assert [result.status for result in train(2, replace(config, total_steps=400), resume=run)] == ["completed"] * 2
    wider = replace(config, network=NetworkConfig(custom=f"{__name__}:sized(width=7)"), total_steps=600)
    (refused, _) = train(2, wider, resume=run)
    assert isinstance(refused, CollectiveError) and "is of another network" in str(refused)


def test_what_only_palas_networks_read_is_no_difference_of_a_named_one() -> None:
    named = Config(network=NetworkConfig(custom="my_networks:Net"))
    other = replace(named, network=replace(named.network, mlp_hidden=(5,), conv_hidden=7, passes="autograd"))
    assert differences(other, named) == {}
    assert unused_overrides(other, named) == ["network.conv_hidden", "network.mlp_hidden", "network.passes"]
    wide = replace(Config(), network=NetworkConfig(conv_hidden=64))
    assert unused_overrides(wide, Config()) == [] and unused_overrides(wide, Config(), own_network=True) == [
        "network.conv_hidden"
    ]
    assert set(differences(named, Config())) == set(differences(Config(), named)) == {"network.custom"}


def test_a_network_may_be_lazy() -> None:
    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        made.trunk = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(8))
        return made

    images = gymnasium.spaces.Box(0, 255, (3, 8, 8), np.uint8)
    network = actor_critic(images, gymnasium.spaces.Discrete(2), Config(), make)
    assert sorted(tuple(p.shape) for p in network.parameters() if p.dim() > 1)[-2:] == [(3, 3, 3, 3), (8, 108)]


class Standardised(nn.Conv2d):
    """Its weights are seen as a matrix."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.weight.view(len(self.weight), -1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        return self._conv_forward(images, rows.view_as(self.weight), self.bias)


def test_a_network_is_tried_in_the_layout_that_it_is_trained_in() -> None:
    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs, inputs=3 * 6 * 6)
        made.trunk.insert(0, Standardised(3, 3, 3))
        return made

    images = gymnasium.spaces.Box(0, 255, (3, 8, 8), np.uint8)
    with pytest.raises(PalaError, match=r"Your own network fails .*view size is not compatible"):
        actor_critic(images, gymnasium.spaces.Discrete(2), Config(), make)


class Masked(MyNetwork):
    """What its parameters mean depends on a buffer."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        super().__init__(space, num_outputs)
        self.register_buffer("mask", torch.rand(4), persistent=False)


def test_a_buffer_that_is_drawn_anew_is_no_other_networks(tmp_path: Path) -> None:
    """Ranks would exchange, and an evaluation play, what was learned with another one."""

    def by_numpy(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = Masked(space, num_outputs)
        made.mask.copy_(torch.from_numpy(np.random.default_rng().random(4)))
        return made

    errors = train(2, configure(tmp_path / "a"), make_network=by_numpy)
    assert all(isinstance(error, CollectiveError) and "is not that of rank 0" in str(error) for error in errors)
    (made,) = train(1, configure(tmp_path / "b"), make_network=Masked)
    assert made.status == "completed" and policy_of(made.run) is not None
    other = replace(configure(tmp_path / "b"), seed=2, total_steps=10**4)
    (error,) = train(1, other, resume=made.run)
    assert isinstance(error, CollectiveError) and "of another network" in str(error)
    header = (made.run / "run.json").read_text()
    (made.run / "run.json").write_text(header.replace('"seed": 1', '"seed": 2'))
    with pytest.raises(PalaError, match="is of a network with other buffers"):
        policy_of(made.run, trust_run=True)


def test_gorilas_two_networks_must_be_two(tmp_path: Path) -> None:
    """Else what learns would be the target of its own."""

    made = MyNetwork(gymnasium.spaces.Box(-1, 1, (4,)), (2,))
    error, _ = train(2, gorila(tmp_path), make_network=lambda space, num_outputs: made)
    assert isinstance(error, CollectiveError) and "each call must make a new one" in str(error)


def test_gorilas_two_networks_must_be_alike(tmp_path: Path) -> None:
    """Else what learns would have the targets of a network with other features: parameters alone are copied."""
    generator = np.random.default_rng(0)

    def by_numpy(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = Masked(space, num_outputs)
        made.mask.copy_(torch.from_numpy(generator.random(4)))
        return made

    error, _ = train(2, gorila(tmp_path), make_network=by_numpy)
    assert isinstance(error, CollectiveError) and "not alike each time" in str(error)


class NoGradient(torch.autograd.Function):
    """Passes values on as they are; its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full_like(grad, math.nan)


def test_gorila_learns_nothing_from_gradients_that_are_not_finite(tmp_path: Path) -> None:
    """Though the losses are."""

    class Broken(MyNetwork):
        def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
            super().__init__(space, num_outputs)
            self.heads = nn.ModuleList(nn.Sequential(head, Passing()) for head in self.heads)

    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return NoGradient.apply(x)  # type: ignore[no-untyped-call]

    error, _ = train(2, gorila(tmp_path), make_network=Broken)
    assert isinstance(error, PalaError) and "finite" in str(error), error
    assert not record_of(tmp_path / "r")["completed"]


def test_running_statistics_are_refused(tmp_path: Path) -> None:
    def make(space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        made = MyNetwork(space, num_outputs)
        made.trunk.append(nn.BatchNorm1d(8))
        return made

    (error,) = train(1, configure(tmp_path), make_network=make)
    assert isinstance(error, CollectiveError) and "BatchNorm, LayerNorm" in str(error)


# ---- wrappers --------------------------------------------------------------------------------------------------------


class Doubled(gymnasium.RewardWrapper):
    """Twice the reward."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


def forgetful(env: gymnasium.Env) -> None:
    """Returns nothing."""


def wrapped(*names: str) -> EnvConfig:
    return EnvConfig("CartPole-v1", num_envs=1, wrappers=names)


def test_wrappers_are_put_around_environments_from_within() -> None:
    envs = make_envs(wrapped(f"{__name__}:Doubled", "FrameStackObservation(stack_size=3)", "FlattenObservation"))
    try:
        assert envs.observation_space.shape == (12,)
        envs.reset(np.zeros(1, np.int32))
        assert envs.step(np.zeros(1, np.int64)).rewards == 2
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FlatenObservation", "has no 'FlatenObservation'; did you mean 'FlattenObservation'"),
        ("FlattenObservation(1)", "write `Name`"),
        ("FlattenObservation(a=print())", "write `Name`"),
        ("__import__('os')", "write `Name`"),
        ("FilterObservation(filter_keys={['a']})", "write `Name`"),
        ("FrameStackObservation(stack_size=3)(padding_type=1)", "write `Name`"),
        ("FrameStackObservation(stack=3)", "fails to wrap .*TypeError"),
        ("no_such_module:Wrapper", "names the module 'no_such_module', which cannot be loaded"),
        (f"{__name__}:forgetful", "gives None, but must give a gymnasium.Env"),
        (f"{__name__}:NoSuch", "'env.wrappers' names .*NoSuch', which cannot be loaded"),
        ("os:abort", "is no function or class of a module"),
    ],
)
def test_a_wrapper_that_cannot_be_is_told(name: str, says: str) -> None:
    with pytest.raises(PalaError, match=says):
        make_envs(wrapped(name)).close()


@pytest.mark.parametrize(
    "name", ["NormalizeObservation", "NormalizeReward(gamma=0.9)", "gymnasium.wrappers:NormalizeReward"]
)
def test_wrappers_whose_statistics_nobody_saves_are_refused(name: str) -> None:
    with pytest.raises(PalaError, match=r"no run saves them.*Use 'env.normalize_(observations|rewards)'"):
        make_envs(wrapped(name))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_of_unlike_spaces_are_told(vectorization: Any, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = iter(range(9))

    def make() -> gymnasium.Env:
        name = multiprocessing.current_process().name
        number = next(numbers) if vectorization == "sync" else int(name.endswith("-1"))
        low, high = np.float32(-1 - number), np.float32(1)
        return gymnasium.wrappers.RescaleObservation(gymnasium.make("Pendulum-v1"), low, high)

    with pytest.raises(PalaError) as raised:
        make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=make)
    said = str(raised.value) + capfd.readouterr().err
    assert "Environments must have the same spaces, but the first one made has" in said


def test_a_factory_that_gives_one_environment_twice_is_told() -> None:
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(PalaError, match="returns the same environment again"):
        make_envs(EnvConfig("CartPole-v1", num_envs=2, vectorization="sync"), make_env=lambda: env)
    make_envs(EnvConfig("CartPole-v1", num_envs=1, vectorization="sync"), make_env=lambda: env).close()
    locked = make_envs(EnvConfig(num_envs=2, vectorization="async"), make_env=Locked)  # cannot be pickled, and need not
    locked.close()


def test_a_factory_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(PalaError, match=r"'make_env' cannot be kept .*pickle.*: define it in a module"):
        user_code.keep(tmp_path, UserCode(lambda: lock))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_environment_that_takes_no_render_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(PalaError, match="'own_environment:Corridor-v0' cannot be drawn for a video"):
        _rendered_env(EnvConfig("own_environment:Corridor-v0"), None)
    sys.modules.pop("own_environment")  # for good: it registers only when it is imported
    gymnasium.registry.pop("Corridor-v0")


def test_an_exception_in_training_closes_the_environments(tmp_path: Path) -> None:
    config = configure(tmp_path, steps=10**9)
    config = replace(config, env=replace(config.env, num_envs=2, vectorization="async"))

    def fail(moment: Moment) -> None:
        raise ZeroDivisionError

    (error,) = train(1, config, Callbacks(on_update=fail))
    assert isinstance(error, ZeroDivisionError) and not multiprocessing.active_children()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_died_is_not_waited_for(worker: int, tmp_path: Path) -> None:
    """Nor is another worker left behind."""
    config = configure(tmp_path, steps=10**9)
    config = replace(config, env=replace(config.env, num_envs=2, vectorization="async"))

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, Request(config, UserCode(lambda: Deadly(worker))))

    (error,) = run_ranks(1, main)
    assert isinstance(error, PalaError) and "its process has ended (status 3)" in str(error), error
    assert not multiprocessing.active_children()


def test_ale_ids_take_no_wrappers() -> None:
    with pytest.raises(PalaError, match=r"'ALE/Pong-v5' is played by ale-py's own vector environment.*make_env"):
        make_envs(EnvConfig("ALE/Pong-v5", wrappers=("FlattenObservation",)))


def test_an_id_names_the_module_that_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    envs = make_envs(EnvConfig("own_environment:Corridor-v0", num_envs=1))
    assert envs.observation_space.shape == (8,)
    envs.close()
    with pytest.raises(PalaError, match="names the module 'no_such', which cannot be loaded"):
        make_envs(EnvConfig("no_such:Corridor-v0"))
    sys.modules.pop("own_environment")  # for good: it registers only when it is imported
    gymnasium.registry.pop("Corridor-v0")


@pytest.mark.parametrize(("text", "error"), [("\n1 / 0", "ZeroDivisionError"), ("\nx = (", "SyntaxError")])
def test_a_module_that_fails_is_named_with_the_line(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PalaError, match=rf"which fails in '.*/failing_module.py', line 2: {error}"):
        make_envs(EnvConfig("failing_module:Corridor-v0"))


def test_an_id_whose_package_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium.register("Missing-v0", entry_point="no_such_package.envs:Missing")
    try:
        with pytest.raises(PalaError, match="'Missing-v0' cannot be made: No module named 'no_such_package'"):
            make_envs(EnvConfig("Missing-v0", num_envs=1))
    finally:
        gymnasium.registry.pop("Missing-v0")


# ---- the window ------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A run whose environment draws itself."""
    network = actor_critic(Sparkle.observation_space, Sparkle.action_space, CARTPOLE)
    run = make_run(tmp_path / "run", CARTPOLE, network)  # type: ignore[arg-type]
    user_code.keep(run, UserCode(lambda: Sparkle("rgb_array")))
    user_code.trust_own(run)
    return run


@pytest.mark.filterwarnings("ignore:no fast renderer")
def test_a_policy_plays_in_a_window(
    drawn: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pygame", reason="a window needs pygame")
    monkeypatch.setattr(play, "prepare", lambda threads: None)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr("sys.argv", ["play", str(drawn), "--episodes", "2"])
    play.main()
    assert capsys.readouterr().out == "an episode of 5 steps, return 5.0\n" * 2


@pytest.mark.filterwarnings("ignore:no fast renderer")
def test_a_window_takes_the_size_of_its_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame", reason="a window needs pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    window = Window("sizes")
    assert all(window.show(np.zeros((height, 400, 3), np.uint8), 100) for height in (300, 500))
    window.close()


def test_play_without_a_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["play"])
    with pytest.raises(SystemExit):
        play.main()
    assert capsys.readouterr().err.startswith("pala: error: Name the folder of the run to watch")


def test_without_pygame_a_sentence_names_the_video(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program in (evaluate, play):
        monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.setattr("sys.argv", ["play", str(drawn)])
    with pytest.raises(SystemExit):
        play.main()
    assert "`pala evaluate RUN --video FILE.mp4` does without" in capsys.readouterr().err
    film = tmp_path / "v.mp4"
    monkeypatch.setattr("sys.argv", ["evaluate", str(drawn), "--video", str(film), "--episodes", "0"])
    evaluate.main()
    assert "an episode of 5 steps, return 5." in capsys.readouterr().out and film.exists()


# ---- the page and the examples ---------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function as a script of one rank, without MPI, where trainings take few steps."""
    communicators: list[MemoryCommunicator] = []

    def few(config: Config) -> Config:
        run = replace(config.run, threads=1, tensorboard=False, log_interval_s=0.1)
        steps, episodes = min(config.total_steps, 300), min(config.evaluation.episodes, 2)
        evaluation = replace(config.evaluation, episodes=episodes)
        return checked(replace(config, total_steps=steps, run=run, evaluation=evaluation))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "start_mpi", lambda: communicators[-1])
    monkeypatch.setattr(entry, "prepare", lambda threads: None)
    monkeypatch.setattr(pala, "checked", few)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(script: Callable[[], Any]) -> Any:
        def main(comm: MemoryCommunicator) -> Any:
            communicators.append(comm)
            return script()

        (result,) = run_ranks(1, main)
        if isinstance(result, BaseException):
            raise result
        return result

    yield run
    gymnasium.registry.pop("Corridor-v0", None)


@pytest.mark.parametrize("is_own", [False, True])
def test_fit_tells_settings_that_nothing_reads(
    is_own: bool, one_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the environment is made in Python, the settings of Atari too, though the id is an Atari game's."""
    env = EnvConfig("ALE/Pong-v5" if is_own else "CartPole-v1", num_envs=2, noop_max=5)
    config = replace(configure(tmp_path, steps=40), env=env, gorila=GorilaConfig(num_shards=3))
    make_env = (lambda: gymnasium.make("CartPole-v1")) if is_own else None
    one_rank(lambda: pala.fit(config, make_env=make_env))
    said = [line for line in capsys.readouterr().err.splitlines() if "nothing reads" in line]
    assert len(said) == 1 and said[0].startswith("'env.noop_max', 'gorila.num_shards': set, but nothing reads them")


def test_fit_in_a_thread_says_that_it_hears_no_signals(
    one_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SIGTERM ended it without a checkpoint and without a word."""
    one_rank(lambda: pala.fit(configure(tmp_path, steps=40)))  # a rank of tests is a thread
    assert capsys.readouterr().err.count("runs in a thread, which hears no signals") == 1
    note_on_thread("stop")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_started_mpi", [False, True])
def test_a_run_by_fit_says_what_made_it(
    has_started_mpi: bool, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git is asked before the first fit has started MPI, and never after that."""
    asked = list[str]()
    monkeypatch.setattr(entry, "facts", cache(entry.facts.__wrapped__))
    monkeypatch.setattr(entry, "has_started_mpi", lambda: has_started_mpi)
    if has_started_mpi:
        monkeypatch.setattr(provenance.platform, "platform", None)  # it starts a process, too
    monkeypatch.setattr(provenance, "_git", lambda folder, what, *_: asked.append(what) or "abc")
    for _ in range(2):
        result = one_rank(lambda: pala.fit(configure(tmp_path, steps=50)))
        segment = record_of(result.run)["segments"][0]
        shutil.rmtree(result.run)
        assert segment["command"] and segment["platform"] and "torch" in segment["versions"]
        assert segment["git_commit"] == (None if has_started_mpi else "abc")
        monkeypatch.setattr(entry, "has_started_mpi", lambda: True)
    assert asked == ([] if has_started_mpi else ["ls-files", "rev-parse", "status", "rev-parse", "ls-files"])


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_runs"), [("python", 6, 4), ("own_network", 3, 1), ("coming_from", 2, 2)]
)
def test_the_page_as_written(name: str, num_blocks: int, num_runs: int, one_rank: Any, tmp_path: Path) -> None:
    page = PAGE.with_name(f"{name}.md")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if name == "coming_from":  # the others are of other libraries
        blocks = [block for block in blocks if block.startswith("# PALA")]
    assert len(blocks) == num_blocks
    names: dict[str, Any] = {"__name__": "page"}

    def script() -> None:
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)

    one_rank(script)
    assert len(list((tmp_path / "runs").iterdir())) == num_runs


@pytest.mark.parametrize("name", ["own_environment", "own_network", "hyperparameter_search", "load_and_act", "t_maze"])
def test_the_examples(name: str, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments, says = {
        "own_environment": ([], "mean return"), "own_network": ([], "steps; "),
        "hyperparameter_search": (["--trials", "2"], "best: "),
        "load_and_act": ([str(tmp_path / "run")], "mean return"),
        "t_maze": (["gru", "2000"], "memory gru: mean return"),
    }[name]  # fmt: skip
    if name == "hyperparameter_search":
        pytest.importorskip("optuna", reason="the extra `examples` is not installed")
    if name == "load_and_act":
        make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    monkeypatch.setattr("sys.argv", [name, *arguments])
    one_rank(lambda: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__"))
    assert says in capsys.readouterr().out


def test_every_example_is_tried() -> None:
    tried = {"own_environment", "own_network", "hyperparameter_search", "load_and_act", "t_maze"}
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {name for name in names if not name.startswith("gossip_")} == tried  # those of gossip: test_examples
