"""Gorila with real ranks under real MPI, as a user starts it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CARTPOLE,
    REPOSITORY,
    Job,
    Launcher,
    pids_of_ranks,
    processes_in,
    record_of,
    wait_for,
    write_disturbed,
)

from pala.gorila.shard import assemble
from pala.run.checkpoint import RankState, _rank_path, _read_rank, load_policy, newest_segment
from pala.run.metrics import read_run
from pala.system.runtime import available_memory_bytes

pytestmark = pytest.mark.mpi

GORILA = [
    "--algorithm", "gorila", "--network.mlp-hidden", "16", "--gorila.replay-capacity-steps", "100000",
    "--gorila.min-replay-steps", "200", "--gorila.target-period-updates", "50", "--run.checkpoint-interval-s", "0.5",
]  # fmt: skip
TRAIN = [*CARTPOLE, "--run.name", "r", *GORILA]
ENDLESS = ["--total-steps", "100000000"]
SEPARATE = ["--gorila.roles", "separate", "--gorila.num-actors", "2", "--gorila.num-learners", "1"]


def intervals(run: Path, rank: int) -> list[dict]:
    return [record for record in read_run(run)[rank] if record["type"] == "interval"]


def total(run: Path, rank: int, key: str) -> int:
    return sum(record.get(key, 0) for record in intervals(run, rank))


def states_of(run: Path, ranks: int) -> list[RankState]:
    """The ranks' newest checkpoints."""
    folder = newest_segment(run)
    return [_read_rank(_rank_path(folder, rank, previous=False)) for rank in range(ranks)]


def wait_until_all_learn(cwd: Path, ranks: int) -> dict[int, int]:
    """Until gradients of every rank have come to the shards; returns the ranks' processes."""
    run = cwd / "runs/r"

    def all_learn() -> bool:
        if len(list(run.glob("metrics/rank-*.jsonl"))) < ranks:
            return False
        return all(total(run, rank, "gradients_sent") > 20 for rank in range(ranks))

    wait_for(all_learn, what="learning")
    return pids_of_ranks(cwd)


# ---- training --------------------------------------------------------------------------------------------------------


def test_two_ranks_train_with_the_budget_met(mpi: Launcher, tmp_path: Path) -> None:
    job = mpi.train(2, *TRAIN, "--gorila.num-shards", "2", "--total-steps", "2000", cwd=tmp_path)
    assert job.status == 0 and "\x1b" not in job.output, job.output
    run = tmp_path / "runs/r"
    assert record_of(run)["completed"]
    steps = [intervals(run, rank)[-1]["local_steps"] for rank in range(2)]
    assert 2000 <= sum(steps) == record_of(run)["segments"][0]["global_steps"] < 2000 + 2 * 10 * 4
    for rank in range(2):
        last = intervals(run, rank)[-1]
        due = (steps[rank] - 100) // 4  # local replay: each rank's steps are for its own learner
        assert due - 5 <= last["updates"] <= due
        sent = total(run, rank, "gradients_sent") + total(run, rank, "gradients_filtered")
        assert last["updates"] - 1 <= sent <= last["updates"]  # the news of the end may have come before the last one
        assert last["replay_transitions"] > 0.9 * steps[rank]  # but for the last steps of truncated episodes
        assert not any(total(run, rank, f"gradients_{fate}") for fate in ("stale", "not_finite"))
        assert total(run, rank, "messages_refused") == 0
    named, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] == sum(steps) and all(bool(tensor.isfinite().all()) for tensor in named.values())


CORRIDOR = """
import sys
import gymnasium
import numpy as np
import pala
from pala.config import Config, EnvConfig, EvaluationConfig, GorilaConfig, NetworkConfig, RunConfig

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (6,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.at = self.steps = 0
        return self.look(), {}

    def look(self):
        return np.eye(6, dtype=np.float32)[self.at]

    def step(self, action):
        self.at, self.steps = max(self.at + 2 * int(action) - 1, 0), self.steps + 1
        return self.look(), 1.0 if self.at == 5 else -0.1, self.at == 5, self.steps == 20, {}

gorila = GorilaConfig(
    num_shards=2, replay_capacity_steps=4000, min_replay_steps=400, gamma=0.9, target_period_updates=50,
    optimiser="rmsprop", rmsprop_learning_rate=2e-3, epsilon_decay_steps=2000,
)
config = Config(
    "gorila", total_steps=8000, env=EnvConfig(num_envs=2), network=NetworkConfig(mlp_hidden=(16,)), gorila=gorila,
    run=RunConfig(name="r", tensorboard=False, log_interval_s=0.5), evaluation=EvaluationConfig(episodes=0),
)
if __name__ == "__main__":
    pala.fit(config, make_env=Corridor)
"""


