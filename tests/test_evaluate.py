"""Evaluation: fair episodes, statistics, scores, which policy is loaded, and what is written."""

from __future__ import annotations

import copy
import csv
import importlib.resources
import itertools
import json
import math
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pala
from pala.config import Config, EnvConfig, EvaluationConfig, ExchangeConfig, NetworkConfig, to_table
from pala.envs.processes import EnvProcesses
from pala.envs.vector import Envs, Episode, Step, make_envs
from pala.evaluation import evaluate as program
from pala.evaluation import scoring
from pala.evaluation.policy import Policy, load_policy, policy_of
from pala.evaluation.record import Evaluation, action_words, read_evaluation, save
from pala.evaluation.references import human_normalised, reference_of
from pala.evaluation.scoring import Acting, _statistics, evaluate, play_episodes
from pala.evaluation.video import _atari_screen, _write_video, filmed, record_video
from pala.job import conclusion
from pala.job.conclusion import conclude
from pala.job.request import Result
from pala.networks.network import ActorCritic, FlatParameters
from pala.run import checkpoint, run_folder, user_code
from pala.run.checkpoint import RankState
from pala.run.hooks import UserCode
from pala.run.lock import lock_folder
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt
from support.environments import Sparkle
from support.policies import CARTPOLE, make_run, network_of

PONG = Config(  # 20 steps
    env=EnvConfig(id="ALE/Pong-v5", max_episode_frames=80), network=NetworkConfig(background=0.0)
)


class Stuck(Sparkle):
    """Cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("the viewer is gone")


class ShortAndLong:
    """Stands for `Envs`: environment 0 has an episode of return 0 each step, environment 1 one of 10 each 10 steps."""

    num_envs = 2
    name = "ShortAndLong"
    action_masks = None

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        self._steps = 0
        return np.zeros((2, 1))

    def step(self, actions: np.ndarray) -> Step:
        self._steps += 1
        episodes = [Episode(0.0, 1, 0)] + ([Episode(10.0, 10, 1)] if self._steps % 10 == 0 else [])
        nothing = np.zeros(2)
        return Step(np.zeros((2, 1)), nothing, nothing, nothing, nothing, episodes, nothing > 0)


class Echo:
    """Stands for `Policy`."""

    def actions(self, observations: np.ndarray, masks: np.ndarray | None, greedy: bool) -> np.ndarray:
        return observations

    def reset(self, began: np.ndarray) -> None:
        pass


def play(episodes: int, timeout_s: float = math.inf) -> tuple[list[Episode], int]:
    envs, policy = cast(Envs, ShortAndLong()), cast(Policy, Echo())
    return play_episodes(envs, policy, False, np.zeros(2, np.int32), episodes, timeout_s)


def save_rank(
    run: Path, rank: int, weight: float, flat: FlatParameters, ranks: int = 2, updates: int = 1, steps: int = 100
) -> torch.Tensor:  # fmt: skip
    """A checkpoint with random parameters, which are returned."""
    folder = run / "checkpoints" / "segment-000"
    folder.mkdir(parents=True, exist_ok=True)
    parameters = torch.randn(len(flat.data))
    counters = {"weight": weight, "steps_by_rank": [steps, 200], "base_steps": 7}
    counters |= {"updates": updates, "applied": updates, "num_squares": updates, "spares": 0, "lost": []}
    counters |= {"local_steps": 100, "round": 1, "time_s": 1.0}
    state = RankState(
        rank, ranks, flat.signature, {"parameters": parameters, "mean_square": parameters * 0}, {}, counters
    )
    checkpoint.save_rank(folder, state)
    return parameters


def save_both(run: Path, flat: FlatParameters, steps: int = 100) -> None:
    for rank in range(2):
        save_rank(run, rank, 1.0, flat, steps=steps)


@pytest.fixture
def cartpole_run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))


def test_short_episodes_are_not_favoured() -> None:
    played, steps = play(episodes=4)
    assert sorted(episode.episode_return for episode in played) == [0, 0, 10, 10]
    assert steps == 40


def test_an_episode_without_an_end_is_cut(cartpole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_folder.config_of(cartpole_run)
    table = json.loads((cartpole_run / "run.json").read_text())
    table["config"] = to_table(replace(config, evaluation=replace(config.evaluation, max_episode_steps=5)))
    (cartpole_run / "run.json").write_text(json.dumps(table))
    evaluation = evaluate(cartpole_run, 4, 2, Acting(seed=1))
    assert evaluation.mean_length_steps == evaluation.mean_return == 5
    assert "4 of 4 episodes were cut after 5 steps ('evaluation.max_episode_steps' or" in capsys.readouterr().err


def test_episodes_that_are_all_there_are_not_given_up() -> None:
    played, _ = play(episodes=1, timeout_s=0.0)
    assert len(played) == 1
    with pytest.raises(PalaError, match="given up after 0 s"):
        play(episodes=2, timeout_s=0.0)


def test_an_episode_that_training_would_cut_is_cut_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CARTPOLE, env=replace(CARTPOLE.env, max_episode_steps=3))
    run = make_run(tmp_path / "run", config, network_of(config))
    assert evaluate(run, 2, 1, Acting()).mean_length_steps == 3
    assert "2 of 2 episodes were cut after 3 steps" in capsys.readouterr().err


def test_a_long_evaluation_tells_how_far_it_has_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a second a step: nothing before 20 s, then a line each 20 s, to standard error."""
    monkeypatch.setattr(scoring.time, "monotonic", map(float, itertools.count()).__next__)
    play(episodes=2)  # 10 steps
    assert capsys.readouterr() == ("", "")
    play(episodes=10)  # 50 steps
    assert capsys.readouterr() == (
        "",
        "Evaluation of ShortAndLong: 7 of 10 episodes, mean return so far 2.9.\n"
        "Evaluation of ShortAndLong: 9 of 10 episodes, mean return so far 4.4.\n",
    )
    assert scoring._progress("Go", [], 1000) == "Evaluation of Go: 0 of 1,000 episodes."


