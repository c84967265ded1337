"""Real ranks under real MPI: `mpirun -np N python -m pala.train`, as a user starts it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pala.comm.base import Communicator
from pala.run.checkpoint import load_policy
from pala.run.metrics import read_run
from support.helpers import (
    CARTPOLE,
    SLOW_UNTIL_FREE,
    record_of,
    slow_but_for,
    wait_for,
    write_disturbed,
    write_paced,
)
from support.mpi import LAUNCHERS, Job, Launcher, assert_all_end, assert_one_sentence, processes_in
from support.run_folders import all_train, assert_trained_one_policy, states_of
from support.standing_ranks import StandingRanks

pytestmark = pytest.mark.mpi


def test_ranks_train_one_policy(mpi: Launcher, tmp_path: Path) -> None:
    job = mpi.train(2, *CARTPOLE, "--total-steps", "6000", "--run.name", "r", cwd=tmp_path)
    assert job.status == 0, job.output
    assert_trained_one_policy(tmp_path / "runs/r", 2)
    used = record_of(tmp_path / "runs/r")["segments"][0]["mpi"]
    assert ("Open MPI" if mpi.name == "openmpi" else "MPICH") in used
    assert "\x1b" not in job.output, "control characters in a log"


def test_a_thread_that_does_not_begin_keeps_no_rank_waiting(any_mpi: Launcher, tmp_path: Path) -> None:
    """As where memory is short: it cannot be made, or `Thread.start` waits for it without a limit."""
    source = """
import _thread
from pala.comm.mpi_process import start_mpi
from pala.comm import mpi
from pala.system.errors import EndError
def cannot_be_made(function, arguments):
    raise RuntimeError("can't start new thread")
comm = start_mpi()
mpi.can_survive, mpi._BEGIN_S = lambda: True, 0.1
for start_new_thread in (cannot_be_made, lambda function, arguments: None):
    _thread.start_new_thread = start_new_thread
    try:
        comm._shrink(None)
    except EndError as error:
        print("ended:", error)
