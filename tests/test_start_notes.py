"""What is said while a job starts, and of threads that the environment asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pala.job import start_notes
from pala.job.start_notes import StartNotes
from support import REPOSITORY
from support.helpers import CARTPOLE, wait_for


def test_a_start_that_takes_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_notes, "_FIRST_S", 0.05)
    monkeypatch.setattr(start_notes, "_EVERY_S", 0.05)
    notes, said = StartNotes(), ""

    def has_said(stage: str) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return re.search(rf"after \d+ s: {stage}", said) is not None

    notes.stage("waits for nobody")
    time.sleep(0.1)
    assert not has_said("waits")
    notes.begin("loads torch")
    wait_for(lambda: has_said("loads torch"), 60)
    notes.stage("makes the environments")
    wait_for(lambda: has_said("makes the environments"), 60)
    notes.end()
    time.sleep(0.1)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


SLOW_START = """
import sys, time
import gymnasium
from pala.job import start_notes
import pala.train as cli
start_notes._FIRST_S = start_notes._EVERY_S = 0.2
make = gymnasium.make
gymnasium.make = lambda *a, **k: (time.sleep(0.5), make(*a, **k))[1]
cli.main()
"""


@pytest.mark.parametrize(("threads", "says"), [("7", True), (None, False)])
@pytest.mark.slow
def test_a_slow_environment_is_named_and_threads_that_are_not_taken(
    threads: str | None, says: bool, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | ({"OMP_NUM_THREADS": threads} if threads else {})
    options = [*CARTPOLE, "--env.num-envs", "1", "--total-steps", "50"]
    command = [sys.executable, "-c", SLOW_START, *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "makes the environments (CartPole-v1)" in done.stdout
    assert ("OMP_NUM_THREADS is 7, but the ranks share out the cores" in done.stderr) == says


@pytest.mark.slow
def test_open_mpi_finds_its_own_words(tmp_path: Path) -> None:
    """A rank alone said "Sorry!" at each abort."""
    code = "from pala.comm.mpi_process import start_mpi; start_mpi().mpi.Abort(3)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3 and "Sorry" not in done.stdout + done.stderr


@pytest.mark.slow
def test_an_abort_that_returns_shows_no_traceback(tmp_path: Path) -> None:
    """As MPICH's did before its launcher killed the rank."""
    code = """if True:
        from types import SimpleNamespace
        from pala.comm.mpi_process import abort
        from pala.system.errors import EndError

        ended = []
        mpi = SimpleNamespace(Abort=ended.append)
        comm = SimpleNamespace(mpi=mpi, rank=0, size=2, num_dead=0, is_alone=lambda: False)
        abort(comm, EndError("The disk is full."))
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "pala: error: The disk is full.\n")


@pytest.mark.slow
def test_a_rank_without_home_starts(tmp_path: Path) -> None:
    """As a service of systemd's: Open MPI ended the process."""
    code = "from pala.comm.mpi_process import start_mpi; print(start_mpi().size)"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("module", ["pala.train", "pala plot", "pala.doctor", "pala train -n 2"])
@pytest.mark.slow
def test_a_deleted_folder_is_named(module: str, tmp_path: Path) -> None:
    """Some programs showed a traceback, others `No such file or directory`."""
    (tmp_path / "gone").mkdir()
    command = f"cd gone; rmdir ../gone; exec {sys.executable} -m {module}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    expected = "pala: error: the current folder was deleted, or cannot be read: go to another one by `cd`.\n"
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(expected)  # Open MPI says something of its own
