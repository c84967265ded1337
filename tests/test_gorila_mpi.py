"""Gorila with real ranks under real MPI: standing by, and as a user starts them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from pala.comm.base import Communicator
from pala.gorila.shard import assemble
from pala.run.checkpoint import load_policy
from pala.run.metrics import read_run
from pala.system.resources import available_memory_bytes
from support.helpers import CARTPOLE, SLOW_UNTIL_FREE, record_of, wait_for, write_disturbed, write_paced
from support.mpi import Job, Launcher, assert_all_end, assert_one_sentence, pids_of_ranks
from support.run_folders import intervals, local_steps, states_of, total
from support.standing_ranks import Ended, StandingRanks, train

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

GORILA = [
    "--algorithm", "gorila", "--network.mlp-hidden", "16", "--gorila.replay-capacity-steps", "100000",
    "--gorila.min-replay-steps", "200", "--gorila.target-period-updates", "50", "--run.checkpoint-interval-s", "0.5",
]  # fmt: skip
TRAIN = [*CARTPOLE, "--run.name", "r", *GORILA]
ENDLESS = ["--total-steps", "100000000"]
SEPARATE = ["--gorila.roles", "separate", "--gorila.num-actors", "2", "--gorila.num-learners", "1"]


def all_learn(run: Path, ranks: int) -> bool:
    """True when gradients of every rank have come to the shards."""
    if len(list(run.glob("metrics/rank-*.jsonl"))) < ranks:
        return False
    return all(total(run, "gradients_sent", rank) > 20 for rank in range(ranks))


# ---- training --------------------------------------------------------------------------------------------------------

# A rank's shard answers also while the rank saves, and its own gradients grow old meanwhile.
OF_TWO_SHARDS = ["--gorila.num-shards", "2", "--total-steps", "2000", "--gorila.max-staleness-updates", "1000000"]


def test_two_ranks_train_with_the_budget_met(each_standing: StandingRanks, tmp_path: Path) -> None:
    done = each_standing.train(2, *TRAIN, *OF_TWO_SHARDS, cwd=tmp_path)
    assert done.status == 0 and "\x1b" not in done.output, done.output
    assert_met_the_budget(tmp_path / "runs/r")


def assert_met_the_budget(run: Path) -> None:
    """Two ranks and shards have made 2000 steps and the updates due, and the policy is there."""
    assert record_of(run)["completed"]
    steps = local_steps(run)
    assert 2000 <= sum(steps) == record_of(run)["segments"][0]["global_steps"] < 2000 + 2 * 10 * 4
    for rank in range(2):
        last = intervals(run, rank)[-1]
        due = max(steps[rank] - 100, 0) // 4  # local replay: each rank's steps are for its own learner
        assert due - 5 <= last["updates"] <= due
        sent = total(run, "gradients_sent", rank) + total(run, "gradients_filtered", rank)
        assert last["updates"] - 1 <= sent <= last["updates"]  # the news of the end may have come before the last one
        assert last["replay_transitions"] >= 0.9 * steps[rank]  # but for the last steps of truncated episodes
        assert total(run, "gradients_not_finite", rank) == 0
        assert total(run, "messages_refused", rank) == 0
    named, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] == sum(steps) and all(bool(tensor.isfinite().all()) for tensor in named.values())


class Corridor(gymnasium.Env):
    """Six places in a row; at the last one is the end."""

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


def test_four_ranks_with_two_shards_learn_to_walk(standing: StandingRanks, tmp_path: Path) -> None:
    """Straight to the end is 0.6; with a tenth of the steps at random somewhat less; at random they come to -1.2."""
    arguments = [
        "--algorithm", "gorila", "--total-steps", "8000", "--env.num-envs", "2", "--network.mlp-hidden", "16",
        "--gorila.num-shards", "2", "--gorila.replay-capacity-steps", "4000", "--gorila.min-replay-steps", "400",
        "--gorila.gamma", "0.9", "--gorila.target-period-updates", "50", "--gorila.optimiser", "rmsprop",
        "--gorila.rmsprop-learning-rate", "2e-3", "--gorila.epsilon-decay-steps", "2000", "--run.name", "r",
        "--run.no-tensorboard", "--run.log-interval-s", "0.5",
    ]  # fmt: skip
    done = standing.run(4, train, arguments, Corridor, cwd=tmp_path)
    assert done.status == 0, done.output
    run = tmp_path / "runs/r"
    episodes = sorted((r["time_s"], r["return"]) for rs in read_run(run) for r in rs if r["type"] == "episode")
    returns = [return_ for _, return_ in episodes]
    assert np.mean(returns[:50]) < -0.5  # at random
    assert np.mean(returns[-200:]) > 0.2  # six seeds gave 0.53 to 0.58 on each rank
    assert total(run, "parameters_received", 2) > total(run, "gradients_sent", 2) > 100  # of two shards


def make_slow() -> gymnasium.Env:
    """A training that takes two seconds: a rank that gets no processor for half of one comes in time."""

    class Slow(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(0.001)
            return super().step(action)

    return Slow(gymnasium.make("CartPole-v1"))


def test_ranks_of_one_role_each(standing: StandingRanks, tmp_path: Path) -> None:
    """Rank 0 is the shard, 1 the replay, 2 the learner, 3 and 4 act."""
    roles = [*SEPARATE, "--gorila.replay", "global", "--gorila.num-replays", "1"]
    done = standing.run(5, train, [*TRAIN, *roles, "--total-steps", "4000"], make_slow, cwd=tmp_path)
    assert done.status == 0, done.output
    run = tmp_path / "runs/r"
    last = [intervals(run, rank)[-1] for rank in range(5)]
    steps = local_steps(run)
    assert steps[:3] == [0, 0, 0] and min(steps[3:]) > 400
    assert 4000 <= sum(steps) == record_of(run)["segments"][0]["global_steps"] < 2 * 4000  # actors hear of the end
    sent = total(run, "gradients_sent", 2)
    assert 20 < sent <= (sum(steps) - 200) // 4
    updates = [record["updates"] for record in last]
    assert updates[:2] == updates[3:] == [0, 0] and 0 <= updates[2] - sent - total(run, "gradients_filtered", 2) <= 1
    assert sent - 3 <= last[0]["server_updates"] + total(run, "gradients_stale", 0) <= sent
    assert last[1]["replay_transitions"] > 0.9 * 4000 - 2 * 20 * 4
    assert min(total(run, "parameters_received", actor) for actor in (3, 4)) > 10
    assert total(run, "messages_refused") == 0


def train_with_rank_1_standing_still(comm: Communicator, arguments: list[str]) -> int:
    """Its environments continue only when those of both others have made a thousand steps, and so do theirs."""

    rank = comm.rank  # environments travel by cloudpickle, a communicator cannot

    class Waiting(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 250 and rank != 1:
                Path(f"went-{rank}").touch()
            while self.steps == (30 if rank == 1 else 250) and len(list(Path().glob("went-*"))) < 2:
                time.sleep(0.01)
            return super().step(action)

    return train(comm, arguments, lambda: Waiting(gymnasium.make("CartPole-v1")))


def test_an_actor_that_stands_still_holds_nobody(standing: StandingRanks, tmp_path: Path) -> None:
    """The shard is on rank 0."""
    done = standing.run(3, train_with_rank_1_standing_still, [*TRAIN, "--total-steps", "6000"], cwd=tmp_path)
    assert done.status == 0, done.output
    run = tmp_path / "runs/r"
    assert record_of(run)["completed"]
    updates = [intervals(run, rank)[-1]["updates"] for rank in range(3)]
    assert min(updates[0], updates[2]) > 200


# ---- going on --------------------------------------------------------------------------------------------------------


def test_what_a_signal_stops_is_resumed_with_the_same_ranks_and_with_others(
    standing: StandingRanks, tmp_path: Path
) -> None:
    """Resumed runs whose budget is met already end with what they began with."""
    # The target is never copied: it is another vector than the parameters at whatever version the signal comes.
    options = ["--gorila.num-shards", "2", "--gorila.target-period-updates", "100000000"]
    job, run = standing.start_train(2, *TRAIN, *options, *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    wait_for(lambda: all_learn(run, 2), what="learning")
    os.kill(job.pids[1], signal.SIGUSR1)
    done = job.wait()
    assert "checkpoint written to" in done.output, done.output
    stopped = states_of(run, 2)
    begin = assemble(stopped)
    made = sum(state.counters["local_steps"] for state in stopped)
    assert begin.version > 20 and not begin.parameters.equal(begin.target)

    def resume(ranks: int, steps: int, *arguments: str) -> Ended:
        done = standing.train(ranks, "--resume", str(run), "--total-steps", str(steps), *arguments, cwd=tmp_path)
        assert done.status == 0, done.output
        assert record_of(run)["completed"]
        return done

    done = resume(2, made)
    assert all(map(torch.equal, assemble(states_of(run, 2))[:3], begin[:3]))
    assert assemble(states_of(run, 2)).version == begin.version
    assert "it is filled again before learning continues" in done.output

    done = resume(3, made, "--gorila.num-shards", "3")
    assert "had 2 ranks and now has 3: the shards' parameters are shared out again" in done.output
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


def start_ulfm(launcher: Launcher, ranks: int, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
    python = str(launcher.folder / "python")
    train = [python, "-m", "pala.train", *TRAIN, *arguments]
    return launcher.start("--with-ft", "ulfm", "-np", str(ranks), *train, cwd=cwd, env=env)


def start_paced(launcher: Launcher, ranks: int, *arguments: str, cwd: Path) -> Job:
    """An endless job whose environments leave the cores to others."""
    endless = ["--env.id", "Paced-v0", *ENDLESS]
    return start_ulfm(launcher, ranks, *arguments, *endless, cwd=cwd, env=write_paced(cwd, step_s=0.001))


def test_the_others_outlive_an_actor_and_learner(any_mpi: Launcher, tmp_path: Path) -> None:
    script, run = write_disturbed(tmp_path, SLOW_UNTIL_FREE, *GORILA, "--total-steps", "8000"), tmp_path / "runs/r"
    job = any_mpi.start("--with-ft", "ulfm", "-np", "3", str(any_mpi.folder / "python"), script, cwd=tmp_path)
    wait_for(lambda: all_learn(run, 3), what="learning")
    os.kill(pids_of_ranks(tmp_path)[2], signal.SIGKILL)
    (tmp_path / "free").touch()
    job.wait()
    assert job.status == 0 and "rank 2 on" in job.output, job.output
    (segment,) = record_of(run)["segments"]
    assert record_of(run)["completed"] and [lost["rank"] for lost in segment["lost_ranks"]] == [2]
    assert 8000 <= segment["global_steps"] < 9000
    assert_all_end(tmp_path)


def test_the_death_of_a_shard_ends_the_job_which_goes_on_from_the_last_checkpoint(
    any_mpi: Launcher, standing: StandingRanks, tmp_path: Path
) -> None:
    """That of the first rank, which keeps run.json; another's: `test_memory_gorila.py`."""
    job = start_ulfm(any_mpi, 3, "--gorila.num-shards", "2", *ENDLESS, cwd=tmp_path)
    run = tmp_path / "runs/r"
    wait_for(lambda: all_learn(run, 3), what="learning")
    wait_for(lambda: all(state.counters["gorila"]["version"] > 0 for state in states_of(run, 2)), what="a checkpoint")
    os.kill(pids_of_ranks(tmp_path)[0], signal.SIGKILL)
    job.wait()
    assert job.status != 0 and "Traceback" not in job.output, job.output
    assert "Rank 0 has died, which served shard 0 of the parameters; nothing can be" in job.output
    assert not record_of(run)["completed"]
    assert_all_end(tmp_path)
    begin = assemble(states_of(run, 3))
    done = standing.train(3, "--resume", str(run), "--total-steps", "204", cwd=tmp_path)
    assert done.status == 0, done.output
    assert assemble(states_of(run, 3)).parameters.equal(begin.parameters)


