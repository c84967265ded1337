"""A training by the defaults, with a value that counts as black: which filters live on a rank, and what is learned.

python results/backgrounds/trial.py --game Pong --black 87 --seed 1      # one rank; appends a line to trials.jsonl
mpirun -np 2 python results/backgrounds/trial.py --kind allreduce        # two
python results/backgrounds/trial.py --report      # all of them as a table
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pala
from pala.config import A2CConfig, EnvConfig, EvaluationConfig, ExchangeConfig, NetworkConfig, RunConfig
from pala.networks.conv_tape import ConvTape
from pala.run.provenance import provenance
from pala.system.text import table

TRIALS = Path(__file__).with_name("trials.jsonl")
UPDATES, EPISODES = 1000, 60  # from one look at the filters to the next; in the mean of the last returns


def watched(looks: list[list[int]]) -> Any:
    """Return the backward pass, which first notes [update, living filters of each convolution]."""
    backward, count = ConvTape.backward, 0

    def look_and_go_back(tape: ConvTape, gradients: Sequence[Any]) -> None:
        nonlocal count
        if count % UPDATES == 0:
            images = [buffer for buffer in tape._buffers[1:] if buffer.dim() == 4]
            looks.append([count, *(int((image.amax((0, 2, 3)) > 0).sum()) for image in images)])
        count += 1
        backward(tape, gradients)

    return look_and_go_back


def train(game: str, black: float, seed: int, steps: int, rate: float, kind: Any) -> None:
    """Train, and append what came of it."""
    looks: list[list[int]] = []
    facts = provenance()
    ConvTape.backward = watched(looks)  # type: ignore[method-assign]
    result = pala.fit(
        pala.Config(
            total_steps=steps,
            seed=seed,
            env=EnvConfig(f"ALE/{game}-v5"),
            network=NetworkConfig(background=black / 255),
            a2c=A2CConfig(learning_rate=rate),
            exchange=ExchangeConfig(kind=kind),
            evaluation=EvaluationConfig(episodes=0),
            run=RunConfig(name=f"{game}-{kind}-black{black:g}-{rate:g}-{seed}", threads=1),
        )
    )
    if not result.leads:
        return
    files = sorted((result.run / "metrics").glob("rank-*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    episodes = sorted((r for r in records if r["type"] == "episode"), key=lambda r: r["global_steps"])
    returns = [episode["return"] for episode in episodes]
    line = {
        "ranks": len(files), "kind": kind, "game": game, "black": black, "rate": rate, "seed": seed, "steps": steps,
        "filters": looks, "returns": returns,
        **{key: facts[key] for key in ("git_commit", "versions", "cpu")},
    }  # fmt: skip
    with TRIALS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def report() -> None:
    """Print a line for each training."""
    lines = [json.loads(line) for line in TRIALS.read_text().splitlines()]
    for line in lines:
        line.setdefault("ranks", 1)  # the first lines do not name them
        line.setdefault("kind", "gossip")
    lines.sort(key=lambda line: [line[key] for key in ("ranks", "kind", "game", "rate", "black", "seed")])
    header = [
        "ranks",
        "exchange",
        "game",
        "rate",
        "black",
        "seed",
        "steps",
        "living filters of 32, 64, 32",
        "all returns",
        "the last 60",
    ]
    rows = []
    for line in lines:
        settings = [f"{line['rate']:g}", f"{line['black']:g}", str(line["seed"]), f"{line['steps']:,}"]
        means = [f"{statistics.mean(returns):.1f}" for returns in (line["returns"], line["returns"][-EPISODES:])]
        living = ", ".join(map(str, line["filters"][-1][1:]))
        rows.append([str(line["ranks"]), line["kind"], line["game"], *settings, living, *means])
    print(table(header, rows))


def main() -> None:
    """Read the command line, and do it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--black", type=float, default=0.0)
    parser.add_argument("--kind", default="gossip", choices=["gossip", "allreduce", "shared_memory"])
    parser.add_argument("--rate", type=float, default=7e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.report:
        report()
    else:
        train(options.game, options.black, options.seed, options.steps, options.rate, options.kind)


if __name__ == "__main__":
    main()