@pytest.mark.slow
def test_four_ranks_with_two_shards_learn_to_walk(mpi: Launcher, tmp_path: Path) -> None:
    """Straight to the end is 0.6; with a tenth of the steps at random somewhat less; at random they come to -1.2."""
    job = mpi.script(4, CORRIDOR, tmp_path)
    assert job.status == 0, job.output
    run = tmp_path / "runs/r"
    episodes = sorted((r["time_s"], r["return"]) for rs in read_run(run) for r in rs if r["type"] == "episode")
    returns = [return_ for _, return_ in episodes]
    assert np.mean(returns[:50]) < -0.5  # at random
    assert np.mean(returns[-200:]) > 0.4  # six seeds gave 0.53 to 0.58 on each rank
    assert total(run, 2, "parameters_received") > total(run, 2, "gradients_sent") > 100  # of two shards


@pytest.mark.slow
def test_ranks_of_one_role_each(any_mpi: Launcher, tmp_path: Path) -> None:
    """Rank 0 is the shard, 1 the replay, 2 the learner, 3 and 4 act."""
    roles = [*SEPARATE, "--gorila.replay", "global", "--gorila.num-replays", "1"]
    job = any_mpi.train(5, *TRAIN, *roles, "--total-steps", "4000", cwd=tmp_path)
    assert job.status == 0, job.output
    run = tmp_path / "runs/r"
    last = [intervals(run, rank)[-1] for rank in range(5)]
    steps = [record["local_steps"] for record in last]
    assert steps[:3] == [0, 0, 0] and min(steps[3:]) > 400
    assert 4000 <= sum(steps) == record_of(run)["segments"][0]["global_steps"] < 4000 + 2 * 20 * 4
    sent = total(run, 2, "gradients_sent")
    assert 20 < sent <= (sum(steps) - 200) // 4
    updates = [record["updates"] for record in last]
    assert updates[:2] == updates[3:] == [0, 0] and 0 <= updates[2] - sent - total(run, 2, "gradients_filtered") <= 1
    assert sent - 3 <= last[0]["server_updates"] + total(run, 0, "gradients_stale") <= sent
    assert last[1]["replay_transitions"] > 0.9 * 4000 - 2 * 20 * 4
    assert min(total(run, actor, "parameters_received") for actor in (3, 4)) > 10
    assert sum(total(run, rank, "messages_refused") for rank in range(5)) == 0


@pytest.mark.slow
def test_an_actor_that_stands_still_holds_nobody(any_mpi: Launcher, tmp_path: Path) -> None:
    """Its environment goes on only when the others have made a thousand steps; the shard is on rank 0."""
    disturbance = """
        if steps == 250 and rank != 1:
            open(f"went-{rank}", "w").close()
        while rank == 1 and steps == 30 and not (os.path.exists("went-0") and os.path.exists("went-2")):
            time.sleep(0.01)"""
    script = write_disturbed(tmp_path, disturbance, *GORILA, "--total-steps", "6000")
    job = any_mpi.start("-np", "3", str(any_mpi.folder / "python"), script, cwd=tmp_path).wait(60)
    assert job.status == 0, job.output
    run = tmp_path / "runs/r"
    assert record_of(run)["completed"]
    updates = [intervals(run, rank)[-1]["updates"] for rank in range(3)]
    assert min(updates[0], updates[2]) > 200


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_signal_stops_is_resumed_with_the_same_ranks_and_with_others(any_mpi: Launcher, tmp_path: Path) -> None:
    """Resumed runs whose budget is met already end with what they began with."""
    options = ["--gorila.num-shards", "2", "--gorila.save-replay"]
    job = any_mpi.start_train(2, *TRAIN, *options, *ENDLESS, cwd=tmp_path)
    run = tmp_path / "runs/r"
    os.kill(wait_until_all_learn(tmp_path, 2)[1], signal.SIGUSR1)
    job.wait(30)
    assert "checkpoint written to" in job.output, job.output
    stopped = states_of(run, 2)
    begin, held = assemble(stopped), [intervals(run, rank)[-1]["replay_transitions"] for rank in range(2)]
    made = sum(state.counters["own_steps"] for state in stopped)
    assert begin.version > 20 and not begin.parameters.equal(begin.target) and min(held) > 100

    def resume(ranks: int, steps: int, *arguments: str) -> Job:
        job = any_mpi.train(ranks, "--resume", str(run), "--total-steps", str(steps), *arguments, cwd=tmp_path)
        assert job.status == 0, job.output
        assert record_of(run)["completed"]
        return job

    job = resume(2, made)
    assert all(map(torch.equal, assemble(states_of(run, 2))[:3], begin[:3]))
    assert assemble(states_of(run, 2)).version == begin.version
    assert [intervals(run, rank)[-1]["replay_transitions"] for rank in range(2)] == held
    assert "No replay" not in job.output

    job = resume(3, made, "--gorila.num-shards", "3")
    assert "had 2 ranks and now has 3: the shards' parameters are shared out anew" in job.output
    assert "No replay was saved to go on with: it is filled anew" in job.output
    resumed = states_of(run, 3)
    assert [state.counters["gorila"]["num_shards"] for state in resumed] == [3] * 3
    assert all(map(torch.equal, assemble(resumed)[:3], begin[:3]))
    assert assemble(resumed).version == begin.version
    policy = load_policy(run / "policy.safetensors")[0]
    exported = torch.cat([tensor.flatten() for tensor in policy.values()])  # in another order
    assert exported.sort().values.equal(begin.parameters.sort().values)

    resume(3, made + 2000)
    assert made + 2000 <= record_of(run)["segments"][-1]["global_steps"] < made + 2000 + 3 * 10 * 4
    assert begin.version < assemble(states_of(run, 3)).version <= begin.version + 2000 // 4 + 3 * 10