"""
    job = any_mpi.script(1, source, tmp_path)
    first, second = (line for line in job.output.splitlines() if line.startswith("ended: "))
    assert job.status == 0, job.output
    assert "can't start new thread" in first and "did not answer within 0 s" in second, job.output


BY_PROGRAM = f"sys.argv[1:] = {[*CARTPOLE, '--total-steps', '10000000']!r}\npala.train.main()\n"
BY_SCRIPT = "pala.fit(pala.Config(total_steps=10**7, env=pala.config.EnvConfig('CartPole-v1', num_envs=4)))\n"


def train_with_a_fault(mpi: Launcher, fault: str, training: str, folder: Path) -> Job:
    """Train on two ranks; an environment of rank 1 does `fault` in its 500th step, and all do from then on."""
    source = (
        "import sys, pala.train, gymnasium\n"
        "from mpi4py import MPI\n"
        "class Env(gymnasium.Wrapper):\n"
        "    steps, is_broken = 0, False\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        if MPI.COMM_WORLD.rank == 1 and (Env.is_broken or self.steps == 500):\n"
        "            Env.is_broken = True\n"
        f"            {fault}\n"
        "        return super().step(action)\n"
        "make = gymnasium.make\n"
        f"gymnasium.make = lambda *a, **k: Env(make(*a, **k))\n{training}"
    )
    return mpi.script(2, source, folder)


@pytest.mark.slow
def test_an_exception_that_is_no_error_ends_the_job_too(mpi: Launcher, tmp_path: Path) -> None:
    """As asyncio.CancelledError: it passes whoever catches errors, and at exit MPI would wait for the other rank."""
    job = train_with_a_fault(mpi, "raise BaseException('the planted fault')", BY_PROGRAM, tmp_path)
    assert job.status != 0 and "pala: rank 1 failed" in job.output and "the planted fault" in job.output, job.output
    assert_all_end(tmp_path)


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_job(mpi: Launcher, tmp_path: Path) -> None:
    """Under each MPI one of the two, and one of the two ways to start training: no MPI has an influence on them."""
    fault, training, raised = {
        "openmpi": ("raise RuntimeError('the planted fault')", BY_SCRIPT, "RuntimeError"),
        "mpich": ("sys.exit('the planted fault')", BY_PROGRAM, "SystemExit"),
    }[mpi.name]
    job = train_with_a_fault(mpi, fault, training, tmp_path)
    assert job.status != 0
    assert "[rank 1] The environment 'CartPole-v1' has failed 4 times" in job.output, job.output
    assert "Traceback" in job.output and f"{raised}: the planted fault (" in job.output
    assert_all_end(tmp_path)


@pytest.mark.slow
def test_a_signal_ends_a_job_of_which_a_rank_hangs_in_its_start(any_mpi: Launcher, tmp_path: Path) -> None:
    source = (
        "import sys, time, pala.train as cli, gymnasium\n"
        "from mpi4py import MPI\n"
        "from pala.system import waiting\n"
        "waiting._PATIENCE_AFTER_SIGNAL_S = 1.0\n"
        "def make(*a, **k):\n"
        "    open(f'making-{MPI.COMM_WORLD.rank}', 'w').close()\n"
        "    while MPI.COMM_WORLD.rank == 1:\n"
        "        time.sleep(0.1)\n"
        "    return original(*a, **k)\n"
        "original, gymnasium.make = gymnasium.make, make\n"
        f"sys.argv[1:] = {[*CARTPOLE, '--total-steps', '10000000']!r}\n"
        "cli.main()\n"
    )
    (tmp_path / "hangs.py").write_text(source)
    job = any_mpi.start("-np", "2", str(any_mpi.folder / "python"), "hangs.py", cwd=tmp_path)
    wait_for(lambda: all((tmp_path / f"making-{rank}").exists() for rank in range(2)), what="the environments")
    job.process.send_signal(signal.SIGUSR1)
    job.wait()
    assert job.status != 0 and "did not end within 1 s of the signal" in job.output, job.output
    assert_all_end(tmp_path)


def test_a_users_mistake_is_one_sentence(any_mpi: Launcher, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[a2c]\nlearning_rat = 1e-3\n")
    sentence = "unknown key 'a2c.learning_rat'; did you mean 'a2c.learning_rate'?"
    job = any_mpi.train(2, "bad.toml", cwd=tmp_path)
    assert_one_sentence(job.status, job.output, sentence, tmp_path)


OWN = """
import gymnasium, numpy
class Own(gymnasium.Wrapper):
    def reset(self, **arguments):
        if self.unwrapped.spec.id == "Raises-v0":
            raise ValueError("no level")
        return super().reset(**arguments)
    def action_masks(self):
        return numpy.zeros(2, bool)
class OfGym(gymnasium.Wrapper):
    def step(self, action):
        return super().step(action)[1:]
for name in ("Masked-v0", "Raises-v0"):
    gymnasium.register(name, lambda **more: Own(gymnasium.make("CartPole-v1").unwrapped))
