"""Runs that have been made: whether one is what a plan asks for, and what it still lacks.

Two runs are the same training if their fingerprints are equal. It is made of the settings, which every run.json has,
whenever it is asked for: one that was kept there would be another as soon as PALA got a new setting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pala.algorithms import ALGORITHMS
from pala.config import Config, to_table
from pala.config.facts import facts_of
from pala.config.influence import differences, follows_budget, settings_that_matter
from pala.evaluation.record import final_evaluation
from pala.lab.compare.plan import Planned
from pala.report.runs import config_as_computed
from pala.run import run_folder
from pala.system.files import json_text
from pala.system.tables import flatten

_BESIDE = ("network.precision", "total_steps")  # a plan may take any precision; a run with more steps goes on


def fingerprint(config: Config, ranks: int | None, own_environment: bool = False, own_network: bool = False) -> str:
    """Return a hash of all that decides how a run learns and is scored, its seed and its number of ranks too, except
    the precision, and the budget where no setting follows it."""
    facts, known = settings_that_matter(flatten(to_table(config))), facts_of(Config)
    decisive = {key: value for key, value in facts.items() if known[key].decides == "learning" and key not in _BESIDE}
    if follows_budget(config):
        decisive["total_steps"] = config.total_steps
    scored = [getattr(config.evaluation, key) for key in _scored_by(config)]
    text = json_text([sorted(decisive.items()), scored, ranks, own_environment, own_network])
    return hashlib.sha256(text.encode()).hexdigest()


def _scored_by(config: Config) -> list[str]:
    """Return the settings of `evaluation` by which `pala.evaluate` scores a run, unless it makes no result of it."""
    explores = ALGORITHMS[config.algorithm].epsilon(config) is not None
    is_read = {"epsilon": explores, "max_episode_steps": not config.env.is_atari}
    return [key for key, holds in is_read.items() if holds]


@dataclass(frozen=True)
class Made:
    """A run that is there, here or in the results."""

    folder: Path
    record: dict[str, Any]  # run.json
    config: Config  # with the precision that it computed in

    @classmethod
    def read(cls, folder: Path) -> Made:
        """Read a run's record. Raises PalaError."""
        record = run_folder.read(folder)
        return cls(folder, record, config_as_computed(folder, record))

    @property
    def ranks(self) -> int | None:
        """The number of ranks of its newest start."""
        ranks: int | None = self.record["segments"][-1].get("ranks")
        return ranks

    @property
    def fingerprint(self) -> str:
        """The hash that all runs of the same training have."""
        own = run_folder.from_python(self.record["segments"][-1])
        return fingerprint(self.config, self.ranks, own.environment, own.network)

    def is_longer_than(self, planned: Planned) -> bool:
        """Return whether a page that has this run leaves out the planned one, as the shorter of two."""
        made = self.record["segments"][-1].get("global_steps", 0)
        return bool(self.record["completed"]) and made > planned.config.total_steps

    def may_be(self, planned: Planned) -> bool:
        """Return whether the run is the planned one, if their fingerprints are equal: it may have another name, but
        not one that the comparison gives to another variant."""
        wanted, name = planned.config, self.config.run.name
        is_named = wanted.run.name in (self.folder.name, name) or name not in planned.others
        return is_named and wanted.network.precision in ("auto", self.config.network.precision)

    def lacks(self, planned: Planned) -> str:
        """Return what the run still needs: `resume`, `evaluate` or nothing."""
        ended_early = self.record["segments"][-1].get("stopped_early")  # by a callback
        if not self.record["completed"] or ended_early or self.config.total_steps < planned.config.total_steps:
            return "resume"
        evaluation, wanted = final_evaluation(self.folder, self.record), planned.config.evaluation
        if not wanted.episodes:
            return ""
        is_as_wanted = (
            evaluation is not None
            and evaluation["episodes"] >= wanted.episodes
            and evaluation.get("greedy", False) == wanted.greedy
        )
        return "" if is_as_wanted else "evaluate"

    def misfits(self, planned: Planned) -> dict[str, tuple[object, object]]:
        """Return the settings that the run was made with and the plan does not want -> both values."""
        wanted = planned.config
        differing: dict[str, tuple[object, object]] = dict(differences(self.config, wanted))
        if self.ranks != planned.cell.ranks:
            differing["ranks"] = (self.ranks, planned.cell.ranks)
        if self.config.total_steps > wanted.total_steps:
            differing["total_steps"] = (self.config.total_steps, wanted.total_steps)
        for key in _scored_by(wanted) if wanted.evaluation.episodes else ():
            found, asked = getattr(self.config.evaluation, key), getattr(wanted.evaluation, key)
            if found != asked:
                differing[f"evaluation.{key}"] = (found, asked)
        return differing


class Published:
    """The runs in a folder of results, each read once."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Read the runs in `folders`. Raises PalaError if one is damaged."""
        self._by_fingerprint: dict[str, list[Made]] = {}
        for made in map(Made.read, folders):
            self._by_fingerprint.setdefault(made.fingerprint, []).append(made)

    def of(self, planned: Planned) -> list[Made]:
        """Return the copies of a planned run, of any budget and whether or not they are complete."""
        found = self._by_fingerprint.get(fingerprint(planned.config, planned.cell.ranks), [])
        return [made for made in found if made.may_be(planned)]