def test_an_odd_number_of_episodes_is_shared_out() -> None:
    played, _ = play(episodes=5)
    assert [sum(episode.env_index == i for episode in played) for i in range(2)] == [3, 2]


def test_games_that_do_not_end_are_given_up() -> None:
    with pytest.raises(
        PalaError, match=r"given up after 0\.1 s \('evaluation\.timeout_s'\) with \d+ of 1000000 episodes"
    ):
        play(episodes=10**6, timeout_s=0.1)


def test_statistics_and_repeatability(cartpole_run: Path) -> None:
    first, second, other = (evaluate(cartpole_run, 6, 4, Acting(seed=s)) for s in (0, 0, 1))
    assert first.returns == second.returns != other.returns
    assert (first.episodes, first.num_envs, len(first.returns)) == (6, 4, 6)
    assert first.mean_return == pytest.approx(np.mean(first.returns))
    assert first.standard_error == pytest.approx(np.std(first.returns, ddof=1) / math.sqrt(6))
    assert first.mean_length_steps == first.mean_return  # CartPole's reward is 1 a step
    assert (first.policy, first.global_steps, first.human_normalised_score) == ("final", 1234, None)


@pytest.mark.parametrize("returns", [[math.nan], [1.0, math.inf, 2.0]])
def test_returns_that_are_not_finite_are_told(returns: list[float]) -> None:
    with pytest.raises(PalaError, match=rf"1 of {len(returns)} returns? is not finite: the environment gave"):
        _statistics([Episode(value, 1, 0) for value in returns])


def test_random_actions_are_told_exactly() -> None:
    assert [action_words(False, epsilon) for epsilon in (0.05, 0.001, 0.0, None)] == [
        "5% random actions", "0.1% random actions", "greedy actions", "sampled actions"
    ]  # fmt: skip


def test_greedy_actions_need_no_random_stream(cartpole_run: Path) -> None:
    config = run_folder.config_of(cartpole_run)
    policy = load_policy(cartpole_run, config, make_envs(replace(config.env, num_envs=1)))
    observations = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    for greedy in (True, False):
        policy.seed(0)
        first = policy.act(observations, greedy)
        policy.seed(1)
        assert (first == policy.act(observations, greedy)).all() == greedy


def test_one_episode_has_no_standard_error(cartpole_run: Path) -> None:
    evaluation = evaluate(cartpole_run, 1, 16, Acting(greedy=True))
    assert evaluation.standard_error is None
    assert "over 1 episode, greedy actions" in str(evaluation)


