"""PALA as it is installed: a wheel in an environment that has nothing else of it, and the command `pala`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import pala
from pala import __main__ as command
from support import REPOSITORY

SOURCES = ("pala", "configs", "pyproject.toml", "setup.cfg", "README.md", "LICENSE")


def test_the_command_has_all_programs(
    own_handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by its own name in its help; a mistyped one is named."""
    for name in set(command.PROGRAMS) - {"presets", "train", "doctor"}:  # these two begin like ranks
        monkeypatch.setattr(sys, "argv", ["pala", name, "--help"])
        try:
            command.main()
        except SystemExit as exit_:
            assert not exit_.code
        assert f"pala {name}" in (printed := capsys.readouterr().out) or name == "simulate", printed
        assert f"\n    {name}" in (command.__doc__ or "")
    monkeypatch.setattr(sys, "argv", ["pala", "--version"])
    command.main()
    assert capsys.readouterr().out == f"pala {pala.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["pala", "trian"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        ("-n 4 pong", True), ("-n4 pong", True), ("-np=2 pong", True), ("pong --host=a:2", True), ("pong", False),
        ("pong --restarts 2", True), ("--resume runs/r", False), ("pong --network.mlp-hidden 4", False),
    ],
)  # fmt: skip
def test_train_starts_mpirun_where_an_option_says_on_how_many_ranks(arguments: str, starts: bool) -> None:
    assert command._starts_ranks(arguments.split()) == starts


@pytest.mark.parametrize("program", ["pala.train", "pala"])
def test_python_without_the_packages_says_so(program: str) -> None:
    """As in a checkout whose environment nobody has activated."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare = [sys.executable, "-S", "-m", program]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, env=environment)
    assert done.returncode == 1
    assert "does not have cloudpickle, gymnasium, mpi4py, numpy, torch, tyro. In a checkout run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_package_trains_by_name_in_an_empty_environment(tmp_path: Path) -> None:
    """Build an archive of the source, of that a wheel, and install it. The packages that PALA needs are lent by this
    environment, but not PALA itself, and nothing of the checkout is there."""
    source, place = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in SOURCES:  # a copy, since building leaves files behind
        if (REPOSITORY / name).is_dir():
            unread = shutil.ignore_patterns("__pycache__")  # other tests' programs write there
            shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=unread)
        else:
            shutil.copy(REPOSITORY / name, source / name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # where pip puts an MPI

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, text=True, timeout=240,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    venv.create(place)
    (packages,) = place.glob("lib/python3*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = f"import os; os.chdir({str(source)!r}); from setuptools import build_meta; build_meta.build_sdist('..')"
    run(sys.executable, "-c", build)
    shutil.rmtree(source)
    (archive,) = tmp_path.glob("pala-*.tar.gz")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheels", archive)
    (wheel,) = (tmp_path / "wheels").glob("pala-*.whl")
    run(*pip, "--python", place, "install", "--no-deps", "--no-index", wheel)
    pala = place / "bin" / "pala"
    assert "gorila/pong\n" in run(pala, "presets", "gorila")
    few = ("--total-steps", "200", "--env.num-envs", "1", "--evaluation.episodes", "0", "--run.name", "r")
    run(pala, "train", "pong", *few)
    assert "policy.safetensors" in {file.name for file in (tmp_path / "runs" / "r").iterdir()}
    assert str(packages) in run(place / "bin" / "python", "-c", "import pala; print(pala.__file__)")
    assert "pala.train pong " in run(pala, "compare", "pong", "--dry-run")
