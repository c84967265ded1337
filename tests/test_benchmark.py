"""The benchmark: counted operations, ratios and tables from a canned result, options, and a run as a user starts it."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gymnasium
import numpy as np
import pytest
import torch

from pala.a2c.agent import build
from pala.config import A2CConfig, Config, EnvConfig, ExchangeConfig, GorilaConfig, NetworkConfig, to_table
from pala.envs.vector import make_envs
from pala.lab.benchmark import __main__ as benchmark
from pala.lab.benchmark.analysis import _median_us, parts_of, training_of
from pala.lab.benchmark.gorila import flops_per_step as gorila_flops
from pala.lab.benchmark.gorila import minibatches_at_hand
from pala.lab.benchmark.measure import ContinuedEnvs, Trial, environment_us, figures_of, flops_per_step, model_us
from pala.lab.benchmark.pictures import _is_beyond_cores, draw
from pala.lab.benchmark.report import markdown
from pala.lab.benchmark.rounds import Rounds
from pala.run.metrics import SECTIONS
from pala.system.errors import CollectiveError, PalaError
from pala.system.text import Spread
from pala.testing.memory import MemoryCommunicator, run_ranks
from support.benchmarks import SPEEDS, canned, canned_job
from support.mpi import Launcher, processes_in

# ---- what is counted and computed ------------------------------------------------------------------------------------


def test_operations_of_galas_network_by_hand() -> None:
    """Twice the multiply-adds by layer; backward: weights of all layers, inputs of all but the first."""
    images, actions = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8), gymnasium.spaces.Discrete(6)
    layers = [
        20 * 20 * 32 * 8 * 8 * 4, 9 * 9 * 64 * 4 * 4 * 32, 7 * 7 * 32 * 3 * 3 * 64, 7 * 7 * 32 * 512, 512 * (6 + 1),
    ]  # fmt: skip
    forward = 2 * sum(layers)
    config = Config(network=NetworkConfig(background=0.0))
    assert flops_per_step(images, actions, config) == (forward, 2 * forward - 2 * layers[0])


def test_operations_of_an_mlp_by_hand() -> None:
    vectors, actions = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    first, others = 2 * 4 * 64, 2 * 64 * 64 + 64 * 2 + 64
    assert flops_per_step(vectors, actions, Config()) == (2 * (first + others), 2 * (first + 2 * others))


@pytest.mark.parametrize(("double", "passes"), [(False, 2), (True, 3)])
@pytest.mark.slow
def test_operations_of_gorila_by_hand(double: bool, passes: int) -> None:
    """DQN's network: the target network's pass and its own, with double DQN one more; 32 transitions for 4 steps."""
    images, actions = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8), gymnasium.spaces.Discrete(6)
    layers = [20 * 20 * 32 * 8 * 8 * 4, 9 * 9 * 64 * 4 * 4 * 32, 7 * 7 * 64 * 3 * 3 * 64, 7 * 7 * 64 * 512, 512 * 6]
    config = Config(
        algorithm="gorila", network=NetworkConfig(conv_channels=(32, 64, 64)), gorila=GorilaConfig(double_dqn=double)
    )
    forward = 2 * sum(layers)
    assert gorila_flops(images, actions, config) == (8 * passes * forward, 8 * (2 * forward - 2 * layers[0]))


@pytest.mark.parametrize(
    ("envs", "period", "minibatch", "at_hand"), [(16, 4, 32, 4), (2, 4, 32, 1), (64, 4, 32, 8), (16, 4, 512, 1)]
)
def test_gorilas_target_network_is_timed_on_as_many_minibatches_as_training_joins(
    envs: int, period: int, minibatch: int, at_hand: int
) -> None:
    gorila = GorilaConfig(update_period_steps=period, minibatch_size=minibatch)
    assert minibatches_at_hand(Config(env=EnvConfig(num_envs=envs), gorila=gorila)) == at_hand


@pytest.mark.slow
def test_gorilas_page_says_how_often_is_learned_and_nothing_of_gossip(tmp_path: Path) -> None:
    result = canned(canned_job(speeds={"gorila": (300.0, 310.0, 320.0)}))
    result |= {"config": to_table(Config(algorithm="gorila")), "protocol_us": {}}
    page = markdown(result)
    assert "Gorila: a minibatch of 32 for 4 steps" in page and "rollouts" not in page
    assert "protocol" not in page
    draw(result, tmp_path / "picture.png")


@pytest.mark.slow
def test_gorila_has_no_choice_of_exchange() -> None:
    assert benchmark.parse(["--algorithm", "gorila"]).exchanges == ("gorila",)
    with pytest.raises(PalaError, match="Gorila has one way to exchange"):
        benchmark.parse(["--algorithm", "gorila", "--exchanges", "gossip"])
    with pytest.raises(PalaError, match="whose steps/s say little"):
        roles = ["--gorila.roles", "separate", "--gorila.num-actors", "1", "--gorila.num-learners", "1"]
        benchmark.parse(["--algorithm", "gorila", *roles])


def test_ratios_are_taken_pair_by_pair() -> None:
    none, gossip = training_of(canned_job())
    assert none.steps_per_s == Spread(2200, 2000, 2400) and none.of_none is None
    assert gossip.of_none is not None
    assert (gossip.of_none.low, gossip.of_none.median, gossip.of_none.high) == pytest.approx((0.9, 11 / 12, 0.95))
    assert gossip.split_us["update"] == pytest.approx(0.75 * 1e6 / 990)
    # A step takes a rank 200 us + 200 us at least: at most 2500 steps/s, 5000 for two; raw environments: 10,000.
    assert none.of_bound.median == pytest.approx(2200 / 5000)
    assert none.of_environments.median == pytest.approx(2200 / 10_000)


def test_of_staleness_the_most_is_told() -> None:
    job = canned_job()
    gossip = job["rounds"][1]["training"][1]["ranks"]
    gossip[0] = gossip[0] | {"staleness_updates": 9, "models_sent": 0.1}
    figures = training_of(job)[1].figures
    assert figures["staleness_updates"] == 9 and figures["models_sent"] == 0.95


def test_the_lower_bound_is_environment_plus_operations() -> None:
    (parts,) = parts_of(canned_job())
    assert (parts.environment_us, parts.operations_us) == (200.0, 200.0)
    assert parts.bound_steps_per_s == Spread(5000, 5000, 5000)


def test_warm_up_and_the_time_after_the_first_rank_is_done_are_left_out() -> None:
    def record(time_s: float, updates: int, environment: float) -> dict[str, Any]:
        split = {f"time_{section}": 0.0 for section in SECTIONS} | {"time_environment": environment}
        return split | {
            "time_s": time_s, "updates": updates, "local_steps": 80 * updates, "cpu_s": 1.5 * time_s,
            "exchange_thread_s": 0.1 * time_s, "num_threads": 3, "models_mixed": 4, "staleness_updates": updates,
            "durations_s": [time_s, time_s + 1],
        }  # fmt: skip

    records = [record(0, 0, 0), record(1, 1, 0.9), record(2, 5, 0.2), record(4, 15, 0.5), record(9, 16, 0.9)]
    figures = figures_of(records, until_s=5.0, threads=2)
    assert figures["steps_per_s"] == pytest.approx(80 * 14 / 3)
    assert figures["time"]["environment"] == pytest.approx((0.2 * 1 + 0.5 * 2) / 3)
    assert (figures["cpu_per_core"], figures["exchange_thread_share"]) == pytest.approx((0.75, 0.1))
    assert len(figures["update_quantiles_s"]) == 21
    assert [figures["update_quantiles_s"][i] for i in (0, 10, 20)] == pytest.approx([2, 3.5, 5])  # of 2, 3, 4, 5
    assert figures["models_mixed"] == pytest.approx(8 / 14) and figures["staleness_updates"] == 15
    assert figures_of(records[:2], until_s=5.0, threads=2)["steps_per_s"] == pytest.approx(80), "a run of one interval"
    at_the_end = [*records[:2], record(1, 1, 0.9) | {"time_s": 1.001}]
    assert figures_of(at_the_end, until_s=5.0, threads=2)["steps_per_s"] == pytest.approx(80, rel=0.01)


def test_ranks_that_made_no_step_are_left_out_of_the_times_a_step() -> None:
    def rank(steps_per_s: float, share: float) -> dict[str, Any]:
        return {"steps_per_s": steps_per_s, "time": {"update": share}}

    rounds = [[rank(0, 1.0), rank(100, 0.5)], [rank(0, 1.0)], [rank(50, 0.5), rank(100, 0.8)]]
    assert _median_us("update", rounds) == pytest.approx(7000)  # of 5000 and (10000 + 8000) / 2
    assert math.isnan(_median_us("update", [[rank(0, 1.0)]]))


def test_updates_are_timed_by_the_steps_of_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last step of a rollout to that of the next; also across two calls, but not across measurements."""
    times = iter([0.0, 1.0, 4.0, 5.0, 5.0, 7.0, 30.0, 31.0, 40.0, 42.0])
    monkeypatch.setattr("pala.lab.benchmark.measure.time.perf_counter", lambda: next(times))
    envs = ContinuedEnvs(MagicMock(), np.zeros(1, np.uint64))

    def durations(steps: int) -> list[float]:
        for _ in range(steps):
            envs.step(np.zeros(1))
        return envs.take_durations_s(2)

    assert durations(4) == [4.0] and durations(2) == [2.0]
    envs.forget_durations()
    assert durations(4) == [11.0]


