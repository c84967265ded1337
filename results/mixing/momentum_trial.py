"""A trial: does a longer step of the mean, without a longer step of the policies that act, help the paired exchange?

    python results/mixing/momentum_trial.py

Quasi-global momentum (Lin et al., "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
Data", 2021, arXiv 2102.04761): each rank keeps a running mean m of how its mixed model moves from update to update,
with decay `smoothing`, and moves by `momentum` m beside its own step. In the mean this lengthens steps by 1 / (1 -
momentum); the noise of a single rank's step, which others do not have, it lengthens hardly at all. 16 ranks on the bed
of `minatar_bed.py`; each training adds a line to `momentum_trial.jsonl`. Not a part of PALA.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from minatar_bed import BASE_RATE, TOTAL_STEPS, make_bed

from pala.system.runtime import prepare

VARIANTS = (("paired", 1, 0.75), ("paired", 2, 0.75), ("paired", 4, 0.0), ("allreduce", 2, 0.0))
MORE = (
    ("paired", 1, 0.9, 0.8),
    ("paired", 2, 0.9, 0.8),
    ("paired", 2, 0.75, 0.9),
    ("uniform", 2, 0.75, 0.8),
)  # one seed
RAW = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Trial:
    """One training of 16 ranks."""

    game: str
    method: str
    rate: float  # times BASE_RATE
    seed: int
    momentum: float = 0.0
    smoothing: float = 0.8


def train(trial: Trial) -> dict[str, Any]:
    """Run it; returns its line."""
    import torch

    from pala.config import Config
    from pala.simulate import learn as simulate

    class WithMomentum(simulate.Learners):
        """As above."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.means = [torch.zeros_like(self.beginning) for _ in self.ranks]
            self.before = [self.beginning.clone() for _ in self.ranks]

        def update(self, number: int, parameters: torch.Tensor) -> None:
            mean = self.means[number]
            mean.mul_(trial.smoothing).add_(parameters - self.before[number], alpha=1 - trial.smoothing)
            self.before[number] = parameters.clone()
            super().update(number, parameters)
            parameters.add_(mean, alpha=trial.momentum)
            self.own_steps.add_(mean, alpha=trial.momentum)

    torch.set_num_threads(1)
    if trial.momentum:
        simulate.Learners = WithMomentum  # type: ignore[misc]
    config = Config(total_steps=TOTAL_STEPS, seed=trial.seed)
    config = replace(config, a2c=replace(config.a2c, learning_rate=trial.rate * BASE_RATE))
    learned = simulate.learn(trial.method, config, simulate.Conditions(16), partial(make_bed, game=trial.game))
    divergence = sum(learned.divergences) / len(learned.divergences)
    curve = [round(height, 3) for height in learned.curve(50, TOTAL_STEPS)]
    height = learned.mean_height(TOTAL_STEPS)
    return asdict(trial) | {"mean_height": height, "curve": curve, "divergence": divergence}


def main() -> None:
    """See the top."""
    trials = [
        Trial(game, method, rate, seed, momentum)
        for seed in (1, 2, 3)
        for game in ("breakout", "space_invaders")
        for method, rate, momentum in (
            ("paired", 1, 0.75),
            ("paired", 2, 0.75),
            ("paired", 4, 0.0),
            ("allreduce", 2, 0.0),
        )
    ]
    trials += [
        Trial(game, method, rate, 1, momentum, smoothing)
        for method, rate, momentum, smoothing in MORE
        for game in ("breakout", "space_invaders")
    ]
    done = [json.loads(line) for line in RAW.read_text().splitlines()] if RAW.exists() else []
    made = {tuple(line[key] for key in asdict(trials[0])) for line in done}
    trials = [trial for trial in trials if tuple(asdict(trial).values()) not in made]
    processes = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(processes, prepare, (1,), maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(train, trials):
            with open(RAW, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print({key: line[key] for key in (*asdict(trials[0]), "mean_height")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
