"""Real ranks under real MPI: `mpirun -np N python -m pala.train`, as a user starts it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, LAUNCHERS, Launcher, processes_in, record_of, wait_for

from pala.networks.network import ActorCritic, FlatParameters
from pala.run.checkpoint import load_policy, load_rank
from pala.run.metrics import read_run
from pala.run.run_folder import config_of

pytestmark = pytest.mark.mpi


def parameters_of(run: Path, rank: int, segment: str = "segment-000") -> torch.Tensor:
    """A rank's parameters in its newest checkpoint."""
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    network = ActorCritic(env.observation_space, env.action_space, config_of(run).network)
    signature = FlatParameters(network, torch.device("cpu")).signature
    return load_rank(run / "checkpoints" / segment, rank, signature).tensors["parameters"]


def last_intervals(run: Path) -> list[dict]:
    """The last interval record of each rank."""
    return [[r for r in records if r["type"] == "interval"][-1] for records in read_run(run)]


def total(run: Path, key: str) -> int:
    """Sum of a count over all intervals of all ranks."""
    return sum(r[key] for records in read_run(run) for r in records if r["type"] == "interval")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_ranks_train_one_policy(mpi: Launcher, ranks: int, tmp_path: Path) -> None:
    job = mpi.train(ranks, *CARTPOLE, "--total-steps", "6000", "--run.name", "r", cwd=tmp_path)
    assert job.status == 0, job.output
    run, record = tmp_path / "runs" / "r", record_of(tmp_path / "runs" / "r")
    segment = record["segments"][0]
    assert record["completed"] and segment["ranks"] == ranks and len(segment["hosts"]) == ranks
    assert ("Open MPI" if mpi.name == "openmpi" else "MPICH") in segment["mpi"]
    local = [record["local_steps"] for record in last_intervals(run)]
    assert len(local) == ranks and sum(local) >= 6000
    assert segment["global_steps"] >= 6000
    if ranks > 1:
        assert total(run, "models_mixed") > 10 * ranks
        assert total(run, "models_refused") == 0
    named, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] >= 6000 and all(bool(t.isfinite().all()) for t in named.values())
    assert "\x1b" not in job.output, "control characters in a log"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_more_ranks_than_cores(mpi: Launcher, tmp_path: Path) -> None:
    """24 ranks start, gossip and end. Nearly all of the time goes into loading torch 24 times."""
    ranks = 24
    job = mpi.start_train(
        ranks, *CARTPOLE, "--env.num-envs", "2", "--network.mlp-hidden", "4", "--total-steps", "20000",
        "--run.name", "r", cwd=tmp_path,
    ).wait(800)  # fmt: skip
    assert job.status == 0, job.output
    run = tmp_path / "runs" / "r"
    segment = record_of(run)["segments"][0]
    assert segment["ranks"] == ranks and segment["threads_per_rank"] == 1
    assert sum(r["local_steps"] for r in last_intervals(run)) == segment["global_steps"] >= 20000
    for records in read_run(run):
        assert sum(r["models_mixed"] for r in records if r["type"] == "interval") > 0
    assert total(run, "models_refused") == 0
    wait_for(lambda: not processes_in(tmp_path), 60, "the end of all ranks")


@pytest.mark.parametrize("topology", ["random", "ring", "exponential", "complete"])
@pytest.mark.slow
def test_every_topology_and_mixing_under_mpi(any_mpi: Launcher, topology: str, tmp_path: Path) -> None:
    for mixing in ("uniform", "push_sum"):
        job = any_mpi.train(
            3, *CARTPOLE, "--total-steps", "4000", "--run.name", mixing, "--exchange.topology", topology,
            "--exchange.mixing", mixing, "--exchange.max-staleness", "2", cwd=tmp_path,
        )  # fmt: skip
        assert job.status == 0, job.output
        run = tmp_path / "runs" / mixing
        assert total(run, "models_mixed") > 0
        worst = max(r["staleness_updates"] for records in read_run(run) for r in records if r["type"] == "interval")
        assert worst <= 3  # max_staleness + the update after which it waits


