"""Small things that many tests need: waiting, parameters, environments, memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import REPOSITORY

CARTPOLE = [
    "--env.id", "CartPole-v1", "--env.num-envs", "4", "--evaluation.episodes", "0", "--run.log-interval-s", "0.2",
    "--run.no-tensorboard",
]  # fmt: skip


def slow_among(cases: Iterable[tuple], *slow: object) -> list:
    """The same parameters; those whose first value is one of `slow` are left out by -m "not slow"."""
    return [pytest.param(*case, marks=pytest.mark.slow) if case[0] in slow else case for case in cases]


def slow_but_for(values: Iterable[object], *often: object) -> list:
    """The same values of one parameter; only `often` are not left out by -m "not slow"."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]


SLOW_UNTIL_FREE = "os.path.exists('free') or time.sleep(0.005)"
"""A disturbance that ends when a test has done what it has to do in time, and touches the file."""


def write_disturbed(folder: Path, disturbance: str, *arguments: str, patience_s: float = 300.0) -> str:
    """Write a script that trains with environments that first do something else at each step: it knows `rank` and
    `steps`. `patience_s`: how long ranks wait for one another at the end. Returns its name."""
    (folder / "disturbed.py").write_text(f"""
import os, signal, sys, time
import gymnasium
import pala.train as cli
from pala.envs.vector import Envs
from pala.job.job import Job
Envs.try_out = lambda envs, seed: None  # training alone is disturbed
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

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
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


def contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Together:
    """Ranks begin when all are there: a thread that gets no processor for a while would find the steps of a small
    budget made by others."""

    def __init__(self, ranks: int) -> None:
        self._missing, self._changed = ranks, threading.Condition()

    def barrier(self) -> None:
        """Wait for the others, or for a while: perhaps one has died."""
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._missing <= 0, 5.0)
