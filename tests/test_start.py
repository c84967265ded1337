"""How far a reader has to walk from the command line to the first optimiser step: functions, files, ways back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY

WALK = """
import os, runpy, sys, threading

functions, files, last, returns = set(), set(), "", 0
here = os.path.realpath("pala") + "/"

def called(frame, event, argument):
    global last, returns
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if event != "call" or not file.startswith(here) or name.startswith("<"):
        return
    functions.add((file, name))  # a class that is loaded counts, too
    if file != last:
        returns += file in files
        files.add(file)
        last = file
    if name == "rmsprop_":
        sys.setprofile(None)
        print("WALKED", len(functions), len(files), returns, flush=True)
        os._exit(0)

sys.setprofile(called)  # of this thread alone
runpy.run_module("pala.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_the_start_is_a_short_walk(tmp_path: Path) -> None:
    """The bounds are what was reached and a little, as a slow start says more."""
    options = [
        "--env.id", "ALE/Pong-v5", "--env.num-envs", "2", "--total-steps", "100", "--evaluation.episodes", "0",
        "--run.dir", str(tmp_path),
    ]  # fmt: skip
    words = [sys.executable, "-c", WALK, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    found = re.search(r"WALKED (\d+) (\d+) (\d+)", done.stdout)
    assert found, done.stderr
    functions, files, returns = map(int, found.groups())
    assert functions <= 526 and files <= 88 and returns <= 564


def test_the_page_walks_through_functions_that_are_there() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    walk = page.partition("## From `pala train` to the first step")[2].partition("\n## ")[0]
    found = re.findall(r"`([\w/]+\.py)` ([^;`]+?)(?=;|\n\d|\n\n|$)", walk)
    files = {file: (REPOSITORY / "pala" / file).read_text() for file, _ in found}
    missing = [
        (file, name)
        for file, names in found
        for name in re.findall(r"\w+", names)
        if not re.search(rf"(def|class) {name}\b", files[file])
    ]
    assert len(files) > 40 and not missing
