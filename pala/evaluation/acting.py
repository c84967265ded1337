"""The choice of a run's policy, how it acts, and by which settings, for evaluations and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pala.algorithms import ALGORITHMS
from pala.config import Config, facts_of, from_table, to_table
from pala.run import run_folder
from pala.system.errors import PalaError

_MAY_DIFFER = (key.split(".") for key, facts in facts_of(Config).items() if facts.evaluation_may_differ)
OTHER_SETTINGS = {name: section for section, name in _MAY_DIFFER}
"""Settings that an evaluation may have otherwise than the run, and their sections."""


@dataclass(frozen=True)
class Acting:
    """The choice of a run's policy, and how it acts. Raises PalaError for numbers that cannot be."""

    greedy: bool = False
    """The most probable action instead of a sampled one; of Gorila never a random one."""
    seed: int = 0
    """Seed of the environments and of sampled actions."""
    threads: int = 1
    """Threads of torch and Atari."""
    trust_run: bool = False
    """Run the code that the run names though it came from elsewhere."""
    best: bool = False
    """Take the best policy that was kept during training, not the final one."""
    other_settings: Mapping[str, float] = field(default_factory=dict)
    """Settings in place of the run's own: `OTHER_SETTINGS`."""

    def __post_init__(self) -> None:
        check_numbers(seed=(self.seed, 0), threads=(self.threads, 1))

    def config_of(self, run: Path) -> Config:
        """Return the run's settings, with those that are others here. Raises PalaError."""
        record = run_folder.read(run)
        config = run_folder.config_of(run, record)
        own_env = run_folder.from_python(record["segments"][-1]).environment
        table = to_table(config)
        if self.greedy and self.other_settings.get("epsilon"):
            raise PalaError("'epsilon' is the probability of a random action, and greedy actions never are; give one.")
        for name, value in self.other_settings.items():
            if name not in OTHER_SETTINGS:
                known = ", ".join(OTHER_SETTINGS)
                raise PalaError(f"An evaluation has no setting '{name}' of its own; there are {known}.")
            section = OTHER_SETTINGS[name]
            if section == "env" and config.env.is_atari and own_env:
                raise PalaError(
                    f"'{name}' is of PALA's own Atari games, and run '{run}' plays an environment made in Python."
                )
            explores = ALGORITHMS[config.algorithm].epsilon(config) is not None
            if not (config.env.is_atari if section == "env" else explores):
                raise PalaError(
                    f"'{name}' is of {'Atari games' if section == 'env' else 'Gorila'} only, and run '{run}' is none."
                )
            table[section][name] = value
        return from_table(table, source="Evaluation") if self.other_settings else config


def check_numbers(**values: tuple[int, int]) -> None:
    """Raise PalaError for a named (value, least value) that is too small."""
    for name, (value, least) in values.items():
        if value < least:
            raise PalaError(f"'{name}' is {value} but must be at least {least}.")