@pytest.mark.slow
def test_atari_is_normalised_and_plays_whole_games(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", PONG, network_of(PONG))
    evaluation = evaluate(run, 2, 2, Acting())
    assert evaluation.mean_length_steps == 20
    assert evaluation.human_normalised_score == pytest.approx((evaluation.mean_return + 20.7) / 35.3 * 100)
    assert str(evaluation).startswith("Pong: mean return ")
    assert "% human-normalised (dqn_zoo table), sampled actions, up to 30 no-ops" in str(evaluation)
    assert (evaluation.frames_per_step, evaluation.random_score, evaluation.human_score) == (4, -20.7, 14.6)


def test_the_table_of_scores() -> None:
    text = importlib.resources.files("pala.evaluation").joinpath("atari_scores.csv").read_text(encoding="utf-8")
    games = [row["game"] for row in csv.DictReader(text.splitlines())]
    assert len(set(games)) == len(games) == 57
    assert reference_of("ALE/Pong-v5") == (-20.7, 14.6)
    assert reference_of("ALE/Tetris-v5") is None
    assert human_normalised(14.6, -20.7, 14.6) == 100
    assert human_normalised(-20.7, -20.7, 14.6) == 0


def test_without_a_policy_the_checkpoints_are_averaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE)
    flat = FlatParameters(network_of(CARTPOLE), torch.device("cpu"))
    light, heavy = save_rank(run, 0, 0.5, flat), save_rank(run, 1, 1.5, flat)
    policy = load_policy(run, CARTPOLE, make_envs(replace(CARTPOLE.env, num_envs=1)))
    assert policy.source == "mean of checkpoints of 2 ranks"
    assert policy.global_steps == 307
    found = torch.cat([parameter.detach().reshape(-1) for parameter in policy.network.parameters()])
    torch.testing.assert_close(found, (light + 3 * heavy) / 4)


def test_a_run_that_trains_is_followed_to_its_final_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each checkpoint is scored once; while there is no newer one, nothing is."""
    run, network = make_run(tmp_path / "run", CARTPOLE), network_of(CARTPOLE)
    flat = FlatParameters(copy.deepcopy(network), torch.device("cpu"))

    def trains() -> Iterator[None]:
        yield  # no checkpoint yet
        save_both(run, flat)
        yield
        yield
        save_both(run, flat, 900)
        yield
        header = {"config": to_table(CARTPOLE), "global_steps": 1234, "signature": flat.signature}
        checkpoint.save_policy(run / "policy.safetensors", dict(network.state_dict()), header)
        run_folder.RunRecord.begin(run, CARTPOLE, {"ranks": 1}).end("completed", global_steps=1234)
        yield

    waits = trains()
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setattr(program.time, "sleep", lambda _: next(waits))
    monkeypatch.setattr("sys.argv", ["evaluate", str(run), "--follow", "--episodes", "2", "--threads", "1"])
    program.main()
    scored = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(one["policy"][:5], one["global_steps"]) for one in scored] == [
        ("mean ", 307), ("mean ", 1107), ("final", 1234)
    ]  # fmt: skip
    assert len(list(waits)) == 0 and capsys.readouterr().out.count("mean return") == 3
    for other in ("--best", "--video=x.mp4", "--episodes=0"):
        with pytest.raises(PalaError, match="'--follow' scores checkpoints as they come"):
            program.parse([str(run), "--follow", other])


def test_a_follower_says_that_nobody_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", CARTPOLE)
    run_folder.RunRecord.begin(run, CARTPOLE, {"ranks": 2, "status": "stopped"})
    waits = iter(range(5))

    def wait(_: float) -> None:
        if next(waits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(program.time, "sleep", wait)
    with pytest.raises(KeyboardInterrupt), lock_folder(run) or nullcontext():
        program._follow(run, pytest.fail)
    assert not capsys.readouterr().err, "somebody trains"
    waits = iter(range(5))
    with pytest.raises(KeyboardInterrupt):
        program._follow(run, pytest.fail)
    assert capsys.readouterr().err.count(f"No process trains run '{run}' now (") == 1


def test_a_follower_tries_again_only_if_there_are_newer_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", CARTPOLE)
    flat = FlatParameters(network_of(CARTPOLE), torch.device("cpu"))
    save_both(run, flat)
    steps, tried = iter([500, 900]), []

    def score() -> Evaluation:
        tried.append(checkpoint.global_steps(run))
        raise PalaError("it is gone")

    def newer(_: float) -> None:
        if (made := next(steps, None)) is not None:
            save_both(run, flat, made)

    monkeypatch.setattr(program.time, "sleep", newer)
    with pytest.raises(PalaError, match="it is gone"):
        program._follow(run, score)
    assert tried == [307, 707, 1107]


def test_a_follower_scores_nothing_twice_that_was_saved_while_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks save some seconds apart: what is read may be newer than what was seen."""
    run = make_run(tmp_path / "run", CARTPOLE)
    flat = FlatParameters(network_of(CARTPOLE), torch.device("cpu"))
    save_both(run, flat)
    scored = []

    def score() -> Evaluation:
        if not scored:
            save_both(run, flat, 500)
        scored.append(checkpoint.global_steps(run))
        return mock.Mock(policy="mean of checkpoints", global_steps=scored[-1])

    monkeypatch.setattr(program.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        program._follow(run, score)
    assert scored == [707]


def test_of_independent_learners_the_first_that_has_learned_is_taken_and_named(tmp_path: Path) -> None:
    config = replace(CARTPOLE, exchange=ExchangeConfig("none"))
    run, flat = make_run(tmp_path / "run", config), FlatParameters(network_of(CARTPOLE), torch.device("cpu"))
    save_rank(run, 0, 1.0, flat, updates=0)
    learned = save_rank(run, 1, 1.0, flat)
    policy = policy_of(run)
    assert policy.source == "checkpoint of rank 1 of 2 ranks"
    assert torch.cat([parameter.detach().reshape(-1) for parameter in policy.network.parameters()]).equal(learned)


def test_the_best_policy_is_played_where_it_is_asked_for(tmp_path: Path) -> None:
    run, best = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE)), network_of(CARTPOLE)
    with pytest.raises(PalaError, match=r"has no 'best_policy.safetensors': one is kept with the checkpoints"):
        pala.load_policy(run, best=True)
    signature = FlatParameters(copy.deepcopy(best), torch.device("cpu")).signature
    header = {"global_steps": 77, "signature": signature, "mean_return": 3.0}
    checkpoint.save_policy(run / "best_policy.safetensors", dict(best.state_dict()), header)
    policy = pala.load_policy(run, best=True)
    assert (policy.source, policy.global_steps, pala.load_policy(run).global_steps) == ("best", 77, 1234)
    assert all(a.equal(b) for a, b in zip(policy.network.parameters(), best.parameters(), strict=True))
    evaluation = pala.evaluate_policy(run, 2, 1, best=True)
    assert str(evaluation).endswith("best policy after 77 steps")


