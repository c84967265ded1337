"""How soon a spare makes up for a killed rank: `python recovery.py slow` or `python recovery.py pong`.

Trains with 4 ranks and a spare, kills rank 2, and prints when the spare's first update came and the steps per second of
all ranks before the death, in each of the 12 seconds after it, and later. From the ranks' metrics, half a second apart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_HERE = Path(__file__).resolve().parent
_ENVIRONMENTS = {
    "slow": ["--env.id", "slow_environment:SlowCartPole-v0", "--env.num-envs", "4"],
    "pong": ["pong", "--network.precision", "bfloat16"],
}
_OPTIONS = [
    "--run.spares", "1", "--total-steps", "100000000", "--run.name", "r", "--run.log-interval-s", "0.5",
    "--evaluation.episodes", "0", "--run.no-tensorboard",
]  # fmt: skip
_SETTLE_S, _WATCH_S = 20.0, 40.0


def _metrics(folder: Path) -> dict[int, list[dict]]:
    found = {}
    for file in (folder / "runs/r/metrics").glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(file.stem[5:])] = [line for line in lines if "local_steps" in line]
    return found


def _process_of(rank: int, folder: Path) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if (entry / "cwd").readlink() == folder and f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
                return int(entry.name)
        except OSError:
            continue
    raise LookupError(f"rank {rank} has no process")


def _rate(metrics: dict[int, list[dict]], begin_s: float, end_s: float) -> float:
    made = 0.0
    for lines in metrics.values():
        times, steps = zip(*((line["time_s"], line["local_steps"]) for line in lines), strict=True)
        made += float(np.diff(np.interp([begin_s, end_s], times, steps))[0])
    return made / (end_s - begin_s)


def main(kind: str) -> None:
    """Train, kill, print."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    command = ["mpirun", "--with-ft", "ulfm", "-np", "5", "python", "-m", "pala.train", *_ENVIRONMENTS[kind], *_OPTIONS]
    with open(folder / "output.log", "wb") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(_HERE)}, stdout=output, stderr=subprocess.STDOUT
        )
    while not all(len(_metrics(folder).get(rank, [])) > 3 for rank in range(4)):
        time.sleep(0.2)
    time.sleep(_SETTLE_S)
    dies_s = max(lines[-1]["time_s"] for lines in _metrics(folder).values())  # on the run's clock, to half a second
    begin, first_update_s = time.monotonic(), None
    os.kill(_process_of(2, folder), signal.SIGKILL)
    while time.monotonic() < begin + _WATCH_S:
        if first_update_s is None and any(line.get("updates", 0) > 0 for line in _metrics(folder).get(4, [])):
            first_update_s = time.monotonic() - begin
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    metrics = _metrics(folder)
    after = [round(_rate(metrics, dies_s + second, dies_s + second + 1)) for second in range(12)]
    print(f"{kind}: the spare's first record of an update {first_update_s:.1f} s after the death")
    print(f"    steps/s before {_rate(metrics, dies_s - 8, dies_s - 1):.0f}, in each second after {after}, ", end="")
    print(f"later {_rate(metrics, dies_s + 15, dies_s + _WATCH_S - 5):.0f}")


if __name__ == "__main__":
    main(sys.argv[1])