def test_the_environments_are_timed_without_the_sleep_of_a_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("pala.lab.benchmark.measure.time.sleep", slept.append)
    real, agent = MagicMock(num_envs=2, action_masks=None), MagicMock(device="cpu")
    agent.network.distribution.num_outputs = 3
    envs = ContinuedEnvs(real, np.zeros(2, np.uint64), slowdown=4.0)
    assert environment_us(envs, agent, seconds=0.0) > 0
    assert real.step.call_count == 2 and not slept
    envs.step(np.zeros(2))
    assert len(slept) == 1


def test_each_training_starts_alike() -> None:
    """Also its optimiser: two equal steps go where those of the run before went."""
    config = Config(
        env=EnvConfig("CartPole-v1", num_envs=2), network=NetworkConfig(mlp_hidden=(4,)), a2c=A2CConfig(momentum=0.75),
        exchange=ExchangeConfig("none"),
    )  # fmt: skip

    def moved(comm: MemoryCommunicator) -> list[torch.Tensor]:
        envs = ContinuedEnvs(make_envs(config.env), np.zeros(2, np.uint64))
        agent = build(comm, config, envs)
        trial, models = Trial(comm, config, envs, agent, agent.flat.data.clone()), []
        for _ in range(2):
            trial._fresh_agent(config)
            assert agent.a2c.num_squares == 0
            for _ in range(2):
                agent.flat.gradient.fill_(1.0)
                agent.a2c.step(MagicMock(), 0.01)
            models.append(agent.flat.data.clone())
        return models

    ((first, second),) = run_ranks(1, moved)
    assert first.equal(second)


