"""`pala simulate progress`: how much of what the ranks learn their exchange leaves them.

Every update adds 1 to a rank's model, and nothing else happens. If nothing is taken back, the mean of all models ends
at the mean number of updates. *Kept* is the share of that at which it does end; *apart* is how far the ranks are from
each other at the end, in updates (standard deviation). Synchronous A2C and independent learners keep 1 by construction.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from pala.config.catalogue import RULES
from pala.lab.simulate.scenario import Scenario, timed_in_updates
from pala.lab.simulate.virtual_cluster import VirtualCluster
from pala.report.page import Column, table
from pala.system.command_line import check_choices, read_command
from pala.system.errors import PalaError
from pala.system.output import print_result

_PROGRAM = "pala simulate progress"
_SLOWNESS = (1.0, 4.0)  # factors by which the first rank is slower
_UPDATES = 200  # of a rank, on average


@dataclass(frozen=True)
class Command:
    """Measure how much progress each mixing rule keeps, over ranks, delays and stragglers."""

    mixings: tuple[str, ...] = tuple(RULES)
    """Mixing rules: uniform, push_sum, paired."""
    ranks: tuple[int, ...] = (2, 4, 16, 64)
    """Numbers of ranks."""
    delays: tuple[float, ...] = (0.05, 1.0, 3.0, 10.0)
    """Times that a model is under way, in updates."""
    seed: int = 1
    """Seed of all delays."""


@dataclass(frozen=True)
class Progress:
    """The state after all updates."""

    kept: float
    apart_updates: float
    models_an_update: float


_Row = tuple[int, float, float, str, Progress]
_COLUMNS: list[Column[_Row]] = [
    Column("ranks", lambda row: row[0]),
    Column("delay, updates", lambda row: row[1], "g"),
    Column("slowest rank", lambda row: row[2], "g"),
    Column("mixing", lambda row: row[3]),
    Column("kept", lambda row: row[4].kept, ".2f"),
    Column("apart, updates", lambda row: row[4].apart_updates, ".2f"),
    Column("models an update", lambda row: row[4].models_an_update, ".2f"),
]


def measure(mixing: str, ranks: int, delay: float, slowness: float, seed: int) -> Progress:
    """Play the updates of all ranks, and return what the mixing left of them."""
    scenario = Scenario(
        ranks,
        mixing=mixing,
        budget_steps=ranks * _UPDATES,
        seed=seed,
        slowness=() if slowness == 1 else (slowness, *[1.0] * (ranks - 1)),
    )
    made = np.zeros(ranks)

    def learn(rank: int, model: np.ndarray) -> None:
        model += 1
        made[rank] += 1

    cluster = VirtualCluster(timed_in_updates(scenario, delay), np.zeros((ranks, 1)), learn)
    cluster.run()
    kept = float(cluster.mean_model[0]) / float(made.mean())
    models = [float(rank.model[0]) for rank in cluster.ranks]
    return Progress(kept, float(np.std(models)), cluster.models_sent / float(made.sum()))


def run(arguments: list[str]) -> None:
    """Do what `pala simulate progress` does. Raises PalaError."""
    command = read_command(_PROGRAM, arguments, Command())
    check_choices("mixings", command.mixings, RULES)
    if not all(map(math.isfinite, command.delays)) or min(command.ranks) < 2 or min(command.delays) < 0:
        raise PalaError("'--ranks' must be at least 2, and '--delays' 0 and finite.")
    rows = []
    for ranks, delay, slowness in itertools.product(command.ranks, command.delays, _SLOWNESS):
        for mixing in command.mixings:
            found = measure(mixing, ranks, delay, slowness, command.seed)
            rows.append((ranks, delay, slowness, mixing, found))
    print_result(table(_COLUMNS, rows))