# ---- deaths ----------------------------------------------------------------------------------------------------------


def start_ulfm(launcher: Launcher, ranks: int, *arguments: str, cwd: Path) -> Job:
    python = str(launcher.folder / "python")
    return launcher.start(
        "--with-ft", "ulfm", "-np", str(ranks), python, "-m", "pala.train", *TRAIN, *arguments, cwd=cwd
    )


@pytest.mark.slow
def test_the_others_outlive_an_actor_and_learner(any_mpi: Launcher, tmp_path: Path) -> None:
    job = start_ulfm(any_mpi, 3, "--total-steps", "12000", cwd=tmp_path)
    run = tmp_path / "runs/r"
    os.kill(wait_until_all_learn(tmp_path, 3)[2], signal.SIGKILL)
    job.wait()
    assert job.status == 0 and "rank 2 on" in job.output, job.output
    (segment,) = record_of(run)["segments"]
    assert record_of(run)["completed"] and [lost["rank"] for lost in segment["lost_ranks"]] == [2]
    assert 12000 <= segment["global_steps"] < 13000
    wait_for(lambda: not processes_in(tmp_path), 5, "the end of all ranks")


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_the_death_of_a_shard_ends_the_job_which_goes_on_from_the_last_checkpoint(
    any_mpi: Launcher, shard: int, tmp_path: Path
) -> None:
    job = start_ulfm(any_mpi, 3, "--gorila.num-shards", "2", *ENDLESS, cwd=tmp_path)
    run = tmp_path / "runs/r"
    pids = wait_until_all_learn(tmp_path, 3)
    wait_for(lambda: all(state.counters["gorila"]["version"] > 0 for state in states_of(run, 2)), what="a checkpoint")
    os.kill(pids[shard], signal.SIGKILL)
    job.wait(30)
    assert job.status != 0 and "Traceback" not in job.output, job.output
    assert f"Rank {shard} has died, which served shard {shard} of the parameters; nothing can be" in job.output
    assert not record_of(run)["completed"]
    wait_for(lambda: not processes_in(tmp_path), 10, "the end of all ranks")
    begin = assemble(states_of(run, 3))
    job = any_mpi.train(3, "--resume", str(run), "--total-steps", "201", cwd=tmp_path)
    assert job.status == 0, job.output
    assert assemble(states_of(run, 3)).parameters.equal(begin.parameters)


# ---- mistakes --------------------------------------------------------------------------------------------------------

SITE = """
import sys
if "pala.train" in sys.orig_argv:
    import gymnasium
    class Tiny(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, (1,))
        action_space = gymnasium.spaces.Discrete(1)
    gymnasium.register("Tiny-v0", Tiny)
"""


@pytest.mark.parametrize(
    ("ranks", "arguments", "sentence"),
    [
        (2, SEPARATE[:4], "'gorila.num_learners' is 0, but 'gorila.roles' is 'separate', which needs at least one"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (2, ["--gorila.num-shards", "3"], "'gorila.num_shards' is 3, but a rank serves one shard and the job has"),
            (3, ["--env.id", "Tiny-v0", "--gorila.num-shards", "3", "--network.mlp-hidden"], "has only 2 parameters"),
            (2, ["--env.id", "Pendulum-v1"], "DQN needs Discrete actions"),
            (2, ["--gorila.replay-capacity-steps", "memory"], "When full, the replay of the ranks on"),
        ]),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    any_mpi: Launcher, ranks: int, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    if arguments[-1] == "memory":
        arguments = [arguments[0], str(2 * available_memory_bytes() // 31)]  # bytes a step of CartPole's
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    job = any_mpi.train(ranks, *CARTPOLE, *GORILA, *arguments, cwd=tmp_path, env=environment)
    assert job.status == 2 and "Traceback" not in job.output, job.output
    assert job.output.count(sentence) == job.output.count("pala: error") == 1, job.output
    assert not (tmp_path / "runs").exists()
