"""The types of `pala/` and of the explorer. A test, so that it runs beside others: mypy has work for one core only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import REPOSITORY


@pytest.mark.slow
def test_mypy_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
