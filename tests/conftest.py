"""Shared by all tests: real MPI ranks, started as a user would start them or standing by, and which tests run beside
which."""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import virtual_hosts

pytest.register_assert_rewrite("support")  # before a test file imports them

from support import REPOSITORY  # noqa: E402
from support.mpi import LAUNCHERS, Launcher  # noqa: E402
from support.standing_ranks import StandingRanks  # noqa: E402

gc.disable()  # until all tests are collected: the modules that they import are there for good


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


@contextmanager
def _tidy(launcher: Launcher) -> Iterator[Launcher]:
    """Yield a copy, without jobs of others; afterwards end what a failed test left running, and print what it wrote, as
    of a job that ended before the test waited for it."""
    launcher = replace(launcher, jobs=[])
    try:
        yield launcher
    finally:
        for job in launcher.jobs:
            if job.process.returncode is not None:
                continue
            if (status := job.process.poll()) is not None:
                with suppress(subprocess.TimeoutExpired):
                    job.wait(5)
                print(f"{job.process.args} had ended with status {status}, and had written:\n{job.output}")
            else:
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


@functools.cache
def _why_no_virtual_hosts() -> str | None:
    return virtual_hosts.why_not()


@pytest.fixture
def possible(any_mpi: Launcher) -> Iterator[Launcher]:
    """Open MPI where there can be virtual hosts; afterwards, no interface more than before."""
    if (reason := _why_no_virtual_hosts()) is not None:
        pytest.skip(reason)
    before = sorted(Path("/sys/class/net").iterdir())
    yield any_mpi
    assert sorted(Path("/sys/class/net").iterdir()) == before


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


@pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest-xdist looks at the groups when it is its turn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out `soak` unless it is asked for; mark as slow what `often` does not name; keep together what shares
    ranks, daemons or names of the system."""
    if "soak" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        often = item.get_closest_marker("often")
        if often is not None and getattr(item, "originalname", item.name) not in often.args:
            item.add_marker(pytest.mark.slow)
        used = getattr(item, "fixturenames", ())
        if "each_standing" in used:
            item.add_marker(pytest.mark.xdist_group(f"standing {item.callspec.params['each_standing']}"))
        elif "standing" in used:
            item.add_marker(pytest.mark.xdist_group("standing openmpi"))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    yield
    if getattr(config.option, "loadgroup", False):
        for item in items:
            _name_group(item)


def _name_group(item: pytest.Item) -> None:
    """Let the test's address end with its group, by which pytest-xdist keeps tests together. Version 3.8 sets an
    attribute that pytest 9.2 does not read any more: each process would start ranks that stand by, and a Slurm."""
    group = item.get_closest_marker("xdist_group")
    if group is None or item.nodeid.endswith(f"@{group.args[0]}"):
        return
    address: Any = item
    address._id = type(address._id).parse(f"{item.nodeid}@{group.args[0]}")
    assert item.nodeid.endswith(f"@{group.args[0]}"), "tests of one group would run in several processes"


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


@pytest.fixture(autouse=True)
def _numbers_near_zero() -> Iterator[None]:
    """Undo what training does to the thread of a test that trains in it: hypothesis wants the smallest numbers."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)
