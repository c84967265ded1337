"""Trainings of simulated ranks on MinAtar (Young & Tian 2019, arXiv 1903.03176), many at a time; goes on where it was
interrupted.

    pip install minatar==1.0.15
    python results/mixing/minatar_bed.py sweep          which rate is best for each method
    python results/mixing/minatar_bed.py final          each method at its best rate, with fresh seeds
    python results/mixing/minatar_bed.py delays         paired under delays, and with a slow rank

Each training adds a line to `minatar.jsonl` beside this file. `minatar_report.py` makes the page of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pala.system.runtime import prepare

FOLDER = Path(__file__).resolve().parent
GAMES = ("breakout", "space_invaders", "asterix")
METHODS = ("allreduce", "uniform", "paired")
BASE_RATE = 7e-4
TOTAL_STEPS = 500_000


class Job(NamedTuple):
    """One training."""

    game: str
    ranks: int
    method: str
    rate: float  # times BASE_RATE
    seed: int
    delay: float = 0.05
    slow_ranks: int = 0


def make_bed(env_config: Any, game: str) -> Any:
    """A rank's environments, without gymnasium's per-environment layers: MinAtar is faster than they are."""
    import gymnasium
    import numpy as np
    from minatar import Environment

    from pala.envs import Envs

    class MinAtarVector(gymnasium.vector.VectorEnv):
        """Observations are float32 [10 * 10 * channels]; sticky actions with probability 0.1, as is usual."""

        def __init__(self, num_envs: int) -> None:
            self.games = [Environment(game) for _ in range(num_envs)]
            size = int(np.prod(self.games[0].state_shape()))
            self.num_envs = num_envs
            self.single_observation_space = gymnasium.spaces.Box(0.0, 1.0, (size,), np.float32)
            self.actions = self.games[0].minimal_action_set()
            self.single_action_space = gymnasium.spaces.Discrete(len(self.actions))

        def _look(self):
            return np.stack([game.state().reshape(-1) for game in self.games]).astype(np.float32)

        def reset(self, *, seed=None, options=None):
            for number, game_ in zip(seed, self.games, strict=True):
                game_.seed(int(number))
                game_.reset()
            return self._look(), {}

        def step(self, actions):
            rewards, terminated = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
            for i, (action, game_) in enumerate(zip(actions, self.games, strict=True)):
                rewards[i], terminated[i] = game_.act(self.actions[action])
                if terminated[i]:
                    game_.reset()
            return self._look(), rewards, terminated, np.zeros(self.num_envs, bool), {}

    return Envs(MinAtarVector(env_config.num_envs), clip_rewards=False)


def train(job: Job) -> dict[str, Any]:
    """Run it; returns its line."""
    from dataclasses import replace
    from functools import partial

    import torch

    from pala.config import Config
    from pala.simulate.learn import Conditions, learn

    torch.set_num_threads(1)
    config = Config(total_steps=TOTAL_STEPS, seed=job.seed)
    config = replace(config, a2c=replace(config.a2c, learning_rate=job.rate * BASE_RATE))
    conditions = Conditions(job.ranks, job.delay, job.slow_ranks)
    try:
        learned = learn(job.method, config, conditions, partial(make_bed, game=job.game))
    except Exception as error:  # a rate that is too high is a result
        return job._asdict() | {"failed": str(error)}
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    return job._asdict() | {
        "mean_height": learned.mean_height(TOTAL_STEPS),
        "curve": [round(height, 3) for height in learned.curve(50, TOTAL_STEPS)],
        "progress_kept": learned.progress_kept,
        "distance": mean(learned.distances),
        "divergence": mean(learned.divergences),
        "time_updates": learned.time_updates,
        "models_an_update": learned.models_sent / sum(learned.updates),
    }


def read() -> dict[Job, dict[str, Any]]:
    """What is there already."""
    path = FOLDER / "minatar.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Job(**{key: line[key] for key in Job._fields}): line for line in lines}


def best_rates(results: dict[Job, dict[str, Any]]) -> dict[tuple[str, int, str], float]:
    """By game, ranks and method: the rate with the greatest mean height over the sweep's seeds."""
    heights: dict[tuple[str, int, str], dict[float, list[float]]] = {}
    for job, line in results.items():
        if job.seed < 100 and (job.delay, job.slow_ranks) == (0.05, 0):
            key = job.game, job.ranks, job.method
            heights.setdefault(key, {}).setdefault(job.rate, []).append(line.get("mean_height", float("-inf")))
    return {key: max(rates, key=lambda rate: sum(rates[rate]) / len(rates[rate])) for key, rates in heights.items()}


def jobs_of(stage: str, games: list[str], ranks: list[int], seeds: int) -> list[Job]:
    """The trainings of a stage; those of the later stages need the sweep."""
    if stage == "sweep":
        rates = {2: (1, 2, 4, 8), 4: (1, 2, 4, 8), 8: (2, 4, 8, 16), 16: (2, 4, 8, 16)}
        return [
            Job(game, n, method, rate, seed)
            for seed, n, game in itertools.product(range(1, seeds + 1), ranks, games)
            for rate in rates[n]
            for method in METHODS
        ]
    best = best_rates(read())
    cells = [(game, n, method) for n, game, method in itertools.product(ranks, games, METHODS)]
    if stage == "final":
        return [Job(*cell, best[cell], seed) for seed in range(101, 101 + seeds) for cell in cells if cell in best]
    conditions = [(1.0, 0), (3.0, 0), (10.0, 0), (0.05, 1)]
    return [
        Job(*cell, best[cell], seed, delay, slow)
        for seed in range(101, 101 + seeds)
        for delay, slow in conditions
        for cell in cells
        if cell in best and cell[2] != "allreduce"
    ]


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("sweep", "final", "delays"))
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=GAMES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    done = read()
    jobs = [
        job for job in jobs_of(arguments.stage, arguments.games, arguments.ranks, arguments.seeds) if job not in done
    ]
    print(f"{len(jobs)} trainings", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare, (1,)) as pool:
        for line in pool.imap_unordered(train, jobs):
            with open(FOLDER / "minatar.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print({key: line.get(key) for key in (*Job._fields, "mean_height", "failed")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
