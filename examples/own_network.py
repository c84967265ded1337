"""Train a network of your own, and stop as soon as it is good: `python examples/own_network.py`."""

from __future__ import annotations

import sys

import gymnasium
from torch import nn

import pala
from pala.config import EnvConfig

GOOD_RETURN = 150.0


class Residual(nn.Module):
    """features -> features, by a step that begins small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, features):
        return features + self.step(features)


class MyNetwork(nn.Module):
    """A trunk, and a linear head for each of `num_outputs`: what the actions are drawn by, and the value."""

    def __init__(self, observation_space: gymnasium.Space, num_outputs: tuple[int, ...], width: int = 64) -> None:
        super().__init__()
        (inputs,) = observation_space.shape
        self.trunk = nn.Sequential(nn.Linear(inputs, width), Residual(width), Residual(width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for outputs in num_outputs)


def until_good(moment: pala.Moment) -> bool:
    """False, which ends training on all ranks, once this rank's episodes of an interval are good."""
    return moment.mean_return is None or moment.mean_return < GOOD_RETURN


def main(total_steps: int) -> None:
    """Train at most so many steps."""
    config = pala.Config(total_steps=total_steps, env=EnvConfig("CartPole-v1"))
    result = pala.fit(config, make_network=MyNetwork, on_interval=until_good)
    if result.leads:
        why = result.stopped_early or ("the whole budget" if result.status == "completed" else "stopped by a signal")
        print(f"{result.global_steps:,} steps; {why}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300_000)