@pytest.mark.parametrize("same_game", [True, False])
def test_the_best_policy_is_told_at_the_end(
    same_game: bool, cartpole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another game, as that of a run that was resumed, it tells nothing."""
    game = CARTPOLE if same_game else replace(CARTPOLE, env=replace(CARTPOLE.env, id="Acrobot-v1"))
    header = {"config": to_table(game), "global_steps": 1077, "signature": 0, "mean_return": 3.5}
    checkpoint.save_policy(cartpole_run / "best_policy.safetensors", dict(network_of(CARTPOLE).state_dict()), header)
    config = replace(CARTPOLE, evaluation=replace(CARTPOLE.evaluation, episodes=0))
    conclude(Result(cartpole_run, "completed", 1234, None, True, 0), config, Interrupt())
    told = "best policy: mean return 3.5 over the 100 episodes of training that ended after 1,077 steps; `pala evaluate"
    assert (told in capsys.readouterr().out) == same_game


@pytest.mark.parametrize("better", [True, False])
def test_the_best_policy_is_told_only_if_it_beats_the_final_one(
    better: bool, cartpole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An episode of CartPole returns at least 8 and at most 500."""
    header = {"config": to_table(CARTPOLE), "global_steps": 77, "signature": 0, "mean_return": 501.0 if better else 7.0}
    network = network_of(CARTPOLE)
    checkpoint.save_policy(cartpole_run / "best_policy.safetensors", dict(network.state_dict()), header)
    config = replace(CARTPOLE, evaluation=replace(CARTPOLE.evaluation, episodes=1))
    result = conclude(Result(cartpole_run, "completed", 1234, None, True, 0), config, Interrupt())
    assert result.evaluation is not None
    assert ("best policy: mean return 501" in capsys.readouterr().out) == better


def test_no_policy_and_no_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE)
    with pytest.raises(PalaError, match="has no checkpoint"):
        evaluate(run, 1, 1, Acting())