def test_a_spare_takes_the_place_of_a_killed_actor_and_learner(any_mpi: Launcher, tmp_path: Path) -> None:
    job, run = start_paced(any_mpi, 3, "--run.spares", "1", cwd=tmp_path), tmp_path / "runs/r"
    wait_for(lambda: all_learn(run, 2), what="learning")
    pids = pids_of_ranks(tmp_path)
    assert "libtorch" not in Path(f"/proc/{pids[2]}/maps").read_text() and len(read_run(run)) == 2
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: len(read_run(run)) == 3 and total(run, "gradients_sent", 2) > 20, what="learning of the spare")
    os.kill(job.process.pid, signal.SIGUSR1)
    job.wait()
    (segment,) = record_of(run)["segments"]
    assert segment["status"] == "stopped" and "Traceback" not in job.output, job.output
    assert [lost["rank"] for lost in segment["lost_ranks"]] == [1] and total(run, "messages_refused") == 0
    assert [joined["rank"] for joined in segment["joined_ranks"]] == [2] and local_steps(run)[2] > 100
    assert_all_end(tmp_path)


# ---- stops -----------------------------------------------------------------------------------------------------------


def test_a_stopped_shard_ends_the_job_with_a_sentence(any_mpi: Launcher, tmp_path: Path) -> None:
    """Also the process that is stopped."""
    job = start_paced(any_mpi, 2, "--gorila.patience-s", "5", cwd=tmp_path)
    run = tmp_path / "runs/r"
    wait_for(lambda: all_learn(run, 2), what="learning")
    os.kill(pids_of_ranks(tmp_path)[0], signal.SIGSTOP)
    job.wait()
    assert job.status != 0 and "Traceback" not in job.output, job.output
    assert "Rank 0 has not answered for 5 s ('gorila.patience_s'), which serves shard 0; nothing can be" in job.output
    assert not record_of(run)["completed"]
    assert_all_end(tmp_path)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "arguments", "sentence"),
    [
        (2, SEPARATE[:4], "'gorila.num_learners' is 0, but 'gorila.roles' is 'separate', which needs at least one"),
        (2, ["--gorila.num-shards", "3"], "'gorila.num_shards' is 3, but a rank serves one shard and the job has"),
        (2, ["--env.id", "Pendulum-v1"], "DQN needs Discrete actions"),
        (2, ["--gorila.replay-capacity-steps", "memory"], "When full, the replay of the ranks on"),
    ],
)
def test_mistakes_are_one_sentence(
    standing: StandingRanks, ranks: int, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    if arguments[-1] == "memory":
        arguments = [arguments[0], str(2 * available_memory_bytes() // 31)]  # bytes a step of CartPole's
    done = standing.train(ranks, *CARTPOLE, *GORILA, *arguments, cwd=tmp_path)
    assert_one_sentence(done.status, done.output, sentence, tmp_path)


class Tiny(gymnasium.Env):
    """Too little to learn for three shards."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(1)


def test_more_shards_than_parameters(standing: StandingRanks, tmp_path: Path) -> None:
    arguments = [*CARTPOLE, *GORILA, "--gorila.num-shards", "3", "--network.mlp-hidden"]
    done = standing.run(3, train, arguments, Tiny, cwd=tmp_path)
    assert_one_sentence(done.status, done.output, "has only 2 parameters", tmp_path)
