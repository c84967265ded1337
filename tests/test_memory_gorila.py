"""Whole trainings of Gorila on threads."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from metric_table import METRICS
from pala.config import Config, EnvConfig, GorilaConfig
from pala.envs.vector import Envs
from pala.gorila import agent
from pala.gorila.agent import GorilaAgent
from pala.gorila.roles import assign
from pala.gorila.shard import assemble
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.run.hooks import Callbacks, Moment, UserCode
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.testing.faults import (
    Fault,
    fail_at,
    fail_at_message,
    signal_at,
)
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.helpers import slow_among
from support.memory_jobs import (
    ENDLESS,
    GORILA,
    SEPARATE,
    Paced,
    Trained,
    gorila,
    saved_steps,
    train,
)


@pytest.mark.parametrize(("ranks", "config"), [(1, replace(GORILA, num_shards=1)), (3, GORILA), (6, SEPARATE)])
def test_gorila_completes_with_the_budget_met(ranks: int, config: GorilaConfig, tmp_path: Path) -> None:
    trained = train(ranks, gorila(tmp_path, config))
    beyond = 400 if config.roles == "separate" else 100  # who is told nothing acts twice as long
    assert trained.ended_well() and 400 <= trained.results[0].global_steps < 400 + beyond
    assert trained.fields() == {metric.name for metric in METRICS if metric.is_of("gorila")} - {"info_KEY"}
    states = trained.states()
    assert sum(saved_steps(states)) == trained.results[0].global_steps
    learned = 0 if config.roles == "separate" else 20  # there actors wait for no learner
    assert assemble(states).version > learned and trained.total("messages_refused") == 0
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())


@pytest.mark.slow
def test_a_minibatch_that_is_too_large_to_be_sent_is_refused_before_it_is_made(tmp_path: Path) -> None:
    config = gorila(tmp_path, replace(GORILA, minibatch_size=1_000_000))
    for error in train(2, replace(config, env=EnvConfig(num_envs=2))).results:
        assert isinstance(error, PalaError) and "lower 'env.num_envs' or 'gorila.minibatch_size'" in str(error)


@pytest.mark.parametrize(
    ("ranks", "config", "fault"),
    [
        (3, GORILA, fail_at(2, 10)),
        pytest.param(6, SEPARATE, fail_at(3, 10), marks=pytest.mark.slow),
        pytest.param(6, SEPARATE, fail_at_message(5, 30), marks=pytest.mark.slow),
    ],
    ids=["bundle", "learner", "actor"],
)
def test_gorila_outlives_what_others_can_do_as_well(
    ranks: int, config: GorilaConfig, fault: Fault, tmp_path: Path
) -> None:
    steps = 2400 if config is SEPARATE else 800  # actors wait for no learner
    trained = train(ranks, gorila(tmp_path, config, steps=steps), [fault])
    assert isinstance(trained.results[fault.rank], Killed)  # type: ignore[union-attr]
    assert trained.ended_well(but_for=[fault.rank])  # type: ignore[union-attr]
    assert trained.results[0].global_steps >= steps


@pytest.mark.parametrize(("ranks", "config"), slow_among([(3, GORILA), (6, SEPARATE)], 6))
def test_the_death_of_a_shard_ends_gorila_with_a_sentence(ranks: int, config: GorilaConfig, tmp_path: Path) -> None:
    trained = train(ranks, gorila(tmp_path, config, ENDLESS), [fail_at_message(1, 20)])
    sentence = "Rank 1 has died, which served shard 1 of the parameters; nothing can be learned without it"
    for rank in {*range(ranks)} - {1}:
        assert isinstance(trained.results[rank], EndError) and sentence in str(trained.results[rank]), trained.results
    assert not trained.record["completed"]
    resumed = trained.resume(ranks, 400)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 400


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_gorila_which_is_resumed(tmp_path: Path) -> None:
    trained = train(3, gorila(tmp_path, GORILA, ENDLESS), [signal_at(2, update=10)])
    assert {result.status for result in trained.results} == {"stopped"}
    begin, made = assemble(trained.states()), trained.results[0].global_steps
    resumed = trained.resume(3, made + 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 200
    assert assemble(resumed.states(first=True)).parameters.equal(begin.parameters)
    assert assemble(resumed.states()).version > begin.version


def test_minibatches_are_drawn_anew_after_each_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as they were drawn before, nor as another rank draws them."""
    streams, before_training = [], GorilaAgent.before_training

    def note(agent: GorilaAgent, previous: Path | None) -> None:
        before_training(agent, previous)
        assert agent.store is not None
        streams.append(str(agent.store.rng.bit_generator.state))

    monkeypatch.setattr(GorilaAgent, "before_training", note)
    trained = train(2, gorila(tmp_path, steps=100))
    for steps in (200, 300):
        assert trained.resume(2, steps).ended_well()
    assert len(set(streams)) == len(streams) == 6