def test_a_policy_of_another_size(tmp_path: Path) -> None:
    other = replace(CARTPOLE, network=NetworkConfig(mlp_hidden=(16,)))
    run = make_run(tmp_path / "run", CARTPOLE, network_of(other))
    with pytest.raises(PalaError, match=r"another network .*'policy_head.weight' should be \[2, 8\] and is \[2, 16\]"):
        evaluate(run, 1, 1, Acting())


def test_a_policy_of_another_depth(tmp_path: Path) -> None:
    other = replace(CARTPOLE, network=NetworkConfig(mlp_hidden=(8, 8)))
    run = make_run(tmp_path / "run", CARTPOLE, network_of(other))
    with pytest.raises(PalaError, match=r"should be missing and is \[8"):
        evaluate(run, 1, 1, Acting())


def test_a_policy_that_is_not_finite(tmp_path: Path) -> None:
    network = network_of(CARTPOLE)
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    run = make_run(tmp_path / "run", CARTPOLE, network)
    with pytest.raises(PalaError, match="not finite"):
        evaluate(run, 1, 1, Acting())


def test_an_environment_made_in_python(tmp_path: Path) -> None:
    config = Config(env=EnvConfig(id="ALE/Pong-v5"), network=NetworkConfig(mlp_hidden=(8,)))
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, config.network)
    run = make_run(tmp_path / "run", config, network)
    user_code.keep(run, UserCode(Sparkle))
    user_code.trust_own(run)
    evaluation = evaluate(run, 3, 2, Acting())
    assert evaluation.returns == [5, 5, 5]
    assert (evaluation.environment, evaluation.noop_max) == ("Sparkle", None)
    with pytest.raises(PalaError, match="draws no pictures"):
        record_video(run, tmp_path / "video.mp4", Acting())
    run_folder.RunRecord.take_over(run).note(python_environment=True)
    with pytest.raises(PalaError, match="'noop_max' is of PALA's own Atari games"):
        evaluate(run, 3, 2, Acting(other_settings={"noop_max": 0}))
    (run / "make_env.txt").unlink()
    (run / "make_env.pkl").write_bytes(b"nonsense")
    with pytest.raises(PalaError, match="cannot be loaded"):
        evaluate(run, 3, 2, Acting(trust_run=True))


def test_environments_that_cannot_be_closed_cost_neither_score_nor_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, CARTPOLE.network)
    run = make_run(tmp_path / "run", CARTPOLE, network)
    user_code.keep(run, UserCode(Stuck))
    user_code.trust_own(run)
    assert evaluate(run, 3, 2, Acting()).returns == [5, 5, 5]
    assert policy_of(run).source == "final"
    said = capsys.readouterr().err
    assert said.count("The environments cannot be closed (RuntimeError: the viewer is gone).") == 2


@pytest.mark.slow
def test_an_evaluation_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gymnasium's own close waits forever for what the workers have said already."""
    config = replace(CARTPOLE, env=replace(CARTPOLE.env, vectorization="async"))
    run = make_run(tmp_path / "run", config, network_of(CARTPOLE))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EnvProcesses, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, 2, 2, Acting())
    assert not multiprocessing.active_children()


def test_tensorboard_has_what_an_evaluation_found(cartpole_run: Path) -> None:
    """Under the tag that the table of hyperparameters names, too."""
    last_words = conclusion._FinalTasks(cartpole_run, replace(CARTPOLE, run=replace(CARTPOLE.run, tensorboard=True)))
    last_words.evaluate()
    assert (found := last_words.evaluation) is not None
    events = EventAccumulator(str(cartpole_run / "tensorboard")).Reload()
    written = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert written == {
        "evaluation/mean_return": [(found.global_steps, pytest.approx(found.mean_return))],
        "evaluation/mean_length_steps": [(found.global_steps, pytest.approx(found.mean_length_steps))],
    }, "CartPole has no human score"


def test_an_evaluation_counts_that_tensorboard_cannot_take(
    cartpole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conclusion, "TensorBoard", full)
    last_words = conclusion._FinalTasks(cartpole_run, CARTPOLE)
    assert "mean return" in last_words.evaluate() and last_words.evaluation is not None
    assert "TensorBoard's files cannot be written: No space left on device." in capsys.readouterr().err


