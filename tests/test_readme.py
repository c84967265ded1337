"""The README's commands, as written, but for fewer steps, environments and ranks: each rank loads torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pala.config import load_with_ranks
from pala.train import parse
from supervise import read_options, usual_ranks
from support import REPOSITORY
from support.helpers import record_of
from support.mpi import Launcher

README = (REPOSITORY / "README.md").read_text()
pytestmark = [pytest.mark.mpi, pytest.mark.slow]
FEW = "--total-steps 400 --env.num-envs 4 --env.max-episode-frames 120"


def commands(begin: str) -> list[str]:
    """The indented lines of the README that begin so, without their comments."""
    found = re.findall(rf"^    ({re.escape(begin)}.*?)\s*(?:#.*)?$", README, re.MULTILINE)
    assert found, f"the README has no command that begins with {begin!r}"
    return found


def run(command: str, launcher: Launcher, **extra: str) -> str:
    """Run one in the repository, with a shell; returns its output."""
    environment = {k: v for k, v in launcher.environment().items() if not k.startswith(("OMPI_", "PRTE_"))}
    if not command.startswith("./launch"):
        environment = launcher.environment()
    done = subprocess.run(
        command, shell=True, cwd=REPOSITORY, env=environment | extra, text=True, timeout=420,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_two_commands(any_mpi: Launcher, tmp_path: Path) -> None:
    """./launch/train.sh, plain and with options: training, evaluation, curve, and the words where they are. Of restarts
    only what they are read as: `test_supervise.py`."""
    assert "./launch/test.sh" in commands("./launch/")
    presets = re.compile(" (gorila|paired|allreduce)")
    plain, restarts = (line for line in commands("./launch/train.sh") if not presets.search(line))
    (more_ranks,) = (line for line in commands("./launch/train.sh") if " -n 4 paired/" in line)
    options, others = read_options(["--restarts", "0", *shlex.split(restarts)[1:]])  # as train.sh
    assert (options.ranks, options.restarts, parse(others).config.env.id) == (4, 3, "ALE/Pong-v5")
    for command, ranks, episodes in ((plain, 2, 2), (more_ranks.replace("-n 4", "-n 1"), 1, 0)):
        output = run(f"{command} {FEW} --run.dir {tmp_path} --evaluation.episodes {episodes}", any_mpi)
        folder = re.search(r"PALA  completed after [\d,]+ steps: (\S+)", output)
        assert folder is not None, output
        made = Path(folder[1])
        assert "evaluation: " in output and f"learning curve: {made / 'learning_curve.png'}" in output
        assert record_of(made)["completed"]
        assert record_of(made)["segments"][0]["ranks"] == ranks
        assert (made / "evaluation.json").exists() == (episodes > 0) and (made / "policy.safetensors").exists()
        assert (made / "learning_curve.png").stat().st_size > 5000


def test_the_presets_of_the_best_settings_are_for_the_ranks_that_the_launcher_starts() -> None:
    best = [line for line in commands("./launch/train.sh") if re.search(" (paired|allreduce)/", line)]
    taken = re.findall(r"^\| (?:on|one|liable) [^|]*\| `((?:paired|allreduce)/[^`]*)`", README, re.MULTILINE)
    assert (len(best), len(taken)) == (7, 4)  # with those of the table of cases
    for line in (*best, *(f"./launch/train.sh {words}" for words in taken)):
        parsed = parse(read_options(shlex.split(line)[1:])[1])
        assert parsed.preset is not None and load_with_ranks(parsed.preset)[1] == usual_ranks(parsed)
        kind, _, _ = str(parsed.preset).partition("/")
        assert kind == (parsed.config.exchange.mixing if kind == "paired" else parsed.config.exchange.kind)


def test_the_other_commands(any_mpi: Launcher, tmp_path: Path) -> None:
    """Train, evaluate with a video, plot, resume; Gorila and its table."""
    name = "pong-20260101-120000"
    train, resume = commands("mpirun -np 2 python -m pala.train")
    train, resume = (command.replace("-np 2", "-np 1") for command in (train, resume))
    run(f"{train} {FEW} --evaluation.episodes 0 --run.dir {tmp_path} --run.name {name}", any_mpi)
    evaluate = commands("python -m pala.evaluate")[0].replace("--episodes 100", "--episodes 2")
    output = run(evaluate.replace("runs/", f"{tmp_path}/").replace("pong.mp4", f"{tmp_path}/pong.mp4"), any_mpi)
    assert "human-normalised" in output and (tmp_path / "pong.mp4").stat().st_size > 2_000
    plot = commands("python -m pala.plot")[0]
    run(plot.replace("runs/", f"{tmp_path}/").replace("pong.png", f"{tmp_path}/pong.png"), any_mpi)
    assert (tmp_path / "pong.png").stat().st_size > 5000
    run(f"{resume.replace('runs/', f'{tmp_path}/')} {FEW.replace('400', '800')} --evaluation.episodes 0", any_mpi)
    assert len(record_of(tmp_path / name)["segments"]) == 2
    fast, gorila = (line for line in commands("./launch/train.sh") if "gorila" in line)
    fast, gorila = fast.replace("-n 2", "-n 1"), gorila.replace("-n 4", "-n 2")
    for command, folder, episodes in ((fast, "fast", 0), (gorila, "games", 2)):
        few = f"{FEW} --gorila.min-replay-steps 200 --evaluation.episodes {episodes} --run.dir {tmp_path / folder}"
        assert "PALA  completed after" in run(f"{command} {few}", any_mpi)
    scores = commands("python -m pala.lab.scores")[0]
    run(scores.replace(" runs", f" {tmp_path / 'games'} --output {tmp_path / 'scores'}"), any_mpi)
    assert "1 completed run of 1 of the 49 games" in (tmp_path / "scores" / "scores.md").read_text()


def test_the_schedules(any_mpi: Launcher) -> None:
    (command,) = commands("python -m pala.simulate check")
    assert "20 schedules held" in run(command.replace("2000", "20"), any_mpi)


def test_the_python_example(any_mpi: Launcher, tmp_path: Path) -> None:
    """The script with a factory of the user's own, under mpirun."""
    (tmp_path / "my_preset.toml").write_text("total_steps = 3000\n[env]\nnum_envs = 4\n[run]\nname = 'r'\n")
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert source is not None
    job = any_mpi.script(2, source[1], tmp_path)
    assert job.status == 0, job.output
    assert record_of(tmp_path / "runs" / "r")["completed"]


def test_every_preset_that_the_readme_names_exists() -> None:
    for name in re.findall(r"configs/[\w./]+\.toml", README):
        assert (REPOSITORY / name).exists(), name
    assert os.access(REPOSITORY / "launch" / "train.sh", os.X_OK)
