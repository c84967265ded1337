"""Processes that look like the ranks of a run to other processes: they hold its lock and write metrics."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pala.config import Config, RunConfig, to_table
from pala.system.files import write_json
from support.helpers import wait_for

RANK = """
import fcntl, json, os, sys, time
lock = open(".lock", "a+")
fcntl.flock(lock, fcntl.LOCK_SH)
rank, silent_after = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(sys.argv[1])
begin = time.monotonic()
with open(f"metrics/rank-{rank:04d}.jsonl", "a", buffering=1) as file:
    def write(**record):
        now = {"time_s": round(time.monotonic() - begin, 3), "segment": "segment-000", "global_steps": 0}
        file.write(json.dumps(now | record) + "\\n")
    write(type="start", local_steps=0)
    for number in range(1, 10**6):
        time.sleep(0.1)
        if number <= silent_after:
            write(type="interval", local_steps=10 * number, global_steps=10 * number)
"""


def write_record(run: Path, config: Config | None = None, **facts: Any) -> None:
    """run.json of a run of three ranks on this host; `facts` of its only segment."""
    (run / "metrics").mkdir(parents=True, exist_ok=True)
    (run / ".lock").touch()
    segment = {
        "started": "",
        "ended": None,
        "status": "running",
        "segment": "segment-000",
        "ranks": 3,
        "hosts": [platform.node()] * 3,
    }
    kept = {key: fact for key, fact in (segment | facts).items() if fact is not None or key == "ended"}
    table = to_table(config or Config(run=RunConfig(log_interval_s=0.1)))
    write_json(run / "run.json", {"format": 1, "completed": False, "config": table, "segments": [kept]})


def start_rank(run: Path, rank: int, ulfm: bool = True, silent_after: int = 10**6) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_MCA_mpi_ft_enable": str(int(ulfm))}
    return subprocess.Popen([sys.executable, "-I", "-c", RANK, str(silent_after)], cwd=run, env=environment)


@contextmanager
def ranks_of(run: Path, number: int = 3, **options: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """That many ranks, once all have made a record; they end with the block."""
    ranks = [start_rank(run, rank, **options) for rank in range(number)]
    files = [run / f"metrics/rank-{rank:04d}.jsonl" for rank in range(number)]
    try:
        wait_for(lambda: all(file.exists() and b"interval" in file.read_bytes() for file in files), what="records")
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