def test_the_program_writes_json_and_keeps_earlier_results(
    cartpole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    for seed in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["evaluate", str(cartpole_run), "--seed", seed])
        program.main()
        if seed == "1":
            with open(cartpole_run / "evaluations.jsonl", "a", encoding="utf-8") as file:
                file.write('{"mean_re')  # a disk that was full
    newest = json.loads((cartpole_run / "evaluation.json").read_text())
    first, cut, last = (cartpole_run / "evaluations.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in (first, last)]
    assert [line["seed"] for line in lines] == [1, 2] and cut == '{"mean_re'
    assert lines[-1] == newest
    assert set(newest) == set(Evaluation.__dataclass_fields__)
    assert (newest["episodes"], newest["num_envs"]) == (3, 2)  # the run's own settings
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 2
    assert output[1].startswith("CartPole-v1: mean return ")


def test_several_runs_are_scored_each_by_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network, other = network_of(CARTPOLE), replace(CARTPOLE, evaluation=EvaluationConfig(episodes=2, num_envs=1))
    runs = [make_run(tmp_path / "a", CARTPOLE, network), make_run(tmp_path / "b", other, network)]
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setattr("sys.argv", ["evaluate", *map(str, runs), "--threads", "1"])
    program.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": CartPole-v1: mean")[0] for line in said] == [*map(str, runs)]
    assert [json.loads((run / "evaluation.json").read_text())["episodes"] for run in runs] == [3, 2]
    (runs[0] / "policy.safetensors").unlink()
    with pytest.raises(SystemExit) as exit_:
        program.main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.out.startswith(f"{runs[1]}: CartPole-v1: mean"), "the other is scored"
    assert captured.err.startswith(f"pala: error: {runs[0]}: ")
    for option in ("--follow", "--video=x.mp4"):
        with pytest.raises(PalaError, match="is of one run, but 2 are named"):
            program.parse([*map(str, runs), option])
    with pytest.raises(PalaError, match="Name the folder of at least one run"):
        program.parse([])


def test_several_environments_of_one_policy_are_a_table(
    cartpole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    one_worse = ["CartPole-v1", "Acrobot-v1", "CartPole-v1(sutton_barto_reward=True)"]
    monkeypatch.setattr("sys.argv", ["evaluate", str(cartpole_run), "--env.id", *one_worse, "--threads", "1"])
    with pytest.raises(SystemExit) as exit_:
        program.main()
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert said.err.startswith(
        f"pala: error: {cartpole_run}, Acrobot-v1: The policy of run '{cartpole_run}' cannot play 'Acrobot-v1': it was "
        "trained with other observations or actions than Box("
    )
    first, nothing, head, _, own, other = said.out.splitlines()
    assert first == f"{cartpole_run}: sampled actions; final policy after 1,234 steps" and not nothing
    columns = ["environment", "episodes", "mean_return", "standard_error", "min", "median", "max", "mean_length"]
    assert [cell.strip().replace(" ", "_") for cell in head.split("|")[1:-1]] == columns
    scored = [json.loads(line) for line in (cartpole_run / "evaluations.jsonl").read_text().splitlines()]
    for row, env_id, one in zip((own, other), one_worse[::2], scored, strict=True):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[:3] == [env_id, "3", f"{one['mean_return']:.1f}"]
    assert scored[1]["max_return"] == -1, "by its own rewards"
    assert [one["other_settings"] for one in scored] == [{}, {"env_id": one_worse[2]}]
    assert json.loads((cartpole_run / "evaluation.json").read_text()) == scored[0], "the other is no result of the run"
    for option in ("--follow", "--video=x.mp4"):
        with pytest.raises(PalaError, match="is of one environment, but 2 are named"):
            program.parse([str(cartpole_run), option, "--env.id", "CartPole-v0", "CartPole-v1"])


def test_another_environment_is_played_in_place_of_one_made_in_python(tmp_path: Path) -> None:
    """Though the run's settings, which were not read, name the same id."""
    run = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    user_code.keep(run, UserCode(Sparkle))
    user_code.trust_own(run)
    run_folder.RunRecord.take_over(run).note(python_environment=True)
    evaluation = pala.evaluate_policy(run, episodes=2, env_id="CartPole-v1")
    assert (evaluation.environment, evaluation.other_settings) == ("CartPole-v1", {"env_id": "CartPole-v1"})


@pytest.mark.slow
def test_a_score_by_other_settings_is_no_result_of_the_run(tmp_path: Path) -> None:
    config = replace(PONG, evaluation=EvaluationConfig(episodes=1, num_envs=1))
    run = make_run(tmp_path / "run", config, network_of(config))
    other = {"repeat_action_probability": 0.25, "noop_max": 0, "max_episode_frames": 120}
    evaluation = evaluate(run, 1, 1, Acting(other_settings=other))
    save(run, evaluation)
    assert (evaluation.repeat_action_probability, evaluation.noop_max) == (0.25, 0)
    assert evaluation.mean_length_steps == 30 and evaluation.other_settings == other
    assert "no-ops" not in str(evaluation) and "sticky actions 0.25, at most 120 frames" in str(evaluation)
    assert not (run / "evaluation.json").exists() and read_evaluation(run) is None
    own = pala.evaluate_policy(run, episodes=1, max_episode_frames=120, noop_max=30)  # which is the run's own
    assert own.noop_max == 30 and own.other_settings == {"max_episode_frames": 120}
    with pytest.raises(PalaError, match="greedy actions never are"):
        evaluate(run, 1, 1, Acting(greedy=True, other_settings={"epsilon": 0.1}))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"noop_max": 0}, "'noop_max' is of Atari games only"),
        ({"epsilon": 0.1}, "'epsilon' is of Gorila only"),
        ({"frame_skip": 2}, "has no setting 'frame_skip' of its own"),
    ],
)
def test_other_settings_that_cannot_be_are_told(other: dict[str, float], says: str, cartpole_run: Path) -> None:
    with pytest.raises(PalaError, match=says):
        evaluate(cartpole_run, 1, 1, Acting(other_settings=other))


