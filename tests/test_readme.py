"""The commands of the README and of the pages that its text moved to, as written, but for fewer steps, environments and
ranks: each rank loads torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pala.supervise import read_options
from pala.train import parse
from support import REPOSITORY
from support.helpers import record_of
from support.mpi import Launcher

README = REPOSITORY / "README.md"
RUNNING, PRESETS, EXCHANGES, GORILA, RELIABILITY = (
    REPOSITORY / "docs" / f"{name}.md" for name in ("running", "presets", "exchanges", "gorila", "reliability")
)
pytestmark = [pytest.mark.mpi, pytest.mark.slow]
FEW = "--total-steps 400 --env.num-envs 4 --env.max-episode-frames 120"


def commands(page: Path, begin: str) -> list[str]:
    """Return the indented lines of a page that begin with `begin`, without their comments."""
    found = re.findall(rf"^    ({re.escape(begin)}.*?)\s*(?:#.*)?$", page.read_text(), re.MULTILINE)
    assert found, f"{page.name} has no command that begins with {begin!r}"
    return found


def python_block(page: Path) -> str:
    """Return the first block of Python of a page."""
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None, f"{page.name} has no block of Python"
    return found[1]


def run(command: str, launcher: Launcher, **extra: str) -> str:
    """Run a command in the repository, with a shell, and return its output."""
    environment = {k: v for k, v in launcher.environment().items() if not k.startswith(("OMPI_", "PRTE_"))}
    if not command.startswith("./launch"):
        environment = launcher.environment()
    done = subprocess.run(
        command, shell=True, cwd=REPOSITORY, env=environment | extra, text=True, timeout=420,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_readme_is_a_door() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 140
    assert len(text.split()) <= 1050


def test_the_readmes_commands(any_mpi: Launcher, tmp_path: Path) -> None:
    """Train, evaluate with a video, plot, with the lines that the README shows; resume, as the next page does."""
    (train,) = commands(README, "./launch/train.sh")
    assert '"${@:-quickstart}"' in (REPOSITORY / train).read_text(), "what it trains where nothing is given"
    output = run(f"{train} quickstart {FEW} --run.dir {tmp_path} --evaluation.episodes 2", any_mpi)
    made = Path(re.search(r"PALA  completed after [\d,]+ steps: (\S+)", output)[1])
    assert f"learning curve: {made / 'learning_curve.png'}" in output and record_of(made)["completed"]
    assert record_of(made)["segments"][0]["ranks"] == 2
    assert (made / "evaluation.json").exists() and (made / "policy.safetensors").exists()
    assert (made / "learning_curve.png").stat().st_size > 5000
    shown = re.findall(
        r"^    (?:PALA  |      )(completed|evaluation|learning curve)\b", README.read_text(), re.MULTILINE
    )
    assert set(shown) == {"completed", "evaluation", "learning curve"} and all(word in output for word in shown)
    (evaluate,), (plot,) = commands(README, "pala evaluate"), commands(README, "pala plot")

    def as_written(line: str) -> str:
        here = line.replace("runs/", f"{tmp_path}/").replace("climber.", f"{tmp_path}/climber.")
        return here.replace("pala ", "python -m pala ", 1)

    assert "human-normalised" in run(as_written(evaluate.replace("--episodes 4", "--episodes 2")), any_mpi)
    assert (tmp_path / "climber.mp4").stat().st_size > 2_000
    run(as_written(plot), any_mpi)
    assert (tmp_path / "climber.png").stat().st_size > 5000
    (resume,) = commands(RUNNING, "pala train -n 2 --resume")
    resume = resume.replace("RUN", str(made)).replace("pala train -n 2", "python -m pala train -n 1")
    output = run(f"{resume} {FEW.replace('400', '800')} --evaluation.episodes 0 --run.trace", any_mpi)
    assert f"timeline: `pala trace {made}` makes it" in output
    assert len(record_of(made)["segments"]) == 2


def test_options_of_training() -> None:
    """They are only parsed here: `test_supervise.py` restarts a job."""
    (restarts,) = commands(RELIABILITY, "pala train -n 4 --spares 1 --restarts 3")
    (rate,) = commands(PRESETS, "pala train -n 2 pong")
    options, others = read_options(shlex.split(restarts)[2:])
    assert (options.ranks, options.restarts, parse(others).config.env.id) == (4, 3, "ALE/Pong-v5")
    config = parse(read_options(shlex.split(rate)[2:])[1]).config
    assert (config.a2c.learning_rate, config.env.id) == (7e-4, "ALE/Pong-v5")


def test_the_commands_for_each_case_train_what_they_say() -> None:
    cases = [
        command
        for page in (EXCHANGES, README)
        for command in re.findall(r"^\| (?:are|may) [^|]*\| `pala train ([^`]*)`", page.read_text(), re.MULTILINE)
    ]
    kinds = [parse(read_options(shlex.split(options))[1]).config.exchange.kind for options in cases]
    assert kinds == ["allreduce", *["gossip"] * 5, "allreduce", *["gossip"] * 3]


def test_gorilas_commands(any_mpi: Launcher, tmp_path: Path) -> None:
    """Train, and make the table of the games."""
    (gorila,) = commands(GORILA, "pala train -n 4 gorila/pong")
    gorila = gorila.replace("pala train -n 4", "python -m pala train -n 2")
    few = f"{FEW} --gorila.min-replay-steps 200 --evaluation.episodes 2 --run.dir {tmp_path / 'games'}"
    assert "PALA  completed after" in run(f"{gorila} {few}", any_mpi)
    (scores,) = commands(GORILA, "pala scores")
    scores = scores.replace("pala ", "python -m pala ", 1)
    run(scores.replace(" runs", f" {tmp_path / 'games'} --output {tmp_path / 'scores'}"), any_mpi)
    assert "1 completed run of 1 of the 49 games" in (tmp_path / "scores" / "scores.md").read_text()


def test_the_schedules(any_mpi: Launcher) -> None:
    (command,) = commands(REPOSITORY / "CONTRIBUTING.md", "python tests/explorer check")
    assert "20 schedules held" in run(command.replace("10000", "20"), any_mpi)


def test_the_readmes_script(any_mpi: Launcher, tmp_path: Path) -> None:
    """By plain `python`; those of docs/python.md are in test_python.py."""
    (tmp_path / "script.py").write_text(python_block(README).replace("200_000", "2_000"))
    job = any_mpi.start_command([str(any_mpi.folder / "python"), "script.py"], cwd=tmp_path).wait()
    assert job.status == 0 and "mean return" in job.output, job.output
    (run,) = (tmp_path / "runs").iterdir()
    assert record_of(run)["completed"]


def test_every_preset_that_the_pages_name_exists() -> None:
    for page in (README, RUNNING, PRESETS, EXCHANGES):
        for name in re.findall(r"configs/[\w./]+\.toml", page.read_text()):
            assert (REPOSITORY / name).exists(), name
    assert os.access(REPOSITORY / "launch" / "train.sh", os.X_OK)