@pytest.mark.slow
def test_complete_uniform_lockstep_keeps_models_close(any_mpi: Launcher, tmp_path: Path) -> None:
    """Under MPI models then stay close; that the average is exact is tested in test_protocol, without float noise."""
    job = any_mpi.train(
        3, *CARTPOLE, "--total-steps", "3000", "--run.name", "r", "--exchange.topology", "complete",
        "--exchange.max-staleness", "0", cwd=tmp_path,
    )  # fmt: skip
    assert job.status == 0, job.output
    run = tmp_path / "runs" / "r"
    norms = [r["consensus_distance_relative"] for records in read_run(run) for r in records if r["type"] == "interval"]
    # A model and the average of the others differ by one update only; independent learners drift far apart.
    assert max(n for n in norms if n is not None) < 0.05


@pytest.mark.parametrize(
    "compression", [pytest.param(c, marks=pytest.mark.slow) for c in ("none", "bfloat16", "top_k")]
)
def test_compressed_models_train_one_policy_with_as_many_bytes_as_they_should(
    mpi: Launcher, compression: str, tmp_path: Path
) -> None:
    job = mpi.train(
        3, *CARTPOLE, "--total-steps", "6000", "--run.name", "r", "--exchange.compression", compression,
        "--exchange.top-k-fraction", "0.1", "--exchange.max-staleness", "2", cwd=tmp_path,
    )  # fmt: skip
    assert job.status == 0, job.output
    run = tmp_path / "runs" / "r"
    segment = record_of(run)["segments"][0]
    parameters, largest, sent = segment["parameters"], segment["message_bytes"], total(run, "models_sent")
    control = 128  # header and counters of three ranks
    assert largest == control + (2 if compression == "bfloat16" else 4) * parameters
    assert total(run, "models_mixed") > 30 and total(run, "models_refused") == 0
    if compression == "top_k":
        part = control + 8 * -(-parameters // 10)
        num_whole = sent // 61 + 3  # at most, unless a rank waits for long
        assert 0.9 * sent * part < total(run, "bytes_sent") < sent * part + 2 * num_whole * largest
    else:
        assert total(run, "bytes_sent") == sent * largest
    models = [parameters_of(run, rank) for rank in range(3)]
    mean = torch.stack(models).mean(0)
    assert all(float((model - mean).norm()) < 0.1 * float(mean.norm()) for model in models)


@pytest.mark.slow
def test_exchange_none_leaves_ranks_apart(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.train(
        2, *CARTPOLE, "--total-steps", "2000", "--run.name", "r", "--exchange.kind", "none", cwd=tmp_path
    )
    assert job.status == 0, job.output
    run = tmp_path / "runs" / "r"
    first, second = parameters_of(run, 0), parameters_of(run, 1)
    assert (first - second).norm() > 0.1
    assert [r["local_steps"] for r in last_intervals(run)] == [1000, 1000]


@pytest.mark.slow
def test_one_gossiping_rank_equals_no_exchange_bit_for_bit(any_mpi: Launcher, tmp_path: Path) -> None:
    for kind in ("gossip", "none"):
        job = any_mpi.train(
            1, *CARTPOLE, "--total-steps", "2000", "--run.name", kind, "--exchange.kind", kind, cwd=tmp_path
        )
        assert job.status == 0, job.output
    assert torch.equal(parameters_of(tmp_path / "runs/gossip", 0), parameters_of(tmp_path / "runs/none", 0))


def test_plain_python_without_mpirun(any_mpi: Launcher, tmp_path: Path) -> None:
    done = subprocess.run(
        [any_mpi.folder / "python", "-m", "pala.train", *CARTPOLE, "--total-steps", "500"],
        cwd=tmp_path, env=any_mpi.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "completed after" in done.stdout


def test_an_exception_on_one_rank_ends_the_job(mpi: Launcher, tmp_path: Path) -> None:
    source = (
        "import pala.train as cli, pala.envs, gymnasium\n"
        "from mpi4py import MPI\n"
        "class Env(gymnasium.Wrapper):\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        if MPI.COMM_WORLD.rank == 1 and self.steps == 500:\n"
        "            raise RuntimeError('the planted fault')\n"
        "        return super().step(action)\n"
        "make = gymnasium.make\n"
        "gymnasium.make = lambda *a, **k: Env(make(*a, **k))\n"
        f"import sys; sys.argv[1:] = {[*CARTPOLE, '--total-steps', '10000000']!r}\n"
        "cli.main()\n"
    )
    begin = time.monotonic()
    job = mpi.script(3, source, tmp_path)
    assert time.monotonic() - begin < 40
    assert job.status != 0
    assert "rank 1 failed" in job.output and "the planted fault" in job.output
    wait_for(lambda: not processes_in(tmp_path), 5, "the end of all ranks")


POISON = """
import sys, torch
import pala.train as cli
from pala.a2c import learner
share = learner.Learner._share
def poisoned(self, result):
    if self._rank == 1 and self.counters.updates in range(40, 80):  # and believes itself healthy
        self._flat.data.fill_(float("nan"))
        result = result._replace(applied=True)
    share(self, result)
learner.Learner._share = poisoned
sys.argv[1:] = {arguments!r}
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_nan_on_one_rank_is_refused_reported_and_healed(mpi: Launcher, compression: str, tmp_path: Path) -> None:
    arguments = [*CARTPOLE, "--total-steps", "12000", "--run.name", "r", "--exchange.compression", compression]
    job = mpi.script(3, POISON.format(arguments=arguments), tmp_path)
    assert job.status == 0, job.output
    assert re.search(r"\[rank [02]\] refused a model from rank 1: it holds NaN", job.output)
    assert re.search(r"\[rank 1\] update 8\d: the parameters were not finite either; they are replaced", job.output)
    run = tmp_path / "runs" / "r"
    assert all(bool(parameters_of(run, rank).isfinite().all()) for rank in range(3))
    assert total(run, "models_refused") >= 1


@pytest.mark.slow
def test_nan_without_peers_ends_with_a_sentence(any_mpi: Launcher, tmp_path: Path) -> None:
    arguments = [*CARTPOLE, "--total-steps", "12000", "--run.name", "r", "--exchange.kind", "none"]
    job = any_mpi.script(2, POISON.format(arguments=arguments), tmp_path)
    assert job.status != 0
    assert "[rank 1] update 80: the parameters are not finite and there is no peer to recover from" in job.output
    assert "Traceback" not in job.output


def test_ranks_with_different_configurations_are_told(mpi: Launcher, tmp_path: Path) -> None:
    python = str(mpi.folder / "python")
    one = ["-np", "1", python, "-m", "pala.train", *CARTPOLE, "--total-steps", "1000"]
    job = mpi.start(*one, ":", *one, "--a2c.gamma", "0.5", cwd=tmp_path).wait()
    assert job.status != 0
    assert "Rank 1: this rank was started with another configuration than rank 0: 'a2c.gamma' is 0.5" in job.output
    assert "Traceback" not in job.output and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.toml"], "Preset 'missing.toml' does not exist"),
        pytest.param(["--run.name", "x", "bad.toml"], "unknown key 'a2c.learning_rat'", marks=pytest.mark.slow),
        (["bad.toml"], "unknown key 'a2c.learning_rat'; did you mean 'a2c.learning_rate'?"),
        (["--env.id", "ALE/Pogn-v5"], "did you mean 'ALE/Pong-v5'?"),
        (["--resume", "nowhere"], "'nowhere' is not a run's folder"),
        pytest.param(["--run.device", "cuda"], "sees no CUDA device", marks=pytest.mark.slow),
    ],
)
def test_user_mistakes_are_one_sentence(any_mpi: Launcher, arguments: list[str], sentence: str, tmp_path: Path) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    (tmp_path / "bad.toml").write_text("[a2c]\nlearning_rat = 1e-3\n")
    job = any_mpi.train(2, *arguments, cwd=tmp_path)
    assert job.status == 2 and "Traceback" not in job.output
    assert job.output.count(sentence) == 1, job.output
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_cleanly_and_resume_goes_on(mpi: Launcher, number: int, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    job = mpi.start_train(2, *CARTPOLE, "--total-steps", "100000000", "--run.name", "r", cwd=tmp_path)
    wait_for(lambda: (run / "metrics/rank-0001.jsonl").exists() and last_intervals_exist(run), what="training")
    assert len(processes_in(tmp_path)) >= 2
    begin = time.monotonic()
    job.process.send_signal(number)
    job.wait(30)
    assert time.monotonic() - begin < 10
    wait_for(lambda: not processes_in(tmp_path), 5, "the end of all ranks")
    assert record_of(run)["segments"][0]["status"] == "stopped" and not record_of(run)["completed"]
    before = sum(r["local_steps"] for r in last_intervals(run))
    budget = before + 4000
    job = mpi.train(2, "--resume", str(run), "--total-steps", str(budget), cwd=tmp_path)
    assert job.status == 0, job.output
    record = record_of(run)
    assert record["completed"] and [s["resumed"] for s in record["segments"]] == [False, True]
    assert budget <= sum(r["local_steps"] for r in last_intervals(run)) < budget + 4000


def last_intervals_exist(run: Path) -> bool:
    """True when every rank has made a record."""
    return all(any(r["type"] == "interval" for r in records) for records in read_run(run))


@pytest.mark.slow
def test_resume_with_another_number_of_ranks(any_mpi: Launcher, tmp_path: Path) -> None:
    assert any_mpi.train(3, *CARTPOLE, "--total-steps", "3000", "--run.name", "r", cwd=tmp_path).status == 0
    run = tmp_path / "runs" / "r"
    done = record_of(run)["segments"][0]["global_steps"]
    job = any_mpi.train(2, "--resume", str(run), "--total-steps", str(done + 1000), cwd=tmp_path)
    assert job.status == 0, job.output
    assert "had 3 ranks and now has 2" in job.output
    assert done + 1000 <= record_of(run)["segments"][1]["global_steps"] < done + 3000


@pytest.mark.slow
def test_an_existing_run_is_never_written_over(any_mpi: Launcher, tmp_path: Path) -> None:
    arguments = [*CARTPOLE, "--total-steps", "500", "--run.name", "r"]
    assert any_mpi.train(1, *arguments, cwd=tmp_path).status == 0
    before = (tmp_path / "runs/r/run.json").read_bytes()
    job = any_mpi.train(1, *arguments, cwd=tmp_path)
    assert job.status == 2 and "exists already" in job.output
    assert (tmp_path / "runs/r/run.json").read_bytes() == before


@pytest.mark.slow
def test_a_disk_without_room_fails_at_the_start(any_mpi: Launcher, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the first checkpoint cannot be written."""
    python = str(any_mpi.folder / "python")
    command = ["bash", "-c", 'ulimit -f 4; exec "$@"', "-", python, "-m", "pala.train", *CARTPOLE]
    job = any_mpi.start("-np", "2", *command, "--total-steps", "1000", "--run.console", "none", cwd=tmp_path).wait()
    assert job.status != 0 and "Traceback" not in job.output
    assert "File too large" in job.output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "runs"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_the_earlier_checkpoint(any_mpi: Launcher, small_disk: Path, tmp_path: Path) -> None:
    run = small_disk / "r"
    job = any_mpi.start_train(
        2, *CARTPOLE, "--total-steps", "100000000", "--run.name", "r", "--run.checkpoint-interval-s", "1", cwd=tmp_path
    )
    checkpoint = run / "checkpoints/segment-000/rank-0001.previous.safetensors"
    wait_for(checkpoint.exists, what="the second checkpoint")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(b"x" * 4096)
            filler.flush()
    time.sleep(3)
    job.process.send_signal(signal.SIGTERM)
    job.wait(30)
    assert job.status != 0 and "Traceback" not in job.output, job.output
    assert "no checkpoint could be written" in job.output and "No space left on device" in job.output
    (small_disk / "filler").unlink()
    assert any_mpi.train(2, "--resume", str(run), "--total-steps", "1000", cwd=tmp_path).status == 0


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end(any_mpi: Launcher, small_disk: Path, tmp_path: Path) -> None:
    """The job does not end well, and says so; with room, resuming gives the policy."""
    run = small_disk / "r"
    arguments = ["--total-steps", "60000", "--run.name", "r", "--run.checkpoint-interval-s", "1"]
    job = any_mpi.start_train(2, *CARTPOLE, *arguments, cwd=tmp_path)
    wait_for((run / "checkpoints/segment-000/rank-0001.previous.safetensors").exists, what="the second checkpoint")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(b"x" * 4096)
            filler.flush()
    job.wait()
    assert job.status != 0 and "Traceback" not in job.output and not record_of(run)["completed"], job.output
    assert re.search(r"pala: error: rank 0: .*No space left on device.*make room, then `--resume`", job.output)
    (small_disk / "filler").unlink()
    assert any_mpi.train(2, "--resume", str(run), cwd=tmp_path).status == 0
    assert record_of(run)["completed"] and load_policy(run / "policy.safetensors")[1]["global_steps"] >= 60000


@pytest.mark.slow
def test_damaged_checkpoints(any_mpi: Launcher, tmp_path: Path) -> None:
    """The one before is used; without it, a sentence names the file, on all ranks, without a hang."""
    assert any_mpi.train(2, *CARTPOLE, "--total-steps", "1000", "--run.name", "r", cwd=tmp_path).status == 0
    segment = tmp_path / "runs/r/checkpoints/segment-000"
    newest = segment / "rank-0001.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    job = any_mpi.train(2, "--resume", "runs/r", "--total-steps", "2000", cwd=tmp_path)
    assert job.status == 0 and "The one before it is used." in job.output, job.output
    segment = tmp_path / "runs/r/checkpoints/segment-001"
    for file in segment.glob("rank-0001*"):
        file.write_bytes((segment / file.name.replace("0001", "0000")).read_bytes())
    job = any_mpi.train(2, "--resume", "runs/r", "--total-steps", "3000", cwd=tmp_path)
    assert job.status == 2 and "is rank 0's of 2 ranks, not that of rank 1 of 2" in job.output, job.output
    for file in segment.glob("rank-0001*"):
        file.write_bytes(b"nonsense")
    job = any_mpi.train(2, "--resume", "runs/r", "--total-steps", "3000", cwd=tmp_path)
    assert job.status == 2 and "Traceback" not in job.output
    assert re.search(r"Rank 1: Checkpoint '.*rank-0001.safetensors' cannot be read", job.output)


@pytest.mark.slow
def test_a_checkpoint_of_another_network(any_mpi: Launcher, tmp_path: Path) -> None:
    assert any_mpi.train(2, *CARTPOLE, "--total-steps", "500", "--run.name", "r", cwd=tmp_path).status == 0
    job = any_mpi.train(2, "--resume", "runs/r", "--network.mlp-hidden", "8", cwd=tmp_path)
    assert job.status == 2 and "is of another network" in job.output


def test_mpirun_of_another_mpi_is_named(tmp_path: Path) -> None:
    if len(LAUNCHERS) < 2:
        pytest.skip("needs Open MPI and MPICH: ./launch/test.sh installs both")
    openmpi, mpich = LAUNCHERS
    mixed = Launcher("mixed", openmpi.folder)
    job = mixed.start("-np", "2", str(mpich.folder / "python"), "-m", "pala.train", *CARTPOLE, cwd=tmp_path).wait()
    assert job.status != 0
    assert "use different MPI libraries" in job.output


SCRIPT_WITH_FACTORY = """
import gymnasium, pala
from pala.config import Config, EnvConfig, EvaluationConfig, RunConfig
limit = 37
def make_env():
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)
config = Config(total_steps=2000, env=EnvConfig(num_envs=2, vectorization="{vectorization}"),
                run=RunConfig(name="r", console="none"), evaluation=EvaluationConfig(episodes=4))
if __name__ == "__main__":
    result = pala.fit(config, make_env=make_env)
    assert result.status == "completed"
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 0:
        from pala.evaluation.play import evaluate
        from pala.evaluation.record import save
        save(result.run, evaluate(result.run, 4, 2, False, 1, 1))
"""


@pytest.mark.slow
def test_an_exception_in_a_users_own_environment_ends_the_job(any_mpi: Launcher, tmp_path: Path) -> None:
    """Also without `python -m pala.train`: the script calls `pala.fit`, and rank 1 alone raises."""
    source = SCRIPT_WITH_FACTORY.format(vectorization="sync").replace(
        "def make_env():",
        "class Faulty(gymnasium.Wrapper):\n"
        "    def step(self, action):\n"
        "        from mpi4py import MPI\n"
        "        if MPI.COMM_WORLD.rank == 1:\n"
        "            raise RuntimeError('the planted fault')\n"
        "        return super().step(action)\n"
        "def make_env():\n"
        "    return Faulty(gymnasium.make('CartPole-v1'))\n"
        "def unused():",
    )
    job = any_mpi.script(2, source, tmp_path)
    assert job.status != 0
    assert "rank 1 failed" in job.output and "the planted fault" in job.output


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_users_own_environment_from_python(any_mpi: Launcher, vectorization: str, tmp_path: Path) -> None:
    job = any_mpi.script(2, SCRIPT_WITH_FACTORY.format(vectorization=vectorization), tmp_path)
    assert job.status == 0, job.output
    run = tmp_path / "runs" / "r"
    lengths = [r["length_steps"] for records in read_run(run) for r in records if r["type"] == "episode"]
    assert lengths and max(lengths) <= 37
    assert (run / "evaluation.json").exists()


@pytest.mark.slow
def test_two_gossiping_ranks_learn_cartpole(mpi: Launcher, tmp_path: Path) -> None:
    job = mpi.train(
        2, *CARTPOLE, "--env.num-envs", "8", "--total-steps", "120000", "--run.name", "r", "--a2c.learning-rate",
        "1e-3", "--a2c.learning-rate-decay", "linear", cwd=tmp_path,
    )  # fmt: skip
    assert job.status == 0, job.output
    episodes = sorted(
        (r["time_s"], r["return"]) for rs in read_run(tmp_path / "runs/r") for r in rs if r["type"] == "episode"
    )
    means = np.convolve([r for _, r in episodes], np.full(50, 1 / 50), "valid")  # of 50 episodes in a row
    assert means[0] < 40
    # Random play reaches 22. Not the last mean: A2C falls back and recovers here. Of the best stretch, about 30 runs
    # gave 256 to 490, but two on busy or other machines, with other mixes, 149 and 88.
    assert means.max() > 60


@pytest.mark.slow
def test_continuous_actions(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.train(
        2, *CARTPOLE, "--env.id", "Pendulum-v1", "--total-steps", "4000", "--run.name", "r", cwd=tmp_path
    )
    assert job.status == 0, job.output
    lengths = [
        r["length_steps"] for records in read_run(tmp_path / "runs/r") for r in records if r["type"] == "episode"
    ]
    assert set(lengths) == {200}