def test_ranks_that_no_exchange_is_left_to_are_told_why() -> None:
    config = Config(env=EnvConfig("CartPole-v1", num_envs=2), exchange=ExchangeConfig(compression="bfloat16"))
    request = {"exchanges": ["allreduce"], "slowdown": 1.0}
    for error in run_ranks(2, lambda comm: Rounds(comm, request, config, threads=1)):
        assert isinstance(error, CollectiveError)
        assert str(error).startswith("No exchange is left to be measured. With '--exchanges allreduce'")


def test_what_a_model_costs_is_measured_for_each_format() -> None:
    for compression in ("none", "bfloat16", "top_k"):
        costs = model_us(torch.randn(1000), ExchangeConfig(compression=compression), seconds=0.0)  # type: ignore[arg-type]
        assert sorted(costs) == ["mix", "receive", "send"] and min(costs.values()) > 0


# ---- what is made of it ----------------------------------------------------------------------------------------------


def rows_of(text: str, section: str) -> list[list[str]]:
    """The cells of a section's table."""
    lines = text.split(f"## {section}\n")[1].split("##")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def test_tables_name_every_figure() -> None:
    text = markdown(canned(canned_job(1), canned_job(2)))
    for expected in (
        "Some CPU, 2 cores; 3 rounds of 5 s", "15 million floating-point operations forward and 25 million backward",
        "200 + 200", "5,000 (5,000-5,000)", "2,200 (2,000-2,400)", "0.917 (0.900-0.950)", "0.44 (0.40-0.48)",
        "97.0%", "1.00%", "commit abc (changed)",
    ):  # fmt: skip
        assert expected in text, expected
    assert rows_of(text, "What was exchanged")[-1] == ["2", "float32", "gossip", "0.95", "0.90", "3", "2", "4"]
    assert rows_of(text, "Ranks")[-1] == ["2", "400", "4", "4.2"]
    widths = {len(line) for line in text.split("## Training")[1].splitlines() if line.startswith("|")}
    assert len({len(line) for line in text.split("## Training")[1].split("##")[0].splitlines() if "|" in line}) == 1
    assert widths and "GPU" not in text, "a column without a figure is left out"


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    kinds = dict.fromkeys(("none", "gossip", "allreduce", "gorila"), SPEEDS["gossip"])
    jobs = [canned_job(ranks, kinds) for ranks in (2, 4)]
    for job in jobs:
        job["of_ranks"] = [rank | {"host": "h"} for rank in job["of_ranks"]]
    assert [_is_beyond_cores(job, canned()["machine"]) for job in jobs] == [False, True]
    result = canned(*jobs)
    result["config"]["env"]["id"] = "own:$^$"  # no formula
    draw(result, tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 10_000


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_defaults_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    command = benchmark.parse([])
    assert (command.ranks, command.rounds, command.seconds) == ((1, 2, 4, 6), 5, 5.0)
    assert command.exchanges[0] == "none" and {"gossip", "allreduce", "shared_memory"} < set(command.exchanges)
    assert command.precisions == ()
    command = benchmark.parse(["--precisions", "float32", "float32", "--a2c.rollout-steps", "7"])
    assert command.precisions == ("float32",) and command.config.a2c.rollout_steps == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "'--rounds' is 0 but must be at least 1"),
        (["--ranks", "2", "0"], "'--ranks' is 2 0 but every number must be at least 1"),
        (["--seconds", "0"], "'--seconds' is 0 but must lie above 0"),
        (["--slowdown", "0.5"], "'--slowdown' is 0.5 but must lie between 1 and 100"),
        (["--slowdown", "4", "--env.vectorization", "async"], "'--slowdown' does not see the time of environments"),
        (["--exchanges", "gosip"], "'gosip' is none of none, gossip"),
        (["--precisions", "float16"], "'float16' is none of float32, bfloat16; did you mean"),
        (["missing.toml"], "Preset 'missing.toml' does not exist"),
        (["--a2c.gamma", "2"], "'a2c.gamma' is 2.0 but must lie between 0 and 1"),
        (["--nonsense"], "the command line was not understood"),
    ],
)
@pytest.mark.slow
def test_bad_options_are_told(arguments: list[str], sentence: str) -> None:
    with pytest.raises(PalaError) as caught:
        benchmark.parse(arguments)
    assert sentence in str(caught.value)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    with pytest.raises(PalaError, match="exists already; nothing is written over"):
        benchmark.benchmark(benchmark.parse(["--output", str(tmp_path), "--launcher", "env"]))
    assert list(tmp_path.iterdir()) == []


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PalaError("The job with 4 ranks failed.")])
@pytest.mark.slow
def test_jobs_that_are_measured_survive_one_that_fails_or_is_stopped(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(command: Any, ranks: int, output: Path) -> dict[str, Any]:
        if ranks == 4:
            raise error
        return canned_job(ranks)

    monkeypatch.setattr(benchmark, "_measure", measure)
    with pytest.raises(type(error)):
        benchmark.benchmark(benchmark.parse(["--ranks", "1", "2", "4", "8", "--output", str(tmp_path / "b")]))
    result = json.loads((tmp_path / "b/benchmark.json").read_text())
    assert [job["ranks"] for job in result["jobs"]] == [1, 2] and result["failures"] == [str(error) or "Stopped."]
    assert "## Training" in capsys.readouterr().out and (tmp_path / "b/benchmark.md").exists()
    with pytest.raises(type(error)):
        benchmark.benchmark(benchmark.parse(["--ranks", "4", "--output", str(tmp_path / "c")]))
    assert not (tmp_path / "c/benchmark.json").exists()


@pytest.mark.slow
def test_jobs_survive_a_stop_while_the_protocol_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*ranks: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "_measure", lambda command, ranks, output: canned_job(ranks))
    monkeypatch.setattr(benchmark, "protocol_cost_us", stopped)
    with pytest.raises(KeyboardInterrupt):
        benchmark.benchmark(benchmark.parse(["--ranks", "2", "--output", str(tmp_path / "b")]))
    result = json.loads((tmp_path / "b/benchmark.json").read_text())
    assert [job["ranks"] for job in result["jobs"]] == [2] and result["protocol_us"] == {}


