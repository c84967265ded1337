"""Global steps/s of `none` against `gossip`: 2 ranks x 16 environments on Pong, interleaved. Run from the repository:

    python results/throughput/measure.py [ROUNDS] [STEPS]

Starts `mpirun` for each run in turn (none, gossip, none, ...), reads the metrics files, leaves out each run's first
interval (warm-up), and writes throughput.json and throughput.md beside this file, with the raw intervals.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pala.metrics import SECTIONS, read_run
from pala.run_folder import read

RANKS = 2
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 80_000
HERE = Path(__file__).parent
OPTIONS = ["--run.log-interval-s", "2", "--run.console", "none", "--run.no-tensorboard", "--evaluation.episodes", "0"]


def run(kind: str, folder: str, name: str) -> dict:
    """One training run; its figures."""
    command = ["mpirun", "-np", str(RANKS), "python", "-m", "pala.train", "configs/pong.toml", "--exchange.kind", kind]
    command += ["--total-steps", str(STEPS), "--run.dir", folder, "--run.name", name, *OPTIONS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ranks = [[r for r in records if r["type"] == "interval"][1:-1] for records in read_run(Path(folder, name))]
    segment = read(Path(folder, name))["segments"][0]
    return {
        "kind": kind,
        "command": " ".join(command).replace(folder, "FOLDER"),
        "global_steps_per_s": sum(statistics.median(r["local_steps_per_s"] for r in rank) for rank in ranks),
        "time": {s: statistics.fmean(r[f"time_{s}"] for rank in ranks for r in rank) for s in SECTIONS},
        "memory_peak_mib": [round(rank[-1]["memory_peak_bytes"] / 2**20, 1) for rank in ranks],
        "seconds_to_first_step": segment.get("seconds_to_first_step"),
        "commit": segment["git_commit"],
        "dirty": segment["git_dirty"],
        "versions": segment["versions"],
        "mpi": segment["mpi"],
        "intervals_steps_per_s": [[round(r["local_steps_per_s"], 1) for r in rank] for rank in ranks],
    }


def main() -> None:
    """All runs, then the table."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(kind, folder, f"{kind}-{i}") for i in range(ROUNDS) for kind in ("none", "gossip")]
    speed = {kind: [r["global_steps_per_s"] for r in runs if r["kind"] == kind] for kind in ("none", "gossip")}
    ratios = [g / n for g, n in zip(speed["gossip"], speed["none"], strict=True)]
    lines = [
        "| exchange | global steps/s: median (range) | " + " | ".join(SECTIONS) + " |",
        "|---" * (2 + len(SECTIONS)) + "|",
    ]
    for kind, values in speed.items():
        time = {s: statistics.fmean(r["time"][s] for r in runs if r["kind"] == kind) for s in SECTIONS}
        shares = " | ".join(f"{share:.1%}" for share in time.values())
        lines.append(
            f"| {kind} | {statistics.median(values):,.0f} ({min(values):,.0f} - {max(values):,.0f}) | {shares} |"
        )
    lines += ["", f"Ratio gossip / none, pair by pair: median {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} - {max(ratios):.3f}) over {ROUNDS} pairs; {os.cpu_count()} cores."]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "throughput.md").write_text(text)
    (HERE / "throughput.json").write_text(json.dumps({"cores": os.cpu_count(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