@pytest.mark.slow
def test_other_ranks_and_roles_go_on_with_gorilas_parameters(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(3, gorila(tmp_path))
    begin, made = assemble(trained.states()), trained.results[0].global_steps
    config = gorila(tmp_path, SEPARATE, made + 300)
    resumed = train(6, config, resume=trained.run)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 300
    assert "The run had 3 ranks and now has 6: the shards' parameters are shared out" in capsys.readouterr().err
    begun = assemble(resumed.states(first=True))
    assert begun.parameters.equal(begin.parameters) and begun.version == begin.version


def test_another_optimiser_begins_new_squares(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """AdaGrad's are sums, RMSprop's means: its first steps would be a hundred times too long."""
    trained = train(2, gorila(tmp_path, replace(GORILA, optimiser="rmsprop")))
    assert assemble(trained.states()).squares.any()
    resumed = train(2, gorila(tmp_path, replace(GORILA, optimiser="adagrad"), 800), resume=trained.run)
    assert resumed.ended_well() and "squares are not those of the new one" in capsys.readouterr().err
    assert not assemble(resumed.states(first=True)).squares.any()


def test_a_resume_that_cannot_learn_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(2, gorila(tmp_path))
    made = trained.results[0].global_steps
    config = replace(trained.config, gorila=replace(GORILA, min_replay_steps=300), total_steps=made + 100)
    assert train(2, config, resume=trained.run).ended_well()
    said = capsys.readouterr().err
    assert "it is filled again before learning continues" in said
    assert "100 steps are left, and learning begins again after" in said


def test_ranks_that_do_not_act_keep_no_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = [], Envs.close
    monkeypatch.setattr(Envs, "close", lambda envs: (closed.append(threading.current_thread().name), close(envs)))
    job = train(6, gorila(tmp_path, SEPARATE, 300))
    assert job.ended_well()
    actors = assign(SEPARATE, 6, 0).actors
    assert [closed.count(f"rank-{rank}") for rank in range(6)] == [2 if rank in actors else 3 for rank in range(6)]


def test_a_staleness_that_discards_many_gradients_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(2, gorila(tmp_path, replace(GORILA, max_staleness_updates=1), 100)).ended_well()
    assert "many will be discarded (`gradients_stale`)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "config", "is_said"),
    [
        (4, replace(GORILA, parameters_period_updates=4), False),  # 4 (2 x 4 + 4) is 48
        (9, replace(GORILA, parameters_period_updates=4), True),
        (17, replace(SEPARATE, num_learners=13), False),  # who does not act has one minibatch
    ],
)
def test_a_staleness_that_discards_few_gradients_is_not_told(
    ranks: int, config: GorilaConfig, is_said: bool, capsys: pytest.CaptureFixture
) -> None:
    config = replace(config, update_period_steps=4, max_staleness_updates=100)
    agent._warn_of_staleness(Config(env=EnvConfig(num_envs=16), gorila=config), assign(config, ranks))
    assert ("many will be discarded" in capsys.readouterr().err) == is_said


def test_a_replay_with_no_room_for_every_environment_is_refused(tmp_path: Path) -> None:
    config = gorila(tmp_path, replace(GORILA, replay_capacity_steps=7, min_replay_steps=7, minibatch_size=2))
    for error in train(2, replace(config, env=replace(config.env, num_envs=4))).results:
        assert isinstance(error, PalaError)
        assert "'gorila.replay_capacity_steps' is 7, less than a step of each environment of 2 actors" in str(error)
        assert "raise it to 8 at least" in str(error)


@pytest.mark.parametrize(("period", "is_said"), [(10, False), (11, True)])
@pytest.mark.slow
def test_a_budget_that_never_copies_the_target_network_is_told(
    period: int, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of 100 steps 40 come after the first 60, and four pay for an update."""
    assert train(1, gorila(tmp_path, replace(GORILA, num_shards=1, target_period_updates=period), 100)).ended_well()
    sentence = "pays for about 10 updates, but the target network is first copied after"
    assert (sentence in capsys.readouterr().err) == is_said


@pytest.mark.slow
def test_steps_in_which_an_environment_fails_are_left_out_counted_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    spoiled, had = list[int](), set[int]()  # at which steps; how many at the end of an interval

    class Spoiled(Paced):
        steps = 0

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            self.steps += 1
            if self.steps % 10 == 0 and threading.current_thread().name == "rank-1":
                reward = (math.nan, math.inf)[len(spoiled) % 2]
                spoiled.append(self.steps)
            return observation, reward, *rest

    def is_enough(moment: Moment) -> bool | None:
        if moment.rank == 1:
            had.add(len(spoiled))
        return False if moment.rank == 1 and len(had) > 3 and moment.updates > 20 else None

    def main(comm: MemoryCommunicator) -> Result:
        request = Request(
            config, UserCode(lambda: Spoiled(gymnasium.make("CartPole-v1"))), callbacks=Callbacks(on_interval=is_enough)
        )
        return run_rank(comm, request)

    config = gorila(tmp_path, steps=ENDLESS)
    config = replace(config, env=replace(config.env, restarts=10**6))
    job = Trained(config, run_ranks(2, main))
    assert job.ended_well() and all(bool(tensor.isfinite().all()) for tensor in job.policy.values())
    assert job.total("rewards_not_finite") == job.total("rewards_not_finite", rank=1) == len(spoiled)
    assert job.total("env_failures", rank=1) == len(spoiled)
    assert job.total("gradients_not_finite") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "in which environments failed" in line]
    assert len(said) == 1 and said[0].startswith("[rank 1] left"), said


def test_roles_that_do_not_fit_are_a_mistake_of_all(tmp_path: Path) -> None:
    errors = train(3, gorila(tmp_path, SEPARATE)).results
    assert all(isinstance(error, CollectiveError) and "but the job has 3" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())
