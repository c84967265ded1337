"""Real faults of real ranks: killed, stopped, slow, told to end. docs/faults.md is the table of them."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pala.run.checkpoint import load_policy
from pala.run.metrics import Tail, metrics_path, read_run
from pala.supervise import _AS_RANK, survivable
from support import REPOSITORY
from support.helpers import CARTPOLE, SLOW_UNTIL_FREE, record_of, wait_for, write_disturbed, write_paced
from support.mpi import (
    Job,
    Launcher,
    assert_all_end,
    catches,
    pids_of_ranks,
    processes_in,
    processor_seconds,
    stat_of,
)
from support.run_folders import all_train, intervals, local_steps, longest_gap_s, total
from support.standing_ranks import StandingRanks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

ENDLESS = ["--total-steps", "100000000"]


def is_stopped(pid: int) -> bool:
    with suppress(OSError):  # a process that a rank had started, and that has ended
        return stat_of(pid)[0] == "T"
    return False


def share_of_a_core(pids: Sequence[int]) -> float:
    """What each of these processes takes of one, for two seconds."""
    began_s, used_s = time.monotonic(), sum(map(processor_seconds, pids))
    time.sleep(2)
    return (sum(map(processor_seconds, pids)) - used_s) / (time.monotonic() - began_s) / len(pids)


def start(launcher: Launcher, ranks: int, *arguments: str, cwd: Path, step_s: float = 0.0005) -> Job:
    """A job that can outlive its ranks, as launch/train.sh starts it. Its environments leave the cores to others; with
    `step_s` 0 they are Gymnasium's own."""
    python, paced = str(launcher.folder / "python"), {}
    train = [python, "-m", "pala.train", *CARTPOLE, "--run.name", "r", *arguments]
    if step_s:
        train, paced = [*train, "--env.id", "Paced-v0"], write_paced(cwd, step_s)
    ulfm = ("--with-ft", "ulfm") if launcher.name == "openmpi" else ()
    return launcher.start(*ulfm, "-np", str(ranks), *train, cwd=cwd, env=paced)


def start_disturbed(
    launcher: Launcher, ranks: int, disturbance: str, *arguments: str, cwd: Path, patience_s: float = 300.0
) -> Job:
    """The same with environments that first do something else at each step."""
    script = write_disturbed(cwd, disturbance, *arguments, patience_s=patience_s)
    return launcher.start("--with-ft", "ulfm", "-np", str(ranks), str(launcher.folder / "python"), script, cwd=cwd)


def wait_until_all_train(cwd: Path, ranks: int) -> dict[int, int]:
    """Until every rank has made a record; returns their processes."""
    wait_for(lambda: all_train(cwd / "runs/r", ranks), what="training")
    return pids_of_ranks(cwd)


def test_when_ranks_are_killed_the_others_take_over(any_mpi: Launcher, standing: StandingRanks, tmp_path: Path) -> None:
    """The first, which keeps run.json, and one more."""
    killed = (0, 2)
    patience = ["--exchange.patience-s", "60"]  # longer than the whole run takes
    arguments = ["--total-steps", "12000", "--evaluation.episodes", "2", *patience]
    job = start_disturbed(any_mpi, 4, SLOW_UNTIL_FREE, *arguments, cwd=tmp_path)
    run, pids = tmp_path / "runs/r", wait_until_all_train(tmp_path, 4)
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    (tmp_path / "free").touch()
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
    print(f"\nthe longest time between two records of those who live: {gap_s:.2f} s")
    assert gap_s < 30, "they waited for the dead"
    assert all(intervals(run, rank)[-1]["local_steps"] > 1000 for rank in living)
    # What a rank did between its last message and its death nobody can count.
    assert 12000 <= segment["global_steps"] < 15000 and sum(local_steps(run)) > 11000
    _, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] == segment["global_steps"]
    # The console and the last words are those of the first who lives.
    assert re.findall(r"^steps ([\d,]+) of 12,000", job.output, re.M)[-1] == "12,000", job.output
    assert f"PALA  completed after {segment['global_steps']:,} steps: {Path('runs/r')}" in job.output
    assert (run / "evaluation.json").exists() and (run / "learning_curve.png").exists()
    assert_all_end(tmp_path)
    assert_resumed_without_old_checkpoints(standing, tmp_path, len(killed))


