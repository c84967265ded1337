"""Taxi with and without its action masks, and a million steps of an environment that raises at a masked action.

python results/masks/taxi.py masks 1 2 3 4 5         # seeds; appends to results/masks/taxi.jsonl
python results/masks/taxi.py none 1 2 3 4 5
python results/masks/taxi.py million                 # exit status 0: no masked action was taken
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch

import pala
from pala.config import A2CConfig, Config, EnvConfig, EvaluationConfig, NetworkConfig, RunConfig
from pala.run import run_folder

HERE = Path(__file__).resolve().parent
ID = "Taxi-v4"
STEPS = 100_000
INTERVAL = 10_000  # steps of one number of a curve


class WithoutMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Leaves the infos out."""

    def reset(self, **arguments: Any) -> Any:
        return self.env.reset(**arguments)[0], {}

    def step(self, action: Any) -> Any:
        return *self.env.step(action)[:4], {}


def taxi() -> gymnasium.Env:
    """Make the game."""
    return gymnasium.make(ID)


def taxi_without() -> gymnasium.Env:
    """Make the game without masks."""
    return WithoutMasks(gymnasium.make(ID))


def curve_of(run: Path) -> list[float | None]:
    """Mean return of the training episodes that ended in each interval."""
    ended: list[list[float]] = [[] for _ in range(STEPS // INTERVAL)]
    for line in (run / "metrics" / "rank-0000.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "episode":
            ended[min(record["local_steps"] - 1, STEPS - 1) // INTERVAL].append(record["return"])
    return [round(sum(returns) / len(returns), 1) if returns else None for returns in ended]


def train(variant: str, seed: int, folder: str) -> None:
    """Train and evaluate once, and append the figures."""
    config = Config(
        total_steps=STEPS, seed=seed, env=EnvConfig(ID), a2c=A2CConfig(learning_rate=2e-3),
        run=RunConfig(dir=folder, name=f"{variant}-{seed}", console="none", threads=1, tensorboard=False),
        evaluation=EvaluationConfig(episodes=100),
    )  # fmt: skip
    begin = time.perf_counter()
    result = pala.fit(config, make_env=taxi if variant == "masks" else taxi_without)
    assert result.evaluation is not None
    record = {
        "command": f"python results/masks/taxi.py {variant} {seed}",
        "commit": run_folder.read(result.run)["segments"][-1]["git_commit"],
        "versions": {
            "gymnasium": gymnasium.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "variant": variant,
        "seed": seed,
        "steps": result.global_steps,
        "mean_return": result.evaluation.mean_return,
        "returns": result.evaluation.returns,
        "curve": curve_of(result.run),
        "took_s": round(time.perf_counter() - begin),
    }
    with (HERE / "taxi.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


class Strict(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises at a masked action, and counts the others."""

    steps = 0

    def reset(self, **arguments: Any) -> Any:
        observation, info = self.env.reset(**arguments)
        self._mask = info["action_mask"]
        return observation, info

    def step(self, action: Any) -> Any:
        if not self._mask[action]:
            raise RuntimeError(f"action {action} is not in {self._mask}")
        type(self).steps += 1
        *outcome, info = self.env.step(action)
        self._mask = info["action_mask"]
        return *outcome, info


def million(folder: str) -> None:
    """Train for a million steps, each of which is checked."""
    config = Config(
        total_steps=1_000_000, env=EnvConfig(ID, num_envs=64, restarts=0), network=NetworkConfig(mlp_hidden=(16,)),
        run=RunConfig(dir=folder, name="million", console="none", threads=1, tensorboard=False),
        evaluation=EvaluationConfig(episodes=0),
    )  # fmt: skip
    assert pala.fit(config, make_env=lambda: Strict(taxi())).status == "completed"
    print(f"{Strict.steps:,} steps, no masked action")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "million":
            million(folder)
        for seed in map(int, sys.argv[2:]):
            train(sys.argv[1], seed, folder)
