"""Real faults of real ranks: killed, stopped, slow, told to end. docs/reliability.md is the table of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
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

from pala.run.checkpoint import load_policy
from pala.run.metrics import read_run

pytestmark = pytest.mark.mpi

ENDLESS = ["--total-steps", "100000000"]


def start(launcher: Launcher, ranks: int, *arguments: str, cwd: Path) -> Job:
    """A job that can outlive its ranks, as launch/train.sh starts it."""
    python = str(launcher.folder / "python")
    train = [python, "-m", "pala.train", *CARTPOLE, "--run.name", "r", *arguments]
    return launcher.start("--with-ft", "ulfm", "-np", str(ranks), *train, cwd=cwd)


def start_disturbed(launcher: Launcher, ranks: int, disturbance: str, *arguments: str, cwd: Path) -> Job:
    """The same with environments that first do something else at each step."""
    script = write_disturbed(cwd, disturbance, *arguments)
    return launcher.start("--with-ft", "ulfm", "-np", str(ranks), str(launcher.folder / "python"), script, cwd=cwd)


def wait_until_all_train(cwd: Path, ranks: int) -> dict[int, int]:
    """Until every rank has made a record; returns their processes."""
    run = cwd / "runs/r"

    def all_train() -> bool:
        return len(list(run.glob("metrics/rank-*.jsonl"))) == ranks and all(intervals(run, r) for r in range(ranks))

    wait_for(all_train, what="training")
    return pids_of_ranks(cwd)


def intervals(run: Path, rank: int) -> list[dict]:
    return [record for record in read_run(run)[rank] if record["type"] == "interval"]


def longest_gap_s(run: Path, rank: int) -> float:
    """Between two records of a rank, which makes one every half second unless it waits."""
    times = [record["time_s"] for record in intervals(run, rank)]
    return max(after - before for before, after in itertools.pairwise(times))


def total(run: Path, rank: int, key: str) -> int:
    return sum(record[key] for record in intervals(run, rank))


def local_steps(run: Path) -> list[int]:
    return [intervals(run, rank)[-1]["local_steps"] for rank in range(len(read_run(run)))]


@pytest.mark.parametrize("killed", [(0,), (2,), (1, 3)])
@pytest.mark.slow
def test_when_ranks_are_killed_the_others_take_over(any_mpi: Launcher, killed: tuple[int, ...], tmp_path: Path) -> None:
    job, run = (
        start(any_mpi, 4, "--total-steps", "30000", "--evaluation.episodes", "2", cwd=tmp_path),
        tmp_path / "runs/r",
    )
    pids = wait_until_all_train(tmp_path, 4)
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    job.wait()
    assert job.status == 0, job.output
    record, (segment,) = record_of(run), record_of(run)["segments"]
    assert record["completed"] and segment["status"] == "completed"
    assert [lost["rank"] for lost in segment["lost_ranks"]] == list(killed)
    living = {0, 1, 2, 3} - set(killed)
    first = min(living)
    for rank in killed:
        assert f"[rank {first}] rank {rank} on {segment['hosts'][rank]} has died" in job.output
    gap_s = max(longest_gap_s(run, rank) for rank in living)
    print(f"\nthe longest time between two half-second records of those who live: {gap_s:.2f} s")
    assert gap_s < 4, "they waited for the dead"
    assert all(intervals(run, rank)[-1]["local_steps"] > 2000 for rank in living)
    # What a rank did between its last message and its death nobody can count.
    assert 30000 <= segment["global_steps"] < 33000 and sum(local_steps(run)) > 29000
    _, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] == segment["global_steps"]
    assert "steps 30,000 of 30,000" in job.output.splitlines()[-4:][0] or "completed after" in job.output
    assert (run / "evaluation.json").exists() and (run / "learning_curve.png").exists()
    wait_for(lambda: not processes_in(tmp_path), 5, "the end of all ranks")


@pytest.mark.slow
def test_a_run_that_lost_a_rank_is_resumed_without_its_old_checkpoint(any_mpi: Launcher, tmp_path: Path) -> None:
    job, run = start(any_mpi, 3, "--total-steps", "12000", cwd=tmp_path), tmp_path / "runs/r"
    os.kill(wait_until_all_train(tmp_path, 3)[1], signal.SIGKILL)
    assert job.wait().status == 0, job.output
    done = record_of(run)["segments"][0]["global_steps"]
    job = any_mpi.train(3, "--resume", "runs/r", "--total-steps", str(done + 3000), cwd=tmp_path)
    assert job.status == 0, job.output
    assert "The run had lost 1 ranks: every rank starts from the average" in job.output
    assert done + 3000 <= record_of(run)["segments"][1]["global_steps"] < done + 6000


@pytest.mark.slow
def test_independent_learners_outlive_one_another(any_mpi: Launcher, tmp_path: Path) -> None:
    job, run = start(any_mpi, 3, "--total-steps", "9000", "--exchange.kind", "none", cwd=tmp_path), tmp_path / "runs/r"
    os.kill(wait_until_all_train(tmp_path, 3)[0], signal.SIGKILL)
    assert job.wait().status == 0, job.output
    assert record_of(run)["completed"] and (run / "policy.safetensors").exists()
    assert local_steps(run)[1:] == [3000, 3000]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "012"])
def test_a_rank_that_fails_leaves_the_others(any_mpi: Launcher, ranks: str, tmp_path: Path) -> None:
    """If all fail, the run is not complete, whatever mpirun's status says."""
    disturbance = f"assert steps < 500 or str(rank) not in '{ranks}', 'the planted fault'"
    job = start_disturbed(any_mpi, 3, disturbance, "--total-steps", "20000", cwd=tmp_path).wait()
    record = record_of(tmp_path / "runs/r")
    assert "pala: rank 1 failed; the others go on." in job.output or ranks != "1"
    assert "the planted fault" in job.output
    if ranks == "1":
        assert record["completed"] and [lost["rank"] for lost in record["segments"][0]["lost_ranks"]] == [1]
    else:
        # If two fail at the same moment, each takes the other to go on.
        assert not record["completed"] and record["segments"][0]["status"] in ("failed", "running")
    wait_for(lambda: not processes_in(tmp_path), 5, "the end of all ranks")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_rank_holds_the_others_no_longer_than_their_patience(
    any_mpi: Launcher, ranks: int, tmp_path: Path
) -> None:
    """On a ring everybody waits for one peer only; when the stopped one goes on, it takes in what peers send."""
    ring = ["--exchange.topology", "ring", "--exchange.max-staleness", "2", "--exchange.patience-s", "2"]
    job, run = start(any_mpi, ranks, *ring, *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    pids = wait_until_all_train(tmp_path, ranks)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(12)
    os.kill(pids[1], signal.SIGCONT)
    assert longest_gap_s(run, 2 % ranks) > 1.2, "nobody waited for the stopped rank"
    mixed = total(run, 1, "models_mixed")
    wait_for(lambda: total(run, 1, "models_mixed") > mixed + 20, 30, "the stopped rank's return")
    job.process.send_signal(signal.SIGUSR1)
    job.wait(30)
    assert total(run, 1, "models_stale") >= 1, "it mixed what was sent while it was away"
    gap_s = max(longest_gap_s(run, rank) for rank in set(range(ranks)) - {1})
    print(f"\nthe longest time between two half-second records of the others: {gap_s:.2f} s, patience 2 s")
    assert gap_s < 8
    assert longest_gap_s(run, 1) > 11
    assert record_of(run)["segments"][0]["status"] == "stopped" and "has died" not in job.output


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_end_ends_the_job(any_mpi: Launcher, tmp_path: Path) -> None:
    """The others have met the budget without it; they wait for it, here for 4 s, and end with their checkpoints."""
    disturbance = "rank == 1 and steps == 300 and os.kill(os.getpid(), signal.SIGSTOP)"
    job = start_disturbed(any_mpi, 3, disturbance, "--total-steps", "20000", cwd=tmp_path).wait()
    assert job.status != 0 and "The other ranks did not answer within 4 s" in job.output, job.output
    assert "Traceback" not in job.output
    record = record_of(tmp_path / "runs/r")
    assert not record["completed"] and record["segments"][0]["status"] == "failed"
    wait_for(lambda: not processes_in(tmp_path), 10, "the end of the stopped rank, too")
    job = any_mpi.train(3, "--resume", "runs/r", cwd=tmp_path)
    assert job.status == 0 and record_of(tmp_path / "runs/r")["completed"], job.output


@pytest.mark.slow
def test_without_fault_tolerance_the_job_ends_and_is_resumed(mpi: Launcher, tmp_path: Path) -> None:
    job = mpi.start_train(3, *CARTPOLE, "--run.name", "r", "--run.checkpoint-interval-s", "1", *ENDLESS, cwd=tmp_path)
    run = tmp_path / "runs/r"
    wait_for(lambda: list(run.glob("checkpoints/*/rank-0001.previous*")), what="the second checkpoint")
    victim = next(pid for pid in processes_in(tmp_path) if b"pala.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
                  and b"mpirun" not in Path(f"/proc/{pid}/cmdline").read_bytes())  # fmt: skip
    os.kill(victim, signal.SIGKILL)
    job.wait(20)
    assert job.status != 0 and not record_of(run)["completed"]
    wait_for(lambda: not processes_in(tmp_path), 10, "the end of all ranks")
    # Open MPI sends the others SIGTERM first: they may come to say how it ended, or not.
    status = record_of(run)["segments"][0]["status"]
    assert status in ("running", "stopped", "failed")
    budget = sum(local_steps(run)) + 2000
    job = mpi.train(3, "--resume", "runs/r", "--total-steps", str(budget), cwd=tmp_path)
    assert job.status == 0, job.output
    ends = [segment["status"] for segment in record_of(run)["segments"]]
    assert ends == ["lost" if status == "running" else status, "completed"]


# ---- being told to end -----------------------------------------------------------------------------------------------


def end_by(job: Job, number: int, cwd: Path) -> None:
    """Send a signal to the launcher; everything has ended within ten seconds."""
    begin = time.monotonic()
    job.process.send_signal(number)
    job.wait(30)
    assert time.monotonic() - begin < 10
    wait_for(lambda: not processes_in(cwd), 5, "the end of all ranks")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.2, 1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_signal_during_the_start(any_mpi: Launcher, number: int, delay_s: float, tmp_path: Path) -> None:
    """There is nothing to keep yet. mpirun's status may be 0: before Python has begun, USR1 just kills the ranks."""
    job = start(any_mpi, 3, *ENDLESS, cwd=tmp_path)
    time.sleep(delay_s)
    end_by(job, number, tmp_path)
    assert "Traceback" not in job.output, job.output
    if (tmp_path / "runs/r/run.json").exists():
        assert not record_of(tmp_path / "runs/r")["completed"]


@pytest.mark.slow
def test_usr1_in_training_ends_with_a_checkpoint_however_long_that_takes(any_mpi: Launcher, tmp_path: Path) -> None:
    """A step of five seconds stands for a slow environment or disk: mpirun would have killed it after a TERM."""
    disturbance = "time.sleep(5 if steps > 400 else 0)"
    job = start_disturbed(any_mpi, 2, disturbance, "--env.num-envs", "1", *ENDLESS, cwd=tmp_path)
    wait_until_all_train(tmp_path, 2)
    time.sleep(2)
    end_by(job, signal.SIGUSR1, tmp_path)
    assert re.search(r"\[rank 0\] SIGUSR1: checkpoint written to", job.output)
    segment = record_of(tmp_path / "runs/r")["segments"][0]
    assert segment["status"] == "stopped" and segment["global_steps"] >= 400


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_the_evaluation(any_mpi: Launcher, number: int, tmp_path: Path) -> None:
    """The policy is there by then; only the evaluation is missing."""
    job = start(any_mpi, 2, "--total-steps", "2000", "--evaluation.episodes", "1000000", cwd=tmp_path)
    run = tmp_path / "runs/r"
    wait_for(lambda: (run / "run.json").exists() and record_of(run)["completed"], what="the end of training")
    time.sleep(1)
    end_by(job, number, tmp_path)
    assert record_of(run)["completed"] and not (run / "evaluation.json").exists()
    load_policy(run / "policy.safetensors")


@pytest.mark.slow
def test_the_launch_script_passes_term_on_as_usr1(any_mpi: Launcher, tmp_path: Path) -> None:
    script = [str(REPOSITORY / "launch/train.sh"), "-n", "2", str(REPOSITORY / "configs/quickstart.toml")]
    options = [*CARTPOLE, "--run.dir", str(tmp_path), "--run.name", "r", *ENDLESS]
    job = any_mpi.start_command([*script, *options], cwd=tmp_path)
    wait_for(lambda: (tmp_path / "r/metrics/rank-0001.jsonl").exists() and intervals(tmp_path / "r", 1), 60, "training")
    end_by(job, signal.SIGTERM, tmp_path)
    assert "SIGUSR1: checkpoint written to" in job.output and "supervise: gives up" not in job.output
    assert record_of(tmp_path / "r")["segments"][0]["status"] == "stopped"


def test_ulfm_is_what_survives(any_mpi: Launcher) -> None:
    """The tests above say something only if the launcher knows the option."""
    done = subprocess.run([any_mpi.folder / "mpirun", "--version"], capture_output=True, text=True, check=True)
    assert "(Open MPI) 5" in done.stdout


@pytest.mark.slow
def test_a_rank_that_is_four_times_slower_leaves_the_others_their_speed(any_mpi: Launcher, tmp_path: Path) -> None:
    """It is slow for three seconds, then as fast as they for three, and so on; on a ring, everybody waits for one peer.

    The environments sleep, so that ranks do not take one another's cores."""
    period_s = 3.0
    disturbance = f"time.sleep(0.016 if rank == 1 and int(time.time() / {period_s}) % 2 else 0.004)"
    options = ["--env.num-envs", "1", "--exchange.topology", "ring", *ENDLESS]
    job = start_disturbed(any_mpi, 4, disturbance, *options, cwd=tmp_path)
    wait_until_all_train(tmp_path, 4)
    begin_s = time.time() - intervals(tmp_path / "runs/r", 0)[-1]["time_s"]
    time.sleep(6 * period_s)
    end_by(job, signal.SIGUSR1, tmp_path)
    speeds: dict[tuple[bool, bool], list[float]] = {}
    for rank in range(4):
        for record in intervals(tmp_path / "runs/r", rank)[2:-1]:
            phase, at = divmod((begin_s + record["time_s"]) / period_s, 1)
            if 0.3 < at < 0.9:  # the half second before it lies well within
                speeds.setdefault((rank == 1, phase % 2 == 1), []).append(record["local_steps_per_s"])
    slow, others = (
        statistics.median(speeds[who, True]) / statistics.median(speeds[who, False]) for who in (True, False)
    )
    print(f"\nwhile one rank runs at {slow:.2f} of its speed, the others run at {others:.3f} of theirs")
    assert slow < 0.5 and others > 0.9