def assert_resumed_without_old_checkpoints(standing: StandingRanks, cwd: Path, lost: int) -> None:
    """A run that had lost ranks begins with the average of those that were alive at the end."""
    run = cwd / "runs/r"
    budget = record_of(run)["segments"][0]["global_steps"] + 3000
    done = standing.train(4, "--resume", "runs/r", "--total-steps", str(budget), cwd=cwd)
    assert done.status == 0, done.output
    assert f"The run had lost {lost} rank{'s' * (lost > 1)}: every rank starts from the average" in done.output
    assert budget <= record_of(run)["segments"][1]["global_steps"] < budget + 3000


DYING_SCRIPT = """
import atexit, os, signal, sys, time, pala
atexit.register(lambda: print("finalised:", sys.modules["mpi4py.MPI"].Is_finalized()))  # after what `fit` registers
from pala.config import *
config = pala.Config(total_steps=6000, env=EnvConfig("CartPole-v1", num_envs=4),
                     run=RunConfig(name="r", spares={spares}), exchange=ExchangeConfig(patience_s=2.0),
                     evaluation=EvaluationConfig(episodes=0))
def dies(moment):
    if moment.rank == 1 and moment.updates == 20:
        open("dying", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    while moment.rank != 1 and moment.updates == 20 and not os.path.exists("dying"):
        time.sleep(0.01)
result = pala.fit(config, on_update=dies if {dies} else None)
print(f"the script continues: {{result.status}}")
"""


@pytest.mark.parametrize(("spares", "dies"), [(0, True), (1, False)])
def test_a_script_ends_after_a_death_and_with_spares(
    spares: int, dies: bool, any_mpi: Launcher, tmp_path: Path
) -> None:
    """MPI_Finalize could wait for them forever, so it is called only where there were none, as in `test_mpi.py`. Two
    continue in either case."""
    (tmp_path / "dying.py").write_text(DYING_SCRIPT.format(spares=spares, dies=dies))
    python = str(any_mpi.folder / "python")
    job = any_mpi.start("--with-ft", "ulfm", "-np", "3", python, "dying.py", cwd=tmp_path).wait()
    assert job.output.count("the script continues: completed") == 2, job.output
    assert job.output.count("finalised: False") == 2, job.output
    assert_all_end(tmp_path)