def test_numbers_of_an_episode_that_have_no_mean_are_left_out() -> None:
    played = [Episode(1.0, 5, 0, {"x": value, "y": 2.0}) for value in (math.inf, -math.inf)]
    assert _statistics(played)["mean_info"] == {"y": 2.0}


@pytest.mark.slow
def test_an_evaluation_is_kept_although_nobody_reads_what_is_said(cartpole_run: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "pala", "evaluate", str(cartpole_run), "--episodes", "1", "--threads", "1"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "Not all results could be printed: No space left" in done.stderr
    assert json.loads((cartpole_run / "evaluation.json").read_text())["episodes"] == 1


def test_a_score_that_cannot_be_written_is_said(
    cartpole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setattr("sys.argv", ["evaluate", str(cartpole_run)])
    (cartpole_run / "evaluation.json").mkdir()
    with pytest.raises(SystemExit):
        program.main()
    captured = capsys.readouterr()
    assert captured.out.startswith("CartPole-v1: mean return ")
    assert "pala: error: The evaluation cannot be written" in captured.err
    result = Result(cartpole_run, "completed", 1000, None, True, 0)
    concluded = conclude(result, CARTPOLE, Interrupt())
    assert concluded.evaluation is not None and concluded.outcomes["evaluation"].startswith(str(concluded.evaluation))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "'nowhere' is not a run's folder"),
        (["{run}", "--episodes", "0"], "'episodes' is 0 but must be a whole number, at least 1."),
        (["{run}", "--threads", "-1"], "'--threads' is -1 but must be a number of at least 0."),
        (["{run}", "--seed", "-1"], "'seed' is -1 but must be a whole number, at least 0."),
        (["{run}", "--episodes", "0", "--video", "film.avi"], "must have a name that ends in '.mp4'"),
        (["{run}", "--video", "film.avi"], "must have a name that ends in '.mp4'"),
    ],
)
def test_errors_are_sentences(
    arguments: list[str], sentence: str, cartpole_run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setattr("sys.argv", ["evaluate", *(a.format(run=cartpole_run) for a in arguments)])
    with pytest.raises(SystemExit) as exit_:
        program.main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.startswith("pala: error: ")
    assert sentence in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out, "nothing is played before it is known that all can be done"


@pytest.mark.parametrize("game", ["Sparkle", pytest.param("Pong", marks=pytest.mark.slow)])
def test_a_video_shows_each_step(game: str, tmp_path: Path) -> None:
    config = PONG if game == "Pong" else CARTPOLE
    if game == "Pong":
        network = network_of(PONG)
    else:
        network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, config.network)
    run = make_run(tmp_path / "run", config, network)
    if game == "Sparkle":
        user_code.keep(run, UserCode(lambda: Sparkle("rgb_array")))
        user_code.trust_own(run)
    sentence = record_video(run, tmp_path / "video.mp4", Acting())
    steps, size, frames_per_s = (20, (320, 420), 15) if game == "Pong" else (5, (330, 606), 10)
    assert f"an episode of {steps} steps" in sentence
    with imageio.get_reader(tmp_path / "video.mp4") as reader:
        assert reader.count_frames() == steps
        assert reader.get_meta_data()["size"] == size
        assert reader.get_meta_data()["fps"] == frames_per_s
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".mp4"] == ["video.mp4"]


