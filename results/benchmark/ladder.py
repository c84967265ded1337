"""What each trick gives: global steps/s of 2 ranks x 16 environments on Pong, without exchange, variants interleaved.

    python results/benchmark/ladder.py [ROUNDS] [STEPS]

Each variant is the present code with one thing changed; `mpirun` runs them in turn. Writes ladder.md and ladder.json
beside this file.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
RANKS = 2
OPTIONS = ["configs/pong.toml", "--exchange.kind", "none", "--run.console", "none", "--run.no-tensorboard"]
OPTIONS += ["--run.log-interval-s", "1.5", "--evaluation.episodes", "0"]
FLOAT32, BFLOAT16 = ["--network.precision", "float32"], ["--network.precision", "bfloat16"]
AUTOGRAD = ["--network.passes", "autograd"]
UNBOUND = {"PRTE_MCA_hwloc_default_binding_policy": "none"}  # as launch/train.sh: Open MPI would bind so few ranks
# name: (options, patch, environment)
VARIANTS: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "float32": (FLOAT32, "", {}),
    "float32, autograd instead of hand-written passes": (FLOAT32 + AUTOGRAD, "", {}),
    "float32, autograd, torch.compile": (FLOAT32 + AUTOGRAD, "compile", {}),
    "float32, without malloc keeping memory": (FLOAT32, "malloc", {}),
    "float32, frames turned by to(channels_last)": (FLOAT32, "turn", {}),
    "float32, ranks bound to cores": (FLOAT32, "", {"PRTE_MCA_hwloc_default_binding_policy": "core"}),
    "float32, 32 environments a rank": ([*FLOAT32, "--env.num-envs", "32"], "", {}),
    "float32, 20-step rollouts": ([*FLOAT32, "--a2c.rollout-steps", "20"], "", {}),
    "bfloat16": (BFLOAT16, "", {}),
    "bfloat16, autograd instead of hand-written passes": (BFLOAT16 + AUTOGRAD, "", {}),
    "bfloat16, 32 environments a rank": ([*BFLOAT16, "--env.num-envs", "32"], "", {}),
}


def train_patched(patch: str, arguments: list[str]) -> None:
    """In a rank: change one thing, then train as `python -m pala.train` does."""
    from pala import train
    from pala.system import resources

    if patch == "malloc":
        libc = ctypes.CDLL(None)
        resources.ctypes = SimpleNamespace(CDLL=lambda name: SimpleNamespace(prctl=libc.prctl))  # it has no mallopt
    if patch not in ("", "malloc"):
        resources.prepare(max(1, (os.cpu_count() or 1) // RANKS))
        import torch

        from pala.networks import conv_tape, make, tape

        if patch == "turn":
            conv_tape.channels_last = lambda images: images.contiguous(memory_format=torch.channels_last)
        elif patch == "compile":
            autograd = tape.AutogradTape

            def compiled(network: torch.nn.Module, precision: str) -> tape.Tape:
                made = autograd(network, precision)
                network.outputs = torch.compile(network.outputs)
                return made

            make.AutogradTape = compiled
    sys.argv[1:] = arguments
    train.main()


def run(name: str, steps: int, folder: str) -> float:
    """Global steps/s of one run, its first interval and its last left out."""
    from pala.run.metrics import read_run

    options, patch, environment = VARIANTS[name]
    folder = tempfile.mkdtemp(dir=folder)
    command = ["mpirun", "-np", str(RANKS), "python", __file__, "--patched", patch, *OPTIONS, *options]
    command += ["--total-steps", str(steps), "--run.dir", folder, "--run.name", "run"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | UNBOUND | environment)
    ranks = [[r for r in records if r["type"] == "interval"][1:-1] for records in read_run(Path(folder, "run"))]
    return sum(statistics.median(r["local_steps_per_s"] for r in rank) for rank in ranks)


def main() -> None:
    """All runs, then the table."""
    rounds, steps = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 5), (2, 20_000)))
    speeds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name in VARIANTS:
                speeds[name].append(run(name, steps, folder))
                print(name, round(speeds[name][-1]), flush=True)
    lines = ["| variant | global steps/s: median (range) | ratio to its precision's first line: median (range) |"]
    lines += ["|---|---|---|"]
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(values, speeds[name.split(",")[0]], strict=True)]
        speed = f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
        lines.append(f"| {name} | {speed} | {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) |")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (HERE / "ladder.md").write_text("\n".join(lines) + "\n")
    facts = {"commit": commit, "cores": os.cpu_count(), "rounds": rounds, "steps": steps, "global_steps_per_s": speeds}
    (HERE / "ladder.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    if "--patched" in sys.argv:
        train_patched(sys.argv[2], sys.argv[3:])
    else:
        main()