def test_a_rank_told_to_leave_goes_and_the_others_go_on(mpi: Launcher, tmp_path: Path) -> None:
    """Under MPICH, which needs its process, it sleeps."""
    job, run = start(mpi, 3, *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    pids = wait_until_all_train(tmp_path, 3)
    os.kill(pids[0], signal.SIGUSR2)
    wait_for(lambda: "left_ranks" in record_of(run)["segments"][0], what="the news that rank 0 has left")
    if mpi.name == "openmpi":
        wait_for(lambda: pids[0] not in processes_in(tmp_path), 60, "the end of rank 0")
    else:
        job.wait_for_output("[rank 0] trains no more")  # after its last record
    left_at, number = local_steps(run)[0], len(intervals(run, 1))
    wait_for(lambda: len(intervals(run, 1)) > number + 3, what="more records of rank 1")
    os.kill(pids[1], signal.SIGUSR1)
    job.wait()
    segment = record_of(run)["segments"][0]
    assert segment["status"] == "stopped" and "lost_ranks" not in segment and local_steps(run)[0] == left_at
    assert "[rank 0] leaves (SIGUSR2); 2 continue." in job.output and "has died" not in job.output
    assert_all_end(tmp_path)


def start_with_spares(launcher: Launcher, ranks: int, spares: int, *arguments: str, cwd: Path) -> dict[int, int]:
    """Ranks that train, and so many more; returns their processes when the first train."""
    start(launcher, ranks + spares, "--run.spares", str(spares), *arguments, cwd=cwd)
    return wait_until_all_train(cwd, ranks)


def num_records(run: Path, rank: int) -> int:
    return len(list(Tail(metrics_path(run, rank)).read()))


def has_joined(run: Path, rank: int) -> bool:
    """True when a spare trains, and the rank that keeps run.json knows."""
    joined = record_of(run)["segments"][-1].get("joined_ranks", [])
    return rank in [entry["rank"] for entry in joined] and num_records(run, rank) > 3


def assert_ends_well_by_usr1(job: Job, cwd: Path) -> dict:
    """The job stops, with a checkpoint; returns what run.json says of it."""
    end_by(job, signal.SIGUSR1, cwd)
    segment = record_of(cwd / "runs/r")["segments"][-1]
    assert job.status != 0 and segment["status"] == "stopped" and "Traceback" not in job.output, job.output
    return segment


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_deaths_one_after_the_other_take_spares_until_there_are_none(any_mpi: Launcher, tmp_path: Path) -> None:
    """A spare that sleeps, two ranks at once, of which the first keeps run.json, and a spare that has joined."""
    pids, run = start_with_spares(any_mpi, 3, 3, *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    (job,) = any_mpi.jobs
    asleep = [pids[rank] for rank in (3, 4, 5)]
    wait_for(lambda: share_of_a_core(asleep) < 0.1, what="sleep of the spares")
    memory = [resident_bytes(pid) / 2**20 for pid in (pids[4], pids[1])]
    assert "libtorch" not in Path(f"/proc/{pids[4]}/maps").read_text() and len(read_run(run)) == 3
    assert memory[0] < 0.5 * memory[1]
    print(f"\nasleep {memory[0]:.0f} MiB (a rank that trains {memory[1]:.0f})")
    killed_s = time.monotonic()
    for rank in (3, 0, 1):
        os.kill(pids[rank], signal.SIGKILL)
    wait_for(lambda: len(read_run(run)) == 5, what="the first records of two spares")
    print(f"their first records {time.monotonic() - killed_s:.1f} s after the deaths")
    wait_for(lambda: has_joined(run, 4) and has_joined(run, 5), what="training of two spares")
    trains = (2, 3, 4)  # of those that have made records: ranks 2, 4 and 5
    wait_for(lambda: min(total(run, "models_mixed", place) for place in trains) > 10, what="mixes of the spares")
    before = local_steps(run)
    wait_for(lambda: all(local_steps(run)[place] > before[place] for place in trains), what="training of all three")
    os.kill(pids[4], signal.SIGKILL)
    wait_for(lambda: len(record_of(run)["segments"][0]["lost_ranks"]) == 3, what="the news of the last death")
    number = num_records(run, 5)
    wait_for(lambda: num_records(run, 5) > number + 3, what="training of the last spare")
    segment = assert_ends_well_by_usr1(job, tmp_path)
    assert [lost["rank"] for lost in segment["lost_ranks"]] == [0, 1, 4] and segment["ranks"] == 3
    assert "rank 4, a spare" in job.output and total(run, "models_refused") == 0


def test_a_death_in_the_last_moment_needs_no_spare(any_mpi: Launcher, tmp_path: Path) -> None:
    """The first rank and a spare die when they have heard of the end."""
    arguments = [*CARTPOLE, "--run.name", "r", "--run.spares", "1", "--total-steps", "4000"]
    (tmp_path / "dies.py").write_text(f"""
import os, sys
from pala.comm.threaded import ThreadedTransport
close = ThreadedTransport.close
def dies(*arguments):
    if (rank := os.environ["OMPI_COMM_WORLD_RANK"]) in ("0", "3"):
        open("dies " + rank, "x").close()
        os.kill(os.getpid(), 9)
    close(*arguments)
ThreadedTransport.close = dies
import pala.train
sys.argv[1:] = {arguments!r}
pala.train.main()
""")
    job = any_mpi.start("--with-ft", "ulfm", "-np", "4", str(any_mpi.folder / "python"), "dies.py", cwd=tmp_path)
    assert job.wait().status == 0 and record_of(tmp_path / "runs/r")["completed"], job.output
    assert (tmp_path / "dies 0").exists() and (tmp_path / "dies 3").exists()
    (segment,) = record_of(tmp_path / "runs/r")["segments"]
    assert [lost["rank"] for lost in segment["lost_ranks"]] == [0], job.output
    assert "joined_ranks" not in segment and "takes the place" not in job.output, job.output


def test_independent_learners_outlive_one_another(any_mpi: Launcher, tmp_path: Path) -> None:
    alone = ["--total-steps", "6000", "--exchange.kind", "none"]
    job, run = start_disturbed(any_mpi, 2, SLOW_UNTIL_FREE, *alone, cwd=tmp_path), tmp_path / "runs/r"
    os.kill(wait_until_all_train(tmp_path, 2)[0], signal.SIGKILL)
    # The other hears of it while it trains, though they tell each other nothing, and keeps the record.
    wait_for(lambda: "lost_ranks" in record_of(run)["segments"][0], what="notice of the death")
    assert local_steps(run)[1] < 3000, "it noticed it at the end"
    (tmp_path / "free").touch()
    assert job.wait().status == 0, job.output
    assert record_of(run)["completed"] and (run / "policy.safetensors").exists()
    assert local_steps(run)[1] == 3000


@pytest.mark.parametrize("spares", [0, 1])
def test_a_stopped_job_says_its_last_words_when_ranks_are_gone(spares: int, any_mpi: Launcher, tmp_path: Path) -> None:
    """The others do not exit before, which would have mpirun end the job: not where one was killed, nor with spares."""
    arguments = [*ENDLESS, "--run.spares", str(spares), "--run.console", "none"]
    job, run = start(any_mpi, 3, *arguments, cwd=tmp_path), tmp_path / "runs/r"
    pids = wait_until_all_train(tmp_path, 3 - spares)
    if not spares:
        os.kill(pids[2], signal.SIGKILL)
        wait_for(lambda: "lost_ranks" in record_of(run)["segments"][0], what="notice of the death")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait().status == 128 + signal.SIGUSR1, job.output
    assert f"continue with: pala train -n {3 - spares} --resume runs/r" in job.output, job.output


def test_a_rank_that_is_killed_before_its_first_step_leaves_the_others(any_mpi: Launcher, tmp_path: Path) -> None:
    """They step already: all have left what comes before training."""
    disturbance = """
        open(f"steps-{rank}", "w").close()
        if rank == 1:
            while not (os.path.exists("steps-0") and os.path.exists("steps-2")):
                time.sleep(0.01)
            open("dies", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while steps == 100 and not os.path.exists("dies"):
            time.sleep(0.01)"""
    job = start_disturbed(any_mpi, 3, disturbance, "--total-steps", "5000", cwd=tmp_path).wait()
    record = record_of(tmp_path / "runs/r")
    assert job.status == 0 and record["completed"], job.output
    assert [lost["rank"] for lost in record["segments"][0]["lost_ranks"]] == [1]
    assert_all_end(tmp_path)


def test_a_rank_that_is_killed_while_it_makes_its_environments_ends_the_job(
    any_mpi: Launcher, standing: StandingRanks, tmp_path: Path
) -> None:
    """The ranks have agreed on nothing yet: none waits for it, and nothing keeps the next job from the same name."""
    (tmp_path / "dies.py").write_text(f"""
import os, signal, sys
import gymnasium
import pala.train as cli
make = gymnasium.make
def dies(*arguments, **options):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*arguments, **options)
gymnasium.make = dies
sys.argv[1:] = {[*CARTPOLE, "--run.name", "r", "--total-steps", "2000"]!r}
cli.main()
""")
    job = any_mpi.start("--with-ft", "ulfm", "-np", "2", str(any_mpi.folder / "python"), "dies.py", cwd=tmp_path).wait()
    assert job.status != 0, job.output
    assert "another rank died while the job was starting or ending; start it again." in job.output, job.output
    assert "Traceback" not in job.output, job.output
    assert_all_end(tmp_path)
    again = standing.train(2, *CARTPOLE, "--run.name", "r", "--total-steps", "2000", cwd=tmp_path)
    assert again.status == 0 and record_of(tmp_path / "runs/r")["completed"], again.output


def test_when_all_ranks_fail_the_run_is_not_complete(any_mpi: Launcher, tmp_path: Path) -> None:
    """One after the other, the second when it is known that the first is gone: it knows that it is alone."""
    disturbance = """
        if steps > 500 and steps % 20 == 0:
            import json
            with open("runs/r/run.json") as file:
                lost = json.load(file)["segments"][0].get("lost_ranks", [])
            if len(lost) == rank:
                raise RuntimeError("the planted fault")"""
    job = start_disturbed(any_mpi, 2, disturbance, "--env.restarts", "0", *ENDLESS, cwd=tmp_path).wait()
    for rank in range(2):
        assert f"pala: error: [rank {rank}] The environment 'CartPole-v1' has failed: " in job.output, job.output
    record = record_of(tmp_path / "runs/r")
    assert not record["completed"] and record["segments"][0]["status"] == "failed"  # whatever mpirun's status says
    assert [lost["rank"] for lost in record["segments"][0]["lost_ranks"]] == [0]
    assert_all_end(tmp_path)


def test_when_all_ranks_fail_at_the_same_moment_the_run_is_not_complete(any_mpi: Launcher, tmp_path: Path) -> None:
    """Each takes the other to continue: whether one of them is left to say `failed` is a matter of luck."""
    disturbance = """
        if steps == 500:
            open(f"ready-{rank}", "w").close()
        while steps == 500 and not os.path.exists(f"ready-{1 - rank}"):
            time.sleep(0.001)
        assert steps < 500, "the planted fault" """
    options = ["--env.num-envs", "1", "--env.restarts", "0", *ENDLESS]
    job = start_disturbed(any_mpi, 2, disturbance, *options, cwd=tmp_path).wait()
    assert job.output.count("the planted fault") >= 2, job.output
    assert not record_of(tmp_path / "runs/r")["completed"]
    assert_all_end(tmp_path)


@pytest.mark.parametrize(("ranks", "mixing"), [(3, "uniform"), (2, "paired")])
def test_a_stopped_rank_holds_the_others_no_longer_than_their_patience(
    any_mpi: Launcher, ranks: int, mixing: str, tmp_path: Path
) -> None:
    """On a ring everybody waits for one peer only; when the stopped one continues, it takes in what peers send.

    In a paired exchange of three, each of the others would still have the other. How long nobody may wait is checked on
    a simulated clock (`test_schedules.py`); here, that they continue while it stands still."""
    ring = ["--exchange.topology", "ring", "--exchange.max-staleness", "2", "--exchange.patience-s", "2"]
    options = [*ring, "--exchange.mixing", mixing, *ENDLESS]
    job, run = start(any_mpi, ranks, *options, cwd=tmp_path), tmp_path / "runs/r"
    pids = wait_until_all_train(tmp_path, ranks)
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: longest_gap_s(run, 2 % ranks) > 1.2, 60, "somebody who waits for the stopped rank")
    others, steps = set(range(ranks)) - {1}, local_steps(run)
    wait_for(lambda: all(local_steps(run)[rank] > steps[rank] + 1000 for rank in others), 60, "those who wait no more")
    os.kill(pids[1], signal.SIGCONT)
    mixed = total(run, "models_mixed", 1)
    wait_for(lambda: total(run, "models_mixed", 1) > mixed + 20, 60, "the stopped rank's return")
    job.process.send_signal(signal.SIGUSR1)
    job.wait()
    assert total(run, "models_stale", 1) >= 1, "it mixed what was sent while it was away"
    assert record_of(run)["segments"][0]["status"] == "stopped" and "has died" not in job.output


def test_a_rank_that_never_comes_to_the_end_ends_the_job(
    any_mpi: Launcher, standing: StandingRanks, tmp_path: Path
) -> None:
    """The others have met the budget without it; they wait for it, here for 4 s, and end with their checkpoints."""
    disturbance = """
        if rank == 1 and steps == 20:
            open("stops", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        while steps == 100 and not os.path.exists("stops"):
            time.sleep(0.01)"""
    job = start_disturbed(any_mpi, 3, disturbance, "--total-steps", "3000", cwd=tmp_path, patience_s=4.0).wait()
    assert job.status != 0 and "The other ranks did not answer within 4 s" in job.output, job.output
    assert "Traceback" not in job.output
    record = record_of(tmp_path / "runs/r")
    assert not record["completed"] and record["segments"][0]["status"] == "failed"
    assert_all_end(tmp_path, "the stopped rank, too")
    done = standing.train(3, "--resume", "runs/r", cwd=tmp_path)
    assert done.status == 0 and record_of(tmp_path / "runs/r")["completed"], done.output


def test_nobody_spins_or_is_deaf_while_a_rank_is_stopped_as_it_saves_the_policy(
    any_mpi: Launcher, tmp_path: Path
) -> None:
    disturbance = """
        if steps == 1:
            from pala.run import checkpoint
            from pala.system import waiting
            waiting._PATIENCE_AFTER_SIGNAL_S = 1.0
            checkpoint.save_policy = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)"""
    job = start_disturbed(any_mpi, 3, disturbance, "--total-steps", "3000", cwd=tmp_path)
    wait_for(lambda: any(map(is_stopped, pids_of_ranks(tmp_path).values())), what="a stopped rank")
    others = [pid for pid in pids_of_ranks(tmp_path).values() if not is_stopped(pid)]
    assert len(others) == 2

    # At first they still close their environments.
    wait_for(lambda: share_of_a_core(others) < 0.1, what="rest of those who wait")
    end_by(job, signal.SIGUSR1, tmp_path)
    assert job.status != 0 and "did not end within 1 s of the signal" in job.output, job.output
    record = record_of(tmp_path / "runs/r")
    assert not record["completed"] and record["segments"][0]["status"] == "failed"


def test_when_the_rank_that_evaluates_is_killed_another_does(any_mpi: Launcher, tmp_path: Path) -> None:
    """Until a signal interrupts it. The policy is there by then; only the evaluation is missing."""
    job = start(any_mpi, 2, "--total-steps", "1000", "--evaluation.episodes", "1000000", cwd=tmp_path)
    job.wait_for_output("evaluation: plays 1,000,000 episodes")
    os.kill(pids_of_ranks(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: record_of(tmp_path / "runs/r")["segments"][0].get("lost_ranks"), what="the next rank's turn")
    end_by(job, signal.SIGUSR1, tmp_path)
    record, (segment,) = record_of(tmp_path / "runs/r"), record_of(tmp_path / "runs/r")["segments"]
    assert record["completed"] and [lost["rank"] for lost in segment["lost_ranks"]] == [0]
    assert segment["conclusion"] == {"evaluation": "interrupted by SIGUSR1", "rank": 1}
    assert job.status != 0 and job.output.count("evaluation: plays") <= 2, job.output
    assert "evaluation: interrupted; `pala evaluate" in job.output, job.output
    assert not (tmp_path / "runs/r/evaluation.json").exists()
    load_policy(tmp_path / "runs/r/policy.safetensors")


def test_without_fault_tolerance_the_job_ends_and_is_resumed(
    mpi: Launcher, standing: StandingRanks, tmp_path: Path
) -> None:
    """Rank 0 is killed: it keeps run.json, so nobody is left to say how the job ended. Under MPICH another rank may see
    an error in the moment before it is killed, too."""
    often = ["--run.name", "r", "--run.checkpoint-interval-s", "0.5"]
    job, run = mpi.start_train(2, *CARTPOLE, *often, *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    wait_for(lambda: all_train(run, 2) and list(run.glob("checkpoints/*/rank-0001.previous*")), what="a checkpoint")
    os.kill(pids_of_ranks(tmp_path)[0], signal.SIGKILL)
    job.wait()
    assert job.status != 0 and not record_of(run)["completed"]
    assert_all_end(tmp_path)
    said = record_of(run)["segments"][0]["status"]
    assert said == "running" or (mpi.name, said) == ("mpich", "failed")
    budget = sum(local_steps(run)) + 2000
    done = standing.train(2, "--resume", "runs/r", "--total-steps", str(budget), cwd=tmp_path)
    assert done.status == 0, done.output
    how_it_ended = "lost" if said == "running" else said
    assert [segment["status"] for segment in record_of(run)["segments"]] == [how_it_ended, "completed"]


# ---- being told to end -----------------------------------------------------------------------------------------------


def end_by(job: Job, number: int, cwd: Path) -> None:
    """Send a signal to the launcher; everything ends, though nothing else would have ended it. Ranks that wait for one
    another at the end, or within MPI_Finalize, do so for at most a minute: that is seen, as a warning."""
    job.process.send_signal(number)
    began_s = time.monotonic()
    job.wait()
    if time.monotonic() - began_s > 50:
        name = signal.Signals(number).name
        warnings.warn(f"after {name} the job was slow to end:\n{job.output[-3000:]}", stacklevel=2)
    assert_all_end(cwd)


def has_begun(folder: Path) -> bool:
    return len(pids_of_ranks(folder)) == 2


def loads_torch(folder: Path) -> bool:
    with suppress(OSError):  # a process that a rank had started, and that has ended
        return any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in pids_of_ranks(folder).values())
    return False


def has_a_folder(folder: Path) -> bool:
    return (folder / "runs/r").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("stage", [has_begun, loads_torch, has_a_folder])
def test_a_signal_during_the_start(
    any_mpi: Launcher, number: int, stage: Callable[[Path], bool], tmp_path: Path
) -> None:
    """There is nothing to keep until training has begun. mpirun's status may be 0: before Python has begun, USR1 just
    kills the ranks. After a TERM, mpirun may not leave them the time to save."""
    job, run = start(any_mpi, 2, *ENDLESS, cwd=tmp_path, step_s=0), tmp_path / "runs/r"
    wait_for(lambda: stage(tmp_path), what=stage.__name__)
    end_by(job, number, tmp_path)
    assert "Traceback" not in job.output, job.output
    if not run.exists():  # also if the test was slower than the ranks
        assert stage is not has_a_folder
    elif number == signal.SIGUSR1:
        assert job.status != 0 and "[rank 0] SIGUSR1: checkpoint written to" in job.output, job.output
        assert record_of(run)["segments"][0]["status"] == "stopped"
    else:
        assert job.status != 0 and not ((run / "run.json").exists() and record_of(run)["completed"])


@pytest.mark.parametrize("program", [["-m", "pala.train"], ["-m", "pala", "train"]])
def test_a_rank_that_is_told_to_leave_as_it_starts_is_not_killed(program: list[str], tmp_path: Path) -> None:
    """Started as `supervise.py` starts it. Told in its first instructions it continues; told later, it leaves."""
    command = [*_AS_RANK, sys.executable, *program, *CARTPOLE, "--run.name", "r", *ENDLESS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as rank:
        words = Path(f"/proc/{rank.pid}/cmdline")
        wait_for(lambda: words.read_bytes().split(b"\0")[1:3] == [b"-m", program[1].encode()], pause_s=0.001)
        rank.send_signal(signal.SIGUSR2)
        wait_for(lambda: catches(rank.pid, signal.SIGUSR2) or rank.poll() is not None, what="the handler")
        rank.send_signal(signal.SIGUSR2)
        output, _ = rank.communicate()
    assert rank.returncode == 128 + signal.SIGUSR2, output
    assert "was told to leave (SIGUSR2), but no other rank trains: the job ends" in output
    assert record_of(tmp_path / "runs/r")["segments"][0]["signal"] == "SIGUSR2"


def test_usr1_in_training_ends_with_a_checkpoint_however_long_that_takes(any_mpi: Launcher, tmp_path: Path) -> None:
    """A step of two seconds stands for a slow environment or disk: mpirun would have killed it after a TERM."""
    disturbance = """
        if steps == 400:
            open(f"slow-{rank}", "w").close()
        time.sleep(2 if steps >= 400 else 0)"""
    job = start_disturbed(any_mpi, 2, disturbance, "--env.num-envs", "1", *ENDLESS, cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("slow-*"))) == 2, what="slow steps")
    end_by(job, signal.SIGUSR1, tmp_path)
    assert job.status != 0 and re.search(r"\[rank 0\] SIGUSR1: checkpoint written to", job.output), job.output
    segment = record_of(tmp_path / "runs/r")["segments"][0]
    assert segment["status"] == "stopped" and segment["global_steps"] >= 2 * (400 - 20)  # a rollout is not whole
    assert f"stopped after {segment['global_steps']:,} steps" in job.output


def test_a_term_during_the_evaluation(any_mpi: Launcher, tmp_path: Path) -> None:
    """The policy is there by then; only the evaluation is missing. mpirun may not leave the time to say so."""
    job = start(any_mpi, 2, "--total-steps", "1000", "--evaluation.episodes", "1000000", cwd=tmp_path)
    run = tmp_path / "runs/r"
    job.wait_for_output("evaluation: plays 1,000,000 episodes")
    end_by(job, signal.SIGTERM, tmp_path)
    assert record_of(run)["completed"] and not (run / "evaluation.json").exists()
    assert job.status != 0
    load_policy(run / "policy.safetensors")


def test_the_launch_script_passes_term_on_as_usr1(any_mpi: Launcher, tmp_path: Path) -> None:
    script = [str(REPOSITORY / "launch/train.sh"), "-n", "2", str(REPOSITORY / "configs/quickstart.toml")]
    options = [*CARTPOLE, "--env.id", "Paced-v0", "--run.dir", str(tmp_path), "--run.name", "r", *ENDLESS]
    job = any_mpi.start_command([*script, *options], cwd=tmp_path, env=write_paced(tmp_path, step_s=0.001))
    wait_for(lambda: all_train(tmp_path / "r", 2), what="training")
    end_by(job, signal.SIGTERM, tmp_path)
    assert "SIGUSR1: checkpoint written to" in job.output and "pala train: gives up" not in job.output
    assert job.status != 0 and "after SIGTERM" in job.output and "restart" not in job.output, job.output
    assert record_of(tmp_path / "r")["segments"][0]["status"] == "stopped"


def test_ulfm_is_what_survives(any_mpi: Launcher) -> None:
    """The tests above say something only if the launcher knows the option, by which the supervisor starts its jobs."""
    mpirun = str(any_mpi.folder / "mpirun")
    assert survivable(mpirun) == survivable(f"{mpirun} --with-ft ulfm") == [mpirun, "--with-ft", "ulfm"]


@pytest.mark.alone
def test_a_rank_that_is_four_times_slower_leaves_the_others_their_speed(any_mpi: Launcher, tmp_path: Path) -> None:
    """It is slow for a while, then as fast as they for as long, and so on; on a ring, all wait for one peer. What else
    the machine has to do comes and goes: each phase is compared with the next, and the median of several counts.

    The environments sleep, so that ranks do not take one another's cores."""
    period_s, num_phases = 0.8, 14
    disturbance = f"time.sleep(0.04 if rank == 1 and int(time.time() / {period_s}) % 2 else 0.01)"
    short = ["--env.num-envs", "1", "--a2c.rollout-steps", "5", "--run.log-interval-s", "0.1"]
    options = [*short, "--exchange.topology", "ring", *ENDLESS]
    job, run = start_disturbed(any_mpi, 4, disturbance, *options, cwd=tmp_path), tmp_path / "runs/r"
    wait_until_all_train(tmp_path, 4)
    for _ in range(4):  # longer, where something else has taken the cores for seconds
        time.sleep((num_phases + 1) * period_s)
        others, slow = speeds_beside_a_slow_rank(run, period_s)
        if 0.2 < slow < 0.5 and others > 0.9:
            break
    end_by(job, signal.SIGUSR1, tmp_path)
    print(f"\nwhile one rank runs at {slow:.2f} of its speed, the others run at {others:.3f} of theirs")
    assert 0.2 < slow < 0.5 and others > 0.9


def speeds_beside_a_slow_rank(run: Path, period_s: float) -> tuple[float, float]:
    """(of the others, of rank 1): in the phases in which that is slow, over those before them."""
    speeds: list[dict[int, list[float]]] = [{}, {}]  # of the others, and of the slow one: by phase, odd where it is
    for rank in range(4):
        records = intervals(run, rank)
        begin_s = metrics_path(run, rank).stat().st_mtime - records[-1]["time_s"]
        for record in records[2:-1]:
            phase, at = divmod((begin_s + record["time_s"]) / period_s, 1)
            if 0.35 < at < 0.95:  # the fifth of a second before it, an update of the slow one, lies well within
                speeds[rank == 1].setdefault(int(phase), []).append(record["local_steps_per_s"])
    others, slow = map(median_of_ratios, speeds)
    return others, slow


def median_of_ratios(speeds: dict[int, list[float]]) -> float:
    """Of each odd phase's mean speed to that of the phase before it; NaN where they are too few."""
    pairs = [(phase, phase - 1) for phase in speeds if phase % 2 and phase - 1 in speeds]
    if len(pairs) < 6:
        return math.nan
    return statistics.median(statistics.mean(speeds[odd]) / statistics.mean(speeds[even]) for odd, even in pairs)


COUNTED = """
import os, sys, time
import gymnasium, numpy
class Counted(gymnasium.Env):
    '''Episodes of seven steps that pay 1 to 7.'''
    observation_space = gymnasium.spaces.Box(0, 7, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        os.path.exists("free") or time.sleep(0.03)
        self.steps += 1
        return numpy.array([self.steps], numpy.float32), float(self.steps), self.steps == 7, False, {}
gymnasium.register("Counted-v0", Counted)
"""


def test_a_job_outlives_the_processes_of_its_environments(any_mpi: Launcher, tmp_path: Path) -> None:
    """Killed six times, each rank plays on as fast as before; no return is of two episodes, none of a part."""
    run, num_envs = tmp_path / "runs/r", 2
    (tmp_path / "counted.py").write_text(COUNTED)
    job = any_mpi.start_train(
        2, *CARTPOLE, "--run.name", "r", "--env.id", "counted:Counted-v0", "--env.vectorization", "async",
        "--env.num-envs", str(num_envs), "--total-steps", "24000", cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
    )  # fmt: skip

    def workers(rank: int) -> list[int]:
        pids = processes_in(tmp_path)
        ours = [pid for pid in pids if int(stat_of(pid)[1]) == ranks[rank]]
        return [pid for pid in ours if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def failures() -> int:
        return total(run, "env_failures")

    ranks = wait_until_all_train(tmp_path, 2)
    usual = [statistics.median(r["local_steps_per_s"] for r in intervals(run, rank)) for rank in range(2)]
    for killed in range(1, 7):
        rank = killed % 2
        steps = local_steps(run)[rank]
        wait_for(lambda: local_steps(run)[rank] > steps + 20 * num_envs, what="whole episodes")  # noqa: B023 - at once
        os.kill(workers(rank)[killed % num_envs], signal.SIGKILL)
        wait_for(lambda: failures() == killed, what="a record of the failure")  # noqa: B023
    for rank in range(2):
        wait_for(lambda: intervals(run, rank)[-1]["local_steps_per_s"] > usual[rank] / 2, what="steps/s")  # noqa: B023
    (tmp_path / "free").touch()
    job.wait()
    assert job.status == 0 and record_of(run)["completed"], job.output
    assert job.output.count("its process has ended (signal 9). It is made again") >= 2, job.output
    assert "Traceback" not in job.output
    episodes = [r for records in read_run(run) for r in records if r["type"] == "episode"]
    assert episodes and {(r["return"], r["length_steps"]) for r in episodes} == {(28.0, 7)}
    assert failures() == 6
    assert_all_end(tmp_path)