gymnasium.register("OfGym-v0", lambda **more: OfGym(gymnasium.make("CartPole-v1").unwrapped))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name", "sentence"),
    [
        (2, "Masked-v0", "an action mask that allows no action"),
        (1, "Raises-v0", "'reset' raised ValueError"),
        (2, "OfGym-v0", "'step' of the environment 'OfGym-v0' breaks Gymnasium's interface"),
    ],
)
def test_mistakes_of_the_first_reset_or_step_are_one_sentence(
    ranks: int, name: str, sentence: str, any_mpi: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    job = any_mpi.train(ranks, "--env.id", f"own:{name}", "--env.num-envs", "2", cwd=tmp_path)
    assert_one_sentence(job.status, job.output, sentence, tmp_path)
    assert "MPI_ABORT" not in job.output, job.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--env.id", "ALE/Pogn-v5"], "did you mean 'ALE/Pong-v5'?"),
        (["--run.device", "cuda"], "sees no CUDA device"),
    ],
)
def test_mistakes_that_need_torch_are_one_sentence(
    standing: StandingRanks, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = standing.train(2, *arguments, cwd=tmp_path)
    assert_one_sentence(done.status, done.output, sentence, tmp_path)


@pytest.mark.parametrize(
    ("mpi", "number"),
    [("openmpi", signal.SIGTERM), ("openmpi", signal.SIGINT), ("mpich", signal.SIGINT)],
    indirect=["mpi"],
)
@pytest.mark.slow
def test_a_signal_ends_cleanly(mpi: Launcher, number: int, tmp_path: Path) -> None:
    """Resumes: `test_memory.py`, and `test_supervise.py` after deaths."""
    run, paced = tmp_path / "runs" / "r", write_paced(tmp_path, step_s=0.001)
    endless = ["--env.id", "Paced-v0", "--total-steps", "100000000", "--run.name", "r"]
    job = mpi.start_train(2, *CARTPOLE, *endless, cwd=tmp_path, env=paced)
    wait_for(lambda: all_train(run, 2), what="training")
    assert len(processes_in(tmp_path)) >= 2
    job.process.send_signal(number)
    job.wait()
    assert_all_end(tmp_path)
    # Open MPI kills its ranks 0.2 s after these signals: on a slow disk they do not get to say so.
    expected = {"stopped", "running"} if mpi.name == "openmpi" else {"stopped"}
    assert record_of(run)["segments"][0]["status"] in expected and not record_of(run)["completed"]
    assert len(states_of(run, 2)) == 2  # whole files, whenever they were killed


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
    """A disk of two megabytes: an earlier start's checkpoints and the present one's take about one."""
    disk = tmp_path / "runs"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    """Fill it, also with the room that a rank gives back which is just saving: its older file goes when the newer is
    whole."""
    with open(disk / "filler", "wb", buffering=0) as filler:
        for _ in range(40):  # 0.8 s: a rank saves every 0.3 s
            with contextlib.suppress(OSError):
                while filler.write(b"x" * 4096):
                    pass
            time.sleep(0.02)


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_the_earlier_checkpoint(
    any_mpi: Launcher, standing: StandingRanks, small_disk: Path, tmp_path: Path
) -> None:
    run = small_disk / "r"
    often = ["--run.name", "r", "--run.checkpoint-interval-s", "0.3"]
    job = any_mpi.start_train(2, *CARTPOLE, *often, "--total-steps", "100000000", cwd=tmp_path)
    checkpoint = run / "checkpoints/segment-000/rank-0001.previous.safetensors"
    wait_for(checkpoint.exists, what="the second checkpoint")
    fill(small_disk)
    job.wait_for_output("no checkpoint could be written")
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert job.status != 0 and "Traceback" not in job.output, job.output
    assert "no checkpoint could be written" in job.output and "No space left on device" in job.output
    assert_all_end(tmp_path)
    (small_disk / "filler").unlink()
    assert standing.train(2, "--resume", str(run), "--total-steps", "1000", cwd=tmp_path).status == 0


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end(
    any_mpi: Launcher, standing: StandingRanks, small_disk: Path, tmp_path: Path
) -> None:
    """The job does not end well, and says so; with room, resuming gives the policy."""
    run = small_disk / "r"
    often = ["--run.checkpoint-interval-s", "0.3", "--total-steps", "8000"]
    script = write_disturbed(tmp_path, SLOW_UNTIL_FREE, *often)
    job = any_mpi.start("-np", "2", str(any_mpi.folder / "python"), script, cwd=tmp_path)
    wait_for((run / "checkpoints/segment-000/rank-0001.previous.safetensors").exists, what="the second checkpoint")
    fill(small_disk)
    (tmp_path / "free").touch()
    job.wait()
    assert job.status != 0 and "Traceback" not in job.output and not record_of(run)["completed"], job.output
    assert re.search(r"pala: error: rank 0: .*No space left on device.*make room, then continue", job.output)
    assert_all_end(tmp_path)
    (small_disk / "filler").unlink()
    assert standing.train(2, "--resume", str(run), cwd=tmp_path).status == 0
    assert record_of(run)["completed"] and load_policy(run / "policy.safetensors")[1]["global_steps"] >= 8000


def take_a_part(comm: Communicator) -> None:
    part = comm.first(2)
    assert (part is None) == (comm.rank == 2)
    assert part is None or part.interrupt is comm.interrupt


@pytest.mark.slow
def test_signals_end_the_waits_of_ranks_that_train_beside_spares(standing: StandingRanks, tmp_path: Path) -> None:
    standing.run(3, take_a_part, cwd=tmp_path)


LAST = """if True:
    import os, signal, time
    from pala.comm.mpi_process import abort, start_mpi
    from pala.system.errors import EndError

    comm = start_mpi()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        are_all_here = comm.ibarrier()
        while not are_all_here():
            time.sleep(0.1)
    except EndError:
        abort(comm, EndError("This rank cannot continue alone."))
"""


def test_the_last_rank_that_lives_ends_the_job_with_its_status(any_mpi: Launcher, tmp_path: Path) -> None:
    """mpirun ended with 0 when that rank aborted."""
    job = any_mpi.start("--with-ft", "ulfm", "-np", "2", str(any_mpi.folder / "python"), "-c", LAST, cwd=tmp_path)
    assert job.wait().status == 2 and job.output.count("pala: error: This rank cannot continue alone.") == 1, job.output


STOPPED = """if True:
    import os, signal, sys
    from pala.comm.mpi_process import start_mpi

    start_mpi()
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("continues", flush=True)
"""


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGHUP"])
@pytest.mark.parametrize("mpi", slow_but_for(["openmpi", "mpich"], "openmpi"), indirect=True)
def test_a_rank_that_is_told_to_stop_before_it_trains_ends(mpi: Launcher, number: str, tmp_path: Path) -> None:
    """MPICH caught SIGUSR1, by which a supervisor passes on all signals, until PALA did, and UCX caught SIGHUP:
    training continued."""
    job = mpi.script(1, STOPPED, tmp_path, number)
    assert job.status != 0 and "continues" not in job.output, job.output


@pytest.mark.slow
def test_mpirun_of_another_mpi_is_named(tmp_path: Path) -> None:
    if len(LAUNCHERS) < 2:
        pytest.skip("needs Open MPI and MPICH: ./launch/test.sh installs both")
    openmpi, mpich = LAUNCHERS
    mixed = Launcher("mixed", openmpi.folder)
    job = mixed.start("-np", "2", str(mpich.folder / "python"), "-m", "pala.train", *CARTPOLE, cwd=tmp_path).wait()
    assert job.status != 0
    assert "use different MPI libraries" in job.output


SCRIPT_WITH_FACTORY = """
import atexit, sys
import gymnasium, pala
from pala.config import Config, EnvConfig, EvaluationConfig, RunConfig
def make_env():
    return gymnasium.make("CartPole-v1", max_episode_steps=37)
config = Config(total_steps=2000, env=EnvConfig(num_envs=2, vectorization="async"),
                run=RunConfig(name="r", console="none"), evaluation=EvaluationConfig(episodes=4))
if __name__ == "__main__":
    atexit.register(lambda: print("finalised:", sys.modules["mpi4py.MPI"].Is_finalized()))  # after what `fit` registers
    result = pala.fit(config, make_env=make_env)
    assert result.status == "completed"
"""


@pytest.mark.slow
def test_a_mistake_in_a_users_script_is_one_sentence(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.script(2, "import pala\npala.fit(pala.Config(total_steps=-1))\n", tmp_path)
    assert job.status == 1 and "Traceback" not in job.output
    assert job.output.count("pala: error: Config: 'total_steps' is -1 but must lie between") == 1


@pytest.mark.slow
def test_a_users_own_environment_from_python(any_mpi: Launcher, tmp_path: Path) -> None:
    """MPI_Finalize is called: no rank has died (`test_faults.py`)."""
    (tmp_path / "script.py").write_text(SCRIPT_WITH_FACTORY)
    python = str(any_mpi.folder / "python")
    job = any_mpi.start("--with-ft", "ulfm", "-np", "2", python, "script.py", cwd=tmp_path).wait()
    assert job.status == 0 and job.output.count("finalised: True") == 2, job.output
    run = tmp_path / "runs" / "r"
    lengths = [r["length_steps"] for records in read_run(run) for r in records if r["type"] == "episode"]
    assert lengths and max(lengths) <= 37
    assert (run / "evaluation.json").exists()