def run_benchmark(launcher: Launcher, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [launcher.folder / "python", "-m", "pala", "benchmark", "--output", "out", *arguments],
        cwd=folder, env=launcher.environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.mpi
@pytest.mark.slow
def test_a_benchmark_as_a_user_starts_it(any_mpi: Launcher, tmp_path: Path) -> None:
    cartpole = ["--env.id", "CartPole-v1", "--env.num-envs", "4"]
    few = ["--rounds", "2", "--seconds", "0.25"]
    done = run_benchmark(any_mpi, tmp_path, "--ranks", "1", "2", *few, *cartpole)
    assert done.returncode == 0, done.stderr
    assert "| gossip " in done.stdout and "Traceback" not in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "benchmark.json", "benchmark.md", "benchmark.png",
    ]  # fmt: skip
    result = json.loads((tmp_path / "out/benchmark.json").read_text())
    assert [job["ranks"] for job in result["jobs"]] == [1, 2]
    assert {len(job["rounds"]) for job in result["jobs"]} == {2}
    for training in training_of(result["jobs"][-1]):
        assert training.steps_per_s.low > 0 and sum(training.split_us.values()) > 0
        assert training.cpu_per_core < 1.5 and training.exchange_thread_share < 0.5, "a thread spins"
    assert result["versions"]["torch"] and "pala benchmark" in result["command"]
    assert processes_in(tmp_path) == []


