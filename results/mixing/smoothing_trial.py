"""A trial: does a gradient that is averaged over a rank's last updates, before RMSprop, help the paired exchange?

    python results/mixing/smoothing_trial.py

RMSprop divides by the root mean square of what it is given. Given one rank's gradient, that is mostly noise; given the
mean of 16 ranks', as synchronous A2C has it, the noise is a fourth of that. Here a rank gives it g' = smoothing g' +
(1 - smoothing) g, so over its own last updates it averages what synchronous A2C averages over ranks; the price is that
what it steps by is older. 16 ranks on the bed of `minatar_bed.py`; each training adds a line to
`smoothing_trial.jsonl`. Expected: with 0.9375 = 1 - 1/16, `paired` comes nearer to synchronous A2C than by momentum
alone (0.80 on Breakout, 0.67 on Space Invaders). It is refuted if it does not on both games. Not a part of PALA.
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

from minatar_bed import BASE_RATE, SWEPT, TOTAL_STEPS, make_bed

from pala.system.runtime import prepare

RAW = Path(__file__).with_suffix(".jsonl")
SETTINGS = (  # method, rate, smoothing, momentum, times the norm that gradients are clipped at
    ("paired", 2, 0.9375, 0.0, 1), ("paired", 2, 0.75, 0.0, 1), ("paired", 1, 0.9375, 0.0, 1),
    ("paired", 2, 0.75, 0.75, 1), ("paired", 2, 0.0, 0.75, 4), ("paired", 4, 0.75, 0.0, 1),
    ("allreduce", 1, 0.75, 0.0, 1), ("allreduce", 2, 0.75, 0.0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One training of 16 ranks."""

    game: str
    method: str
    rate: float  # times BASE_RATE
    smoothing: float
    momentum: float
    clip: float  # times the default
    seed: int


def train(trial: Trial) -> dict[str, Any]:
    """Run it; returns its line."""
    import torch

    from pala.a2c.update import A2C
    from pala.config import Config
    from pala.simulate import learn as simulate

    step = A2C.step

    def smoothed(a2c: Any, loss: Any, learning_rate: float) -> Any:
        gradient = a2c.flat.gradient
        if not hasattr(a2c, "smooth"):
            a2c.smooth = torch.zeros_like(gradient)
        a2c.smooth.mul_(trial.smoothing).add_(gradient, alpha=1 - trial.smoothing)
        gradient.copy_(a2c.smooth)
        return step(a2c, loss, learning_rate)

    torch.set_num_threads(1)
    A2C.step = smoothed  # type: ignore[method-assign]
    config = Config(total_steps=TOTAL_STEPS, seed=trial.seed)
    own = {
        "learning_rate": trial.rate * BASE_RATE, "momentum": trial.momentum,
        "max_gradient_norm": trial.clip * config.a2c.max_gradient_norm,
    }  # fmt: skip
    config = replace(config, a2c=replace(config.a2c, **own))
    learned = simulate.learn(trial.method, config, simulate.Conditions(16), partial(make_bed, game=trial.game))
    divergence = sum(learned.divergences) / len(learned.divergences)
    curve = [round(height, 3) for height in learned.curve(50, TOTAL_STEPS)]
    return asdict(trial) | {
        "mean_height": learned.mean_height(TOTAL_STEPS), "curve": curve, "divergence": divergence
    }  # fmt: skip


def main() -> None:
    """See the top."""
    trials = [Trial(game, *setting, seed) for seed in (1, 2) for setting in SETTINGS for game in SWEPT]
    done = [json.loads(line) for line in RAW.read_text().splitlines()] if RAW.exists() else []
    made = {tuple(line[key] for key in asdict(trials[0])) for line in done}
    trials = [trial for trial in trials if tuple(asdict(trial).values()) not in made]
    processes = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(processes, prepare, (1,), maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(train, trials):
            with open(RAW, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print({key: line[key] for key in (*asdict(trials[0]), "mean_height", "divergence")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
