"""The trial of mpirun, before this process itself has anything to do with MPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pala.doctor.facts import Launcher, Product, Trial
from pala.system.errors import PalaError
from pala.system.jobs import run_job
from pala.system.resources import physical_cores

_LIMIT_S = 60.0  # a job
_HELLO = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)"
_ROOT = ("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


def identified(launcher: Launcher) -> Launcher:
    """Add what the launcher's `--version` says of it."""
    try:
        done = subprocess.run([launcher.command, "--version"], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return launcher
    product = Product.read(done.stdout + done.stderr)
    trusted = not launcher.processes or product.family == launcher.product.family  # all ranks must see the same family
    return replace(launcher, product=product) if product.name and trusted else launcher


def try_mpirun(mpirun: str) -> Trial:
    """Start a job of two ranks, and one of more processes than cores."""
    said, fault = _attempt(mpirun, "-np", "2", sys.executable, "-c", _HELLO)
    refuses_root = "run as root" in said
    prefix = _ROOT if refuses_root else ()
    if refuses_root:  # what else is there to know?
        said, fault = _attempt(*prefix, mpirun, "-np", "2", sys.executable, "-c", _HELLO)
    size = re.search(r"^size (\d+)$", said, re.MULTILINE)
    many = physical_cores(os.sched_getaffinity(0)) + 1  # Open MPI counts cores, not their threads
    said_of_many, fault_of_many = _attempt(*prefix, mpirun, "-np", str(many), "true")
    is_broken = bool(fault and fault_of_many) and "slots" not in said_of_many  # whatever the number of ranks
    beyond_cores = None if is_broken else not fault_of_many
    if fault and beyond_cores is False and "slots" in said:  # one core: two ranks are too many
        said, fault = _attempt(*prefix, mpirun, "-np", "1", sys.executable, "-c", _HELLO)
        size = None
    return Trial(refuses_root, int(size[1]) if size and not fault else 0, beyond_cores, fault, many)


def _attempt(*words: str) -> tuple[str, str]:
    """Run a job. Returns what it said, and why it failed; empty if it did not."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            run_job(list(words), log, _LIMIT_S)
            fault = ""
        except (PalaError, OSError) as error:
            fault = str(error).replace(f" ('{log}')", "")  # it will not be there
        return log.read_text(encoding="utf-8", errors="replace"), fault
