"""Runs that are there: copies of them in the results, their place in a comparison, and what a planned one still lacks.

A copy holds what a report needs, wherever the run was made, and no path of the machine except those that say what is
played. Two runs are the same training if their fingerprints are equal. It is made of the settings, which every run.json
has, whenever it is asked for: one that was kept there would be another as soon as PALA got a new setting.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pala.algorithms import ALGORITHMS
from pala.config import Config, ExchangeConfig, to_table
from pala.config.facts import facts_of
from pala.config.influence import differences, follows_budget, phrase, settings_that_matter
from pala.evaluation.record import final_evaluation
from pala.lab.compare.measures import Run
from pala.lab.compare.plan import Cell, Plan, Planned
from pala.report import runs
from pala.report.runs import config_as_computed, published
from pala.run import run_folder
from pala.run.metrics import metrics_files
from pala.system.errors import PalaError, reason
from pala.system.files import json_text, open_to_read, refuse_links, write_atomically
from pala.system.tables import flatten

_QUOTED = re.compile(r"""(?<=(["']))/(?:[^"'/]+/)*(?=[^"'/]+\1)""")  # blanks and all
_ABSOLUTE = re.compile(r"(?<![\w./:])/(?:(?:[\w.+@~-]|[=,](?!/)|\\u[0-9a-f]{4})+/)*(?=[\w.\\])")

_EVALUATIONS = ("evaluation.json", "evaluations.jsonl")


def keep(run: Path, folder: Path) -> None:
    """Copy of a run what a report needs into `folder`, beside copies of other runs of the same name. An earlier copy of
    the same run is replaced, but not a completed one by one that is not. Raises PalaError."""
    begun = _begun(run)
    refuse_links(run)  # results are published
    name = Path(os.path.abspath(run)).name  # noqa: PTH100  also of ".", and a link's own
    number, copy = 1, folder / name
    earlier = {path.name: path for path in _all_copies(folder.parent, folder)}
    while copy.name in earlier and _begun(earlier[copy.name]) != begun:
        number += 1
        copy = folder / f"{name}-{number}"
    if copy.resolve() == run.resolve() or (copy.name in earlier and _progress(earlier[copy.name]) > _progress(run)):
        return
    try:
        record = _bytes_of(run / "run.json")  # first: what it calls completed has all its metrics
        if copy.exists():
            refuse_links(copy)
        (copy / "metrics").mkdir(parents=True, exist_ok=True)
        for file in metrics_files(run):
            data = _bytes_of(file)
            packed = data if file.suffix == ".gz" else gzip.compress(data, mtime=0)
            _write(copy / "metrics" / f"{file.name.removesuffix('.gz')}.gz", packed)
        for name in _EVALUATIONS:
            if (run / name).exists():
                _write(copy / name, without_paths(_bytes_of(run / name).decode(errors="replace")).encode())
        _write(copy / "run.json", _without_paths_but_settings(record.decode(errors="replace")).encode())
    except OSError as error:
        raise PalaError(f"Run '{run}' cannot be copied to '{copy}': {reason(error)}.") from None


def copies_in(results: Path) -> list[Path]:
    """Return the copies of runs in a folder of results, by name: of its archive, and of `runs/`. Those trained with
    settings that are gone are left out: none of today's variants is theirs. Raises PalaError."""
    copies = _all_copies(results, results / "runs")
    return [run for run in copies if not run_folder.gone_settings(run_folder.read(run))]


def left_out_of(results: Path) -> list[str]:
    """Return the names of the copies that `copies_in` leaves out. Raises PalaError."""
    kept = set(copies_in(results))
    return [run.name for run in _all_copies(results, results / "runs") if run not in kept]


def _all_copies(results: Path, folder: Path) -> list[Path]:
    found = (*published(results), *folder.glob("*"))
    copies = {run.name: run for run in found if (run / "run.json").exists()}
    return [copies[name] for name in sorted(copies)]


def _bytes_of(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read()


def _write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomically(path, data)


def without_paths(text: str) -> str:
    """Return text with absolute paths cut to their last names: what is published should not tell of a machine's
    folders."""
    return _ABSOLUTE.sub("", _QUOTED.sub("", text))


def _without_paths_but_settings(record: str) -> str:
    """Return run.json without paths, except in settings: one that holds a path, as an argument of an environment,
    decides what the run is taken for."""
    clean = json.loads(without_paths(record))
    settings = json.loads(record)["config"]
    settings.setdefault("run", {})["dir"] = clean["config"].get("run", {}).get("dir", "")
    return json_text(clean | {"config": settings}, indent=2) + "\n"  # as `RunRecord` writes it


def _begun(run: Path) -> Any:
    """Return what tells a run from all others."""
    first = run_folder.read(run)["segments"][0]
    # Of a sweep, several runs may begin in the same second. As text, of which paths are left out in copies.
    command = without_paths(json_text(first.get("command")))
    return first["started"], first.get("hosts"), run_folder.config_of(run).seed, command


def _progress(run: Path) -> tuple[bool, int]:
    record = run_folder.read(run)
    return record["completed"], len(record["segments"])


def load(folder: Path, plan: Plan) -> Run:
    """Return a run and the place in the comparison that its own record gives it. Raises PalaError."""
    run, ranks = runs.read(folder)
    if run.record["completed"] and "global_steps" not in run.last:
        raise PalaError(f"'{folder / 'run.json'}' is of a completed run, but its last segment has no 'global_steps'.")
    order = np.lexsort((run.returns, run.steps, run.time_s))
    in_order = {"steps": run.steps[order], "time_s": run.time_s[order], "returns": run.returns[order]}
    return Run(**vars(run) | in_order, cell=_cell_of(run.config, run.last, plan, folder), ranks=ranks)


def _cell_of(config: Config, segment: dict[str, Any], plan: Plan, source: Path) -> Cell:
    """Return the cell of the variant: of those with the run's method, the one from which it differs in the fewest
    settings. Of several such the one that gives its run of this seed the same name (variants may differ in what does
    not decide how a run learns, as threads), then one that has runs with as many ranks, then one with the same budget.
    Settings that differ even so become part of the name, so that runs which are not alike are not mixed. `source`: the
    run's folder."""
    game = plan.game_of(config, source)
    method = config.exchange_kind.name
    ranks = segment.get("ranks", 1)
    wanted = {variant: plan.config_of(Cell(variant, game, ranks)) for variant in plan.preset.variants}
    alike = {variant: settings for variant, settings in wanted.items() if settings.exchange_kind.name == method}
    if not alike:
        other = next(iter(wanted.values()))
        exchange = ExchangeConfig(config.exchange.kind)
        alike = {method: replace(other, algorithm=config.algorithm, exchange=exchange, gorila=config.gorila)}
    differing = {variant: differences(config, settings) for variant, settings in alike.items()}
    variant = min(
        alike,
        key=lambda v: (
            len(differing[v]),
            Cell(v, game, ranks).run_name(config.seed) not in (config.run.name, source.name),
            ranks not in plan.ranks_of(v),
            alike[v].total_steps != config.total_steps,
        ),
    )
    phrases = [phrase(key, found) for key, (found, _) in differing[variant].items()]
    own = run_folder.from_python(segment)
    if own.network:
        phrases.append(f"network from Python, {segment.get('parameters', 0):,} parameters")
    if own.environment:
        phrases.append("environment from Python")  # it may be another than Gymnasium's or PALA's of that id
    return Cell(f"{variant} ({', '.join(phrases)})" if phrases else variant, game, ranks)


_BESIDE = ("network.precision", "total_steps")  # a plan may take any precision; a run with more steps continues


# ---- what a run is, and lacks ----------------------------------------------------------------------------------------


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
