"""What imports what: no circles, programs that load MPI and torch late or never, libraries that import no program."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support import REPOSITORY

# Rings, from the inside outwards: a package imports those before it, and itself.
RINGS = (
    ("system",),
    ("config",),
    ("comm",),
    ("testing",),
    ("exchange",),
    ("envs",),
    ("networks",),
    ("run",),
    ("a2c", "gorila"),
    ("algorithms",),
    ("evaluation",),
    ("report",),
    ("job",),
    ("doctor",),
    ("lab",),
)
PROGRAMS = ("__main__", "gossip", "train", "supervise", "presets")


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


FILES = {module_of(str(path.relative_to(REPOSITORY))): path for path in (REPOSITORY / "pala").rglob("*.py")}


def imports_of(module: str) -> set[str]:
    """The modules of PALA that a module imports anywhere but for its types."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(FILES[module].read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in within if name in FILES} or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return (found & set(FILES)) - {module}


@cache
def graph() -> dict[str, set[str]]:
    return {module: imports_of(module) for module in FILES}


def test_there_is_no_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def package_of(module: str) -> str:
    """Name of the package or top-level module below `pala`; "" for `pala` itself."""
    return [*module.split("."), ""][1]


def test_every_package_has_its_ring() -> None:
    found = {package_of(module) for module in FILES} - {""}
    assert found == {name for ring in RINGS for name in ring} | set(PROGRAMS)


def test_no_import_points_outwards() -> None:
    """A package imports those of rings further inside; programs and `pala` itself import what they like."""
    rank = {name: number for number, ring in enumerate(RINGS) for name in ring}
    outwards = set()
    for module, imported in graph().items():
        own = package_of(module)
        for used in imported:
            other = package_of(used)
            if own in rank and other != own and (other not in rank or rank[other] >= rank[own]):
                outwards.add((module, used))
    assert not outwards


def test_no_test_module_imports_another() -> None:
    """They share `support` alone."""
    for path in (REPOSITORY / "tests").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) (?:tests\.)?test_", path.read_text(), re.MULTILINE), path


def loaded_after(code: str) -> set[str]:
    """Which of the heavy modules there are after some code in a new process."""
    look = """
import sys
heavy = {"numpy", "torch", "gymnasium", "matplotlib", "mpi4py", "mpi4py.MPI"} & set(sys.modules)
print("LOADED", *heavy)
"""
    words = [sys.executable, "-c", code + look]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


CHECK = """
import sys
sys.path.insert(0, "tests")
from explorer import check
if __name__ == "__main__":
    check.run(["--schedules", "60", "--processes", "1"])
    assert check.try_all(range(3)).failure is None  # as the processes beside it do
"""
BENCHMARK = """
from pala.lab.benchmark import __main__ as benchmark
benchmark.parse(["pong", "--ranks", "1", "2"])
benchmark.protocol_cost_us(2, messages=100)
benchmark.provenance()
"""
HELP = """
import sys
from pala.__main__ import main
sys.argv[1:] = ["{0}", "--help"]
try:
    main()
except SystemExit as exit_:
    assert not exit_.code
"""


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import pala, pala.config.catalogue, pala.exchange.gossip.topology, pala.exchange.gossip.process_lock", set()),
        (
            "import pala.exchange.budget, pala.exchange.gossip.protocol, pala.exchange.gossip.paired, pala.job.rank\n"
            "import pala.lab.benchmark.__main__, pala.lab.simulate.__main__, pala.lab.chaos.__main__",
            {"numpy"},
        ),
        *(
            pytest.param(code, allowed, marks=pytest.mark.slow)
            for code, allowed in (
                ("import pala.train", {"mpi4py"}),
                (BENCHMARK, {"numpy"}),
                (CHECK, {"numpy"}),
                ("import pala.lab.compare.__main__, pala.lab.scores", {"numpy", "gymnasium"}),
                ("import pala.doctor.__main__", {"numpy", "mpi4py"}),
                (HELP.format("evaluate"), set()),
                (HELP.format("plot"), {"numpy"}),
                (HELP.format("trace"), {"numpy"}),
                (HELP.format("play"), set()),
            )
        ),
    ],
)
def test_what_is_heavy_is_loaded_late_or_never(code: str, allowed: set[str]) -> None:
    """evaluate and train size thread pools first; benchmark and simulate use no MPI in their own process; the pure
    layers of gossip need neither torch nor MPI."""
    assert loaded_after(code) <= allowed


TRAINING = """
import gc, sys
from pala.config import Config, EnvConfig, EvaluationConfig, RunConfig
from pala.job.rank import run_rank
from pala.job.request import Request
from pala.system.resources import loading
from pala.testing.memory import run_ranks
small = {"env": EnvConfig("CartPole-v1", num_envs=1), "evaluation": EvaluationConfig(episodes=0)}
config = Config(total_steps=80, run=RunConfig(sys.argv[1], console="none", tensorboard=False), **small)
(result,) = run_ranks(1, lambda comm: run_rank(comm, Request(config)))
assert result.status == "completed" and "sympy" not in sys.modules
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen > 100_000
with loading():  # what is made after torch may be garbage one day
    assert gc.isenabled()
assert gc.get_freeze_count() == frozen
"""


@pytest.mark.slow
def test_training_loads_torch_without_the_collector_and_no_sympy(tmp_path: Path) -> None:
    """Each costs every rank a part of a second."""
    done = subprocess.run([sys.executable, "-c", TRAINING, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
