"""`pala simulate learn` and `progress`: real learners on a virtual cluster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from pala.a2c.update import A2C, Loss, UpdateResult
from pala.config import Config, EnvConfig, ExchangeConfig, NetworkConfig
from pala.lab.simulate import learn as program
from pala.lab.simulate import progress, tune
from pala.lab.simulate.learn import METHODS, Conditions, Learned, learn, parse
from pala.system.errors import PalaError
from support.helpers import slow_but_for

pytestmark = pytest.mark.often(
    "test_what_tune_cannot_try_is_refused",
    "test_of_two_options_the_one_that_there_is_not_is_named",
    "test_without_an_episodes_end_tune_says_what_to_raise",
    "test_a_preset_of_another_exchange_is_simulated_with_the_methods",
    "test_progress_says_what_each_rule_keeps",
)

CONFIG = Config(
    total_steps=1200, seed=3, env=EnvConfig(id="CartPole-v1", num_envs=4), network=NetworkConfig(mlp_hidden=(8,))
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("method", slow_but_for(METHODS, METHODS[0]))
def test_equal_settings_and_seed_give_equal_trainings(method: str) -> None:
    first, again = (learn(method, CONFIG, Conditions(ranks=3)) for _ in range(2))
    assert str(first) == str(again)  # NaN is not equal to itself
    assert len(first.episodes) > 10 and 1200 <= first.global_steps < 1200 + 3 * 20 * 3


@pytest.mark.parametrize("method", slow_but_for(["paired", "none"], "paired"))
def test_environments_that_are_processes_end_with_the_training(method: str) -> None:
    before = set(multiprocessing.active_children())
    env = dataclasses.replace(CONFIG.env, vectorization="async", num_envs=2)
    learn(method, dataclasses.replace(CONFIG, env=env, total_steps=100), Conditions(ranks=2))
    assert set(multiprocessing.active_children()) <= before  # those of other tests may have ended meanwhile


def test_another_seed_gives_another_training() -> None:
    first, other = (learn("paired", dataclasses.replace(CONFIG, seed=seed), Conditions(2)) for seed in (1, 2))
    assert first.episodes != other.episodes


@pytest.mark.parametrize("method", ["paired", "allreduce"])
def test_the_learning_rate_may_fall(method: str) -> None:
    falling = dataclasses.replace(CONFIG, a2c=dataclasses.replace(CONFIG.a2c, learning_rate_decay="linear"))
    rates, step = [], A2C.step

    def noting(a2c: A2C, loss: Loss, rate: float) -> UpdateResult:
        rates.append(rate)
        return step(a2c, loss, rate)

    with mock.patch.object(A2C, "step", noting):
        learn(method, falling, Conditions(2))
    assert rates[0] == 7e-4 and rates[-1] < 0.15 * rates[0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("delay", slow_but_for([0.05, 3.0], 3.0))
def test_paired_keeps_all_progress_and_uniform_does_not(delay: float) -> None:
    kept = {method: learn(method, CONFIG, Conditions(4, delay)).progress_kept for method in ("uniform", "paired")}
    assert kept["paired"] == pytest.approx(1, abs=0.05) and kept["uniform"] < 0.9


def test_synchronous_ranks_hold_one_model_and_wait_for_the_slowest() -> None:
    alike = learn("allreduce", CONFIG, Conditions(ranks=3, delay_updates=0.0))
    assert alike.progress_kept == pytest.approx(1, abs=1e-4) and max(alike.distances) < 1e-6
    slow = learn("allreduce", CONFIG, Conditions(ranks=3, delay_updates=0.0, slow_ranks=1))
    assert slow.time_updates == pytest.approx(4 * alike.time_updates, rel=0.1)
    assert slow.updates == alike.updates


def test_independent_learners_do_not_wait_for_the_slowest() -> None:
    learned = learn("none", CONFIG, Conditions(ranks=3, slow_ranks=1))
    of_last_rounds = [time for steps, time, _ in learned.episodes if steps > 0.8 * learned.global_steps]
    assert min(of_last_rounds) < 0.35 * learned.time_updates and max(of_last_rounds) > 0.8 * learned.time_updates


def test_time_ends_with_training() -> None:
    """Not when the last timer of a rank that once waited rings."""
    learned = learn("uniform", dataclasses.replace(CONFIG, exchange=ExchangeConfig(max_staleness=0)), Conditions(2))
    assert learned.time_updates < 1.2 * max(learned.updates)


def test_gossip_does_not_wait_for_a_slow_rank() -> None:
    slow = learn("paired", CONFIG, Conditions(ranks=3, slow_ranks=1))
    assert slow.updates[0] < 0.5 * slow.updates[1]
    assert slow.time_updates < 1.6 * learn("paired", CONFIG, Conditions(ranks=3)).time_updates


def test_a_curve_has_the_mean_return_of_each_interval() -> None:
    learned = Learned([(9, 0, 0.5), (10, 0, 1.5), (20, 0, 3.0), (80, 0, 5.0)], 100, 1.0, [1], 0, 1.0, [], [])
    assert learned.curve(100) == 4 * [0.5] + 5 * [1.0] + 30 * [3.0] + 11 * [5.0]
    assert learned.auc(100) == pytest.approx((4 * 0.5 + 5 * 1 + 30 * 3 + 11 * 5) / 50)


def test_the_program_prints_a_table_and_keeps_every_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2", "--seeds", "1", "2", "--methods", "paired", "allreduce"]
    arguments += ["--total-steps", "1000", "--env.num-envs", "2"]
    program.run([*arguments, "--output", str(tmp_path / "learned.json")])
    printed = capsys.readouterr().out
    assert "paired, seed 2" in printed and "| allreduce |" in printed
    kept = json.loads((tmp_path / "learned.json").read_text())
    assert [(t["method"], t["seed"]) for t in kept["trainings"]] == [
        ("paired", 1), ("paired", 2), ("allreduce", 1), ("allreduce", 2),
    ]  # fmt: skip
    assert all(training["episodes"] for training in kept["trainings"])


def test_what_was_trained_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = program.learn

    def fails_with_seed_2(method: str, config: Config, conditions: Conditions) -> Learned:
        if config.seed == 2:
            raise PalaError("It fails.")
        return plays(method, config, conditions)

    monkeypatch.setattr(program, "learn", fails_with_seed_2)
    arguments = ["--ranks", "2", "--seeds", "1", "2", "--methods", "paired", "--total-steps", "400"]
    with pytest.raises(PalaError, match="It fails"):
        program.run([*arguments, "--env.num-envs", "2", "--output", str(tmp_path / "learned.json")])
    assert [t["seed"] for t in json.loads((tmp_path / "learned.json").read_text())["trainings"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--methods gala", "'gala' is none of uniform"), ("--ranks 0", "'--ranks' is 0"),
        ("--ranks 2 --slow-ranks 2", "must be less than '--ranks'"),
        ("--a2c.gamma 3", "'a2c.gamma' is 3"), ("missing.toml", "'missing.toml' does not exist"),
        ("--output /tmp", "'/tmp' is a folder; name a file"),
        ("--exchange.topology complete", "'--methods paired': 'exchange.mixing' is 'paired'"),
        ("--algorithm gorila", "A2C only"),
        ("--seed 5", "'--seeds' names the seeds"),
        ("--seeds -1", "'--seeds' must be"), ("--delay-updates nan", "'--delay-updates' is nan"),
        ("--exchange.compression bfloat16", "exchange whole models, one each"),
        ("--output /no_such_folder/x.json", "nothing can be written into '/no_such_folder'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(PalaError, match=sentence):
        program.run(arguments.split())


def test_progress_says_what_each_rule_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PalaError, match="0 and finite"):
        progress.run(["--delays", "inf"])
    progress.run(["--ranks", "2", "--delays", "1"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    kept = {row[4].strip(): float(row[5]) for row in rows[2:] if row[3].strip() == "1"}
    assert kept["paired"] == 1.0 and max(kept["uniform"], kept["push_sum"]) < 0.85


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--mixings best", "'best' is none of"),
        ("--ranks 1", "at least 2"),
        ("--delays", "names nothing"),
    ],
)
def test_mistakes_in_progress_are_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(PalaError, match=sentence):
        progress.run(arguments.split())


@pytest.mark.parametrize("words", [["gala/pong"], ["--exchange.kind", "allreduce"]])
def test_a_preset_of_another_exchange_is_simulated_with_the_methods(words: list[str]) -> None:
    assert {"uniform", "paired"} <= set(parse([*words, "--total-steps", "1000"]).methods)


def test_of_two_options_the_one_that_there_is_not_is_named() -> None:
    with pytest.raises(PalaError, match=r"(?s)options: --total-step, 1000 .*--total-steps INT"):
        parse(["--ranks", "16", "--total-step", "1000"])


# ---- tune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ({1: [5, 6], 2: [1, 2]}, "The default, 1, learned most: leave"),
        ({1: [9, 9], 2: [9, 9]}, "No rate learned more than another"),
        ({1: [4, 6], 2: [5, 7], 4: [1, 1]}, "2 learned most, but its trainings and those of the default, 1, overlap"),
        ({1: [1, 2], 2: [5, 7], 4: [1, 1]}, "Train with `--a2c.learning-rate 2`."),
        ({1: [1, 2], 2: [2, 3], 4: [5, 7]}, "learning-rate 4`. It is the highest rate tried: try higher ones."),
        (
            {0.5: [5, 7], 1: [1, 2], 4: [-math.inf, 9]},
            "0.5`. It is the lowest rate tried: try lower ones.",
        ),
        ({0.5: [-math.inf, 3], 1: [-math.inf, -math.inf]}, "No rate learned: each ruined a training. Try lower"),
    ],
)
def test_tune_says_what_to_do(returns: dict[float, list[float]], words: str) -> None:
    assert words in tune.advice(list(returns.items()), auto=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env.id", "CartPole-v1"], "'--env.id' is given, but here the environment is the first word"),
        (["--seed", "3"], "'--seed' is given"),
        (["--a2c.learning-rate", "0.1"], "'--rates' names the learning rates here"),
        (["--rates", "0"], "'--rates' must be numbers above 0"),
        (["--ranks", "0"], "'--ranks' is 0"),
        (["--algorithm", "gorila"], "A2C only is simulated"),
        (["--exchange.group", "2"], "exchange whole models, one each"),
        (["--exchange.kind", "shared_memory"], "exchange whole models, one each"),
    ],
)
def test_what_tune_cannot_try_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(PalaError, match=words):
        tune.parse(arguments)


def test_tune_as_a_user_starts_it() -> None:
    command = [sys.executable, "-m", "pala", "tune", "CartPole-v1", "--ranks", "2", "--rates", "1e-3", "--seeds", "1"]
    done = subprocess.run([*command, "--total-steps", "2000"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "2 trainings of simulated ranks" in done.stdout and "|" in done.stdout
    assert re.search(r"learning rate 0.0007, seed 1: mean return \d+.\d\d; about .* left\n", done.stdout), done.stdout
    assert "0.001" in done.stdout


def test_tune_says_how_long_the_other_trainings_need() -> None:
    assert tune.time_left(90.0, done=1, trainings=3) == "; about 3 min left"
    assert tune.time_left(270.0, done=3, trainings=3) == ""


def test_without_an_episodes_end_tune_says_what_to_raise() -> None:
    env = dataclasses.replace(CONFIG.env, id="Pendulum-v1")
    command = dataclasses.replace(tune.Command(ranks=2), config=dataclasses.replace(CONFIG, env=env, total_steps=200))
    with pytest.raises(PalaError, match="No episode ended within 200 steps"):
        tune._train(command, 1e-3, 1)
