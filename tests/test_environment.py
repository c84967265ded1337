"""`launch/environment.sh`: what it installs and when, with a Python that only notes what it is asked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support.helpers import wait_for

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = ("launch/environment.sh", "constraints.txt", "pyproject.toml")

# Its version is in the file STUB_VERSION; an environment with a file `broken` has no pip.
STUB = r"""#!/bin/bash
here=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
    *"-m pip --version"*) [ ! -e "$here/broken" ] ;;
    *"-m pip install"*)
        echo "install ${*: -1}" >>"$STUB_LOG"
        if [ -e "$here/takes-long" ]; then echo $$ >"$here/takes-long"; for _ in {1..600}; do sleep 0.1; done; fi
        [ ! -e "$here/no-network" ] ;;
    *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && echo venv >>"$STUB_LOG" ;;
    *version_info\)*) cat "$STUB_VERSION" ;;
esac
"""


class Machine:
    """A checkout of its own, and a stub for Python."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.venv = folder / "checkout", folder / "checkout" / ".venv"
        for file in FILES:
            (self.checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, self.checkout / file)
        self.log, self.version, self.python = folder / "log", folder / "version", folder / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(STUB)
        self.python.chmod(0o755)
        self.version.write_text("3.11")

    def use(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """What a launch script does first. `done`: what was asked of Python since the last time."""
        with self.begin(**variables) as script:
            out, err = script.communicate(timeout=60)
        return subprocess.CompletedProcess([], script.returncode, out, err)

    def begin(self, **variables: str) -> subprocess.Popen[str]:
        """The same, not waited for."""
        self.log.write_text("")
        script = f"set -euo pipefail; source {self.checkout}/launch/environment.sh; use_environment openmpi; echo ready"
        environment = os.environ | {"STUB_LOG": str(self.log), "STUB_VERSION": str(self.version)}
        environment |= {"PATH": f"{self.python.parent}:{os.environ['PATH']}"} | variables
        for name in {"PALA_VENV", "PYTHON", "SLURM_JOB_ID"} - set(variables):
            environment.pop(name, None)
        return subprocess.Popen(
            ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    @property
    def done(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_it_installs_once_and_again_when_something_changed(machine: Machine) -> None:
    assert machine.use().stdout == "ready\n" and machine.done == ["venv", "install"]
    assert machine.use().stdout == "ready\n" and machine.done == []
    constraints = machine.checkout / "constraints.txt"
    before = constraints.read_text()
    for text in (before + "\n", before):  # what was there before has not stayed
        constraints.write_text(text)
        assert machine.use().returncode == 0 and machine.done == ["install"]


@pytest.mark.slow
def test_two_checkouts_that_share_an_environment_take_turns(tmp_path: Path) -> None:
    one, other = Machine(tmp_path / "one"), Machine(tmp_path / "other")
    shared = str(tmp_path / "shared")
    for machine, does in ((one, ["venv", "install"]), (other, ["install"]), (one, ["install"]), (one, [])):
        assert machine.use(PALA_VENV=shared).returncode == 0 and machine.done == does


def test_another_python_makes_it_anew(machine: Machine) -> None:
    machine.use()
    machine.version.write_text("3.12")  # as after an upgrade, whose Python finds no packages
    (machine.venv / "broken").touch()
    assert machine.use().stdout == "ready\n" and machine.done == ["venv", "install"]
    assert not (machine.venv / "broken").exists()


def test_a_job_of_slurm_changes_nothing_that_others_run_from(machine: Machine, tmp_path: Path) -> None:
    assert machine.use(SLURM_JOB_ID="1").stdout == "ready\n" and machine.done == ["venv", "install"]
    constraints = machine.checkout / "constraints.txt"
    constraints.write_text(constraints.read_text() + "\n")
    for _ in range(2):
        later = machine.use(SLURM_JOB_ID="2")
        assert later.stdout == "ready\n" and "takes it as it is" in later.stderr and machine.done == []
    other = Machine(tmp_path / "other")  # an environment that another checkout was installed into is not taken
    assert other.use(PALA_VENV=str(machine.venv), SLURM_JOB_ID="3").returncode == 0 and other.done == ["install"]
    (machine.venv / "broken").touch()
    assert machine.use(SLURM_JOB_ID="3").stdout == "ready\n" and machine.done == ["venv", "install"]


def test_an_environment_whose_python_does_not_start_here_stays(machine: Machine) -> None:
    """On a login node, say, before its module is loaded."""
    machine.use()
    (machine.venv / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (machine.venv / "bin/python").write_text("#!/bin/bash\nexit 127\n")
    refused = machine.use()
    assert refused.returncode == 2 and "its Python is of /opt/python/bin" in refused.stderr and machine.done == []
    shutil.rmtree(machine.venv)
    assert machine.use().stdout == "ready\n" and machine.done == ["venv", "install"]


def test_a_wish_for_another_python_is_not_passed_over(machine: Machine, tmp_path: Path) -> None:
    machine.use()
    other = tmp_path / "python3.13"
    other.write_text("#!/bin/bash\necho 3.13\n")
    other.chmod(0o755)
    refused = machine.use(PYTHON=str(other))
    assert refused.returncode == 2 and "has Python 3.11, and PYTHON is" in refused.stderr and "3.13" in refused.stderr
    assert machine.use(PYTHON=str(machine.python)).returncode == 0 and machine.done == []


@pytest.mark.slow
def test_a_checkout_that_may_not_be_written_to_is_installed_once(machine: Machine, tmp_path: Path) -> None:
    """Jobs of an array share the environment: a second installation would take the package from under the first."""
    for folder in ("pala", "configs"):
        (machine.checkout / folder).mkdir()
        (machine.checkout / folder / "module.py").write_text("1")
    for file in ("setup.cfg", "README.md", "LICENSE"):
        (machine.checkout / file).touch()
    script = machine.checkout / "launch/environment.sh"
    script.write_text(
        script.read_text().replace('[ -w "$repository" ]', "false").replace('[ ! -w "$repository" ]', ":")
    )
    venv = str(tmp_path / "mine")
    assert machine.use(PALA_VENV=venv).stdout == "ready\n" and machine.done == ["venv", "install"]
    assert machine.use(PALA_VENV=venv).stdout == "ready\n" and machine.done == []
    (machine.checkout / "pala/module.py").write_text("2")
    assert machine.use(PALA_VENV=venv).returncode == 0 and machine.done == ["install"]
    job = machine.use(PALA_VENV=venv, SLURM_JOB_ID="1")
    assert job.returncode == 0 and machine.done == []
    (machine.checkout / "pala/module.py").write_text("1")  # back to what was there before
    job = machine.use(PALA_VENV=venv, SLURM_JOB_ID="1")
    assert "takes it as it is" in job.stderr and machine.done == []
    assert machine.use(PALA_VENV=venv).returncode == 0 and machine.done == ["install"]


def test_what_the_owner_has_installed_does_for_who_may_not_write(machine: Machine) -> None:
    machine.use()
    script = machine.checkout / "launch/environment.sh"
    script.write_text(
        script.read_text().replace('[ -w "$repository" ]', "false").replace('[ ! -w "$repository" ]', ":")
    )
    assert machine.use().stdout == "ready\n" and machine.done == []
    (machine.checkout / "constraints.txt").write_text("")
    refused = machine.use()
    assert refused.returncode == 2 and "Set PALA_VENV" in refused.stderr and machine.done == []
    job = machine.use(SLURM_JOB_ID="1")  # began before the owner has installed again
    assert job.stdout == "ready\n" and "takes it as it is" in job.stderr and machine.done == []


def test_a_failed_installation_leaves_jobs_of_slurm_what_they_have(machine: Machine) -> None:
    machine.use()
    constraints = machine.checkout / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "\n")
    (machine.venv / "no-network").touch()
    failed = machine.use()
    assert failed.returncode == 2 and "If there is no network here" in failed.stderr and machine.done == ["install"]
    assert machine.use(SLURM_JOB_ID="1").stdout == "ready\n" and machine.done == []
    (machine.venv / "no-network").unlink()
    constraints.write_text(before)  # nobody knows how far the other one came
    assert machine.use().returncode == 0 and machine.done == ["install"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.slow
def test_an_installation_that_is_broken_off_leaves_no_pip_and_is_done_anew(machine: Machine, number: int) -> None:
    """Also by a job of Slurm, which else takes what there is. Who comes meanwhile is told what it waits for."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("ignored here, as under nohup: bash cannot catch it")
    machine.use()
    constraints, pip = machine.checkout / "constraints.txt", machine.venv / "takes-long"
    constraints.write_text(constraints.read_text() + "\n")
    pip.touch()
    with machine.begin() as script:
        wait_for(lambda: pip.read_text().strip(), what="pip")
        with machine.begin() as other:
            assert other.stderr is not None and "waits for another installation" in other.stderr.readline()
            other.kill()
        script.send_signal(number)
        assert script.wait(20) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pip.read_text()), 0)
    pip.rename(machine.venv / "no-network")
    for _ in range(2):  # a job that cannot install does not make it whole
        assert machine.use(SLURM_JOB_ID="1").returncode == 2 and machine.done == ["install"]
    (machine.venv / "no-network").unlink()
    assert machine.use(SLURM_JOB_ID="1").stdout == "ready\n" and machine.done == ["install"]


def test_a_checkout_has_one_name(machine: Machine, tmp_path: Path) -> None:
    machine.use()
    link = tmp_path / "link"
    link.symlink_to(machine.checkout)
    machine.checkout = link
    assert machine.use().stdout == "ready\n" and machine.done == []


@pytest.mark.parametrize("slash", ["", "/"])
def test_what_others_have_put_into_a_folder_stays(machine: Machine, tmp_path: Path, slash: str) -> None:
    theirs = tmp_path / "thesis"
    theirs.mkdir()
    (theirs / "chapter").write_text("1")
    refused = machine.use(PALA_VENV=f"{theirs}{slash}")
    assert refused.returncode == 2 and "not PALA's" in refused.stderr and machine.done == []
    assert [path.name for path in theirs.iterdir()] == ["chapter"]
    (theirs / "chapter").unlink()
    assert machine.use(PALA_VENV=f"{theirs}{slash}").stdout == "ready\n"
    assert machine.use(PALA_VENV=str(theirs)).stdout == "ready\n" and machine.done == []


def test_a_file_system_without_locks_is_told(machine: Machine, tmp_path: Path) -> None:
    flock = machine.python.parent / "flock"
    flock.write_text("#!/bin/bash\necho 'flock: 9: Function not implemented' >&2\nexit 1\n")
    flock.chmod(0o755)
    result = machine.use()
    assert result.stdout == "ready\n" and "cannot be locked" in result.stderr and machine.done == ["venv", "install"]