def test_a_film_is_cut_where_an_evaluation_is(tmp_path: Path) -> None:
    """A game without an end would be shown forever."""
    config = replace(CARTPOLE, evaluation=EvaluationConfig(max_episode_steps=3))
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, config.network)
    run = make_run(tmp_path / "run", config, network)
    user_code.keep(run, UserCode(lambda: Sparkle("rgb_array")))
    user_code.trust_own(run)
    with filmed(run, 1, Acting()) as film:
        assert len(list(film.pictures)) == 3 and [episode.length_steps for episode in film.ended] == [3]


@pytest.mark.parametrize(
    ("why", "remedy"),
    [("no display", "$"), ("no OpenGL context", r" Without a display, MuJoCo draws if .* `MUJOCO_GL=egl` is set\.$")],
)
def test_an_environment_that_does_not_draw_is_told(
    why: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(Sparkle):
        def render(self):
            raise RuntimeError(why)

    monkeypatch.delenv("MUJOCO_GL", raising=False)

    network = ActorCritic(Blind.observation_space, Blind.action_space, CARTPOLE.network)
    run = make_run(tmp_path / "run", CARTPOLE, network)
    user_code.keep(run, UserCode(lambda: Blind("rgb_array")))
    user_code.trust_own(run)
    with pytest.raises(PalaError, match=rf"cannot be drawn for a video: RuntimeError: {why}\.{remedy}"):
        record_video(run, tmp_path / "video.mp4", Acting())


def no_memory() -> gymnasium.Env:
    raise MemoryError("of the renderer")


@pytest.mark.parametrize(
    ("make_env", "sentence"),
    [
        (no_memory, r"cannot be drawn for a video: MemoryError: of the renderer\."),
        (lambda: Sparkle(None), "draws no pictures"),
        (lambda: None, "'make_env' returns None, but must return a gymnasium.Env"),
    ],
)
def test_an_environment_that_cannot_be_made_is_told(make_env: Any, sentence: str, tmp_path: Path) -> None:
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, CARTPOLE.network)
    run = make_run(tmp_path / "run", CARTPOLE, network)
    user_code.keep(run, UserCode(make_env))
    user_code.trust_own(run)
    with pytest.raises(PalaError, match=sentence):
        record_video(run, tmp_path / "video.mp4", Acting())


def test_a_video_that_cannot_be_read_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk fails the encoder at its end, and nothing is raised."""
    pictures = [np.full((32, 32, 3), shade, np.uint8) for shade in (0, 90, 200)]
    film = tmp_path / "film.mp4"
    assert _write_video(film, 10.0, iter(pictures)) == 2
    before = film.read_bytes()
    monkeypatch.setattr("imageio_ffmpeg.count_frames_and_secs", lambda path: (0, 0.0))
    with pytest.raises(PalaError, match="cannot be written: what was encoded cannot be read"):
        _write_video(film, 10.0, iter(pictures))
    with pytest.raises(PalaError, match=r"pictures change their size, from \(32, 32, 3\) to \(32, 48, 3\)"):
        _write_video(film, 10.0, iter([pictures[0], np.zeros((32, 48, 3), np.uint8)]))
    assert film.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["film.mp4"]


@pytest.mark.slow
def test_the_video_is_of_the_game_that_the_policy_plays() -> None:
    """The colour twin of an Atari ends, scores and looks like the environment that the policy sees."""
    config = replace(PONG.env, num_envs=1, repeat_action_probability=0.25, max_episode_frames=2000)
    seeds, rng = np.array([3], np.int32), np.random.default_rng(0)
    envs, screen = make_envs(config), _atari_screen(config, seeds)
    envs.reset(seeds)
    screen(None)
    for _ in range(100):
        actions = rng.integers(6, size=1)
        seen = envs.step(actions).observations[0, -1].astype(float)
        red, green, blue = np.moveaxis(screen(actions).astype(float), -1, 0)
        grey = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601, as ALE's grey palette
        assert abs(grey.mean() - seen.mean()) < 1
    envs.close()
