"""Whether a rank can tell from its own gradients how much of them is noise: `python results/mixing/own_noise.py`.

Trains 2 simulated ranks of paired gossip on MinAtar (7e-4, momentum 0.5), and prints the mean correlation of normalised
gradients, g / sqrt(v) on 4096 parameters: of the two ranks' newest, and of a rank's with its own some updates before.
Appends a line for each training to `own_noise.jsonl`. Half a minute each.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

from pala.system.resources import prepare

FOLDER = Path(__file__).resolve().parent
GAMES, SEEDS = ("breakout", "space_invaders"), (1, 2, 3)
LAGS = (1, 4, 16, 64)  # updates
_SAMPLE = 4096


def correlations(game: str, seed: int) -> dict[str, Any]:
    """Of one training, over all of its updates."""
    import torch
    from minatar_bed import Job, train

    import pala.a2c.update as update

    ranks: dict[int, deque[torch.Tensor]] = {}  # by where its parameters are: its newest normalised gradients
    sums: Counter[str] = Counter()
    step = update.rmsprop_

    def watched(parameters: torch.Tensor, gradient: torch.Tensor, mean_square: torch.Tensor, *rest: Any) -> None:
        step(parameters, gradient, mean_square, *rest)
        index = torch.randint(len(gradient), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
        now = gradient[index] / (mean_square[index].sqrt() + 1e-5)
        own = ranks.setdefault(parameters.data_ptr(), deque(maxlen=max(LAGS)))
        others = [before[-1] for rank, before in ranks.items() if rank != parameters.data_ptr() and before]
        pairs = {"ranks": others} | {f"own {lag}": [own[-lag]] for lag in LAGS if lag <= len(own)}
        for name, before in pairs.items():
            for other in before:
                sums[name] += float(now @ other)
                sums[f"size {name}"] += float(now.norm() * other.norm())
        own.append(now)

    update.rmsprop_ = watched
    try:
        height = train(Job(game, 2, "paired", 1, seed, 0.5, 0.8))["mean_height"]
    finally:
        update.rmsprop_ = step
    found = {name: round(sums[name] / sums[f"size {name}"], 4) for name in ("ranks", *(f"own {lag}" for lag in LAGS))}
    return {"game": game, "seed": seed, "mean_height": height, "correlations": found}


def main() -> None:
    """See the top."""
    from minatar_bed import _commit

    commit = _commit()
    for game in GAMES:
        for seed in SEEDS:
            line = correlations(game, seed) | {"commit": commit}
            print(line, flush=True)
            with open(FOLDER / "own_noise.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    prepare(1)
    main()
