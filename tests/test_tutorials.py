"""The files and commands of the tutorials as written, but for fewer steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from pala.lab.compare.plan import Plan
from pala.lab.simulate import tune
from support import REPOSITORY

DOCS = REPOSITORY / "docs"
SHORTEST = {"--total-steps 50000": "--total-steps 800 --rates 7e-4 --seeds 1"}


def blocks(name: str, language: str) -> list[str]:
    """Return the blocks of a language of a tutorial."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / f"tutorial_{name}.md").read_text(), re.DOTALL)


def command(name: str, begin: str) -> str:
    """Return the first indented line of a tutorial that begins so."""
    page = (DOCS / f"tutorial_{name}.md").read_text()
    found = re.search(rf"^ {{4}}({re.escape(begin)}.*?)\s*(?:#.*)?$", page, re.MULTILINE)
    assert found is not None, begin
    return found[1]


def test_the_environment_is_one() -> None:
    """Gymnasium's checker finds nothing, and `pala tune` accepts its command."""
    names: dict[str, type] = {}
    exec(blocks("environment", "python")[0].rpartition("gymnasium.register")[0], names)
    check_env(names["Catch"](), skip_render_check=True)
    parsed = tune.parse(shlex.split(command("environment", "pala tune"))[2:])
    assert (parsed.environment, parsed.ranks) == ("my_env:Catch-v0", 2)


@pytest.mark.slow
def test_a_rate_is_looked_for(tmp_path: Path) -> None:
    """The user's file is found in the current folder."""
    (tmp_path / "my_env.py").write_text(blocks("environment", "python")[0])
    words = command("environment", "pala tune")
    for given, fewer in SHORTEST.items():
        assert given in words
        words = words.replace(given, fewer)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(words)], cwd=tmp_path, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0 and "learning rate 0.0007, seed 1: mean return " in done.stdout, done.stderr


def test_the_comparison_is_six_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    game, preset = blocks("compare", "toml")
    Path("cartpole.toml").write_text(game)
    Path("two_methods.toml").write_text(preset)
    runs = Plan(Path(shlex.split(command("compare", "pala compare two_methods.toml --dry-run"))[2])).runs
    assert {(run.cell.variant, run.config.seed) for run in runs} == {
        (variant, seed) for variant in ("gossip", "synchronous") for seed in (1, 2, 3)
    }
    assert {run.config.exchange.kind for run in runs} == {"gossip", "allreduce"}
    assert {run.config.env.id for run in runs} == {"CartPole-v1"}


def test_the_scripts_for_slurm_exist() -> None:
    scripts = set(re.findall(r"launch/slurm/\w+\.sbatch", (DOCS / "tutorial_slurm.md").read_text()))
    assert len(scripts) == 4 and all((REPOSITORY / script).exists() for script in scripts)


@pytest.mark.parametrize("name", ["first", "environment", "compare", "slurm"])
def test_tutorials_are_short(name: str) -> None:
    assert len((DOCS / f"tutorial_{name}.md").read_text().split()) < 900