@pytest.mark.mpi
@pytest.mark.slow
def test_a_benchmark_of_gorila(any_mpi: Launcher, tmp_path: Path) -> None:
    """Its replay is filled before anything counts, though the preset's takes longer than the whole measurement."""
    cartpole = ["--algorithm", "gorila", "--env.id", "CartPole-v1", "--env.num-envs", "4"]
    done = run_benchmark(any_mpi, tmp_path, "--ranks", "2", "--rounds", "2", "--seconds", "0.5", *cartpole)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads((tmp_path / "out/benchmark.json").read_text())["jobs"]
    (training,) = training_of(job)
    assert training.exchange == "gorila" and training.steps_per_s.low > 0
    assert training.split_us["update"] > 0
    for round_ in job["rounds"]:
        for rank in round_["training"][0]["ranks"]:
            steps, updates = rank["steps_per_s"] * rank["seconds"], rank["updates"]
            # Nothing but learning was measured. Of few updates that cannot be seen: on a busy machine a rank has no
            # record between filling and its last, and what it filled since the one before counts.
            assert updates < 40 or steps == pytest.approx(4 * updates, rel=0.3, abs=16)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_worker_that_fails_ends_the_benchmark(any_mpi: Launcher, tmp_path: Path) -> None:
    done = run_benchmark(any_mpi, tmp_path, "--ranks", "2", "--env.id", "CartPol-v1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no environment 'CartPol-v1' is registered" in done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_a_launcher_that_starts_another_number_of_ranks_is_told(any_mpi: Launcher, tmp_path: Path) -> None:
    done = run_benchmark(any_mpi, tmp_path, "--ranks", "2", "--launcher", "env")
    assert done.returncode == 2 and "The launcher started 1 rank, not 2" in done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_a_benchmark_of_pong(any_mpi: Launcher, tmp_path: Path) -> None:
    of = ["--ranks", "2", "--rounds", "1", "--exchanges", "none", "gossip", "--precisions", "float32"]
    done = run_benchmark(any_mpi, tmp_path, *of, "--seconds", "0.3", "--env.num-envs", "2")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads((tmp_path / "out/benchmark.json").read_text())["jobs"]
    assert {part["exchange"] for part in job["rounds"][0]["training"]} == {"none", "gossip"}
