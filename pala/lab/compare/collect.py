"""Runs that are there: copies of them in the results, their place in a comparison, and what a planned one still lacks.

A copy holds what a report needs, wherever the run was made, and no path of the machine except those that say what is
played.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pala.algorithms import ALGORITHMS
from pala.config import Config, ExchangeConfig
from pala.config.influence import differences, phrase
from pala.evaluation.record import final_evaluation
from pala.lab.compare.measures import Run
from pala.lab.compare.plan import Cell, Plan, Planned
from pala.report import runs
from pala.report.runs import config_as_computed, published
from pala.run import run_folder
from pala.run.metrics import metrics_files
from pala.system.errors import PalaError, reason
from pala.system.files import json_text, open_to_read, refuse_links, write_atomically

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
            v not in plan.variants or ranks not in plan.variants[v].ranks,
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


# ---- what a run is, and lacks ----------------------------------------------------------------------------------------


class Status(NamedTuple):
    """A run that is there, seen from one that is planned; see `Made.status`."""

    what: str
    setting: str = ""
    found: object = None
    asked: object = None


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
    def last(self) -> dict[str, Any]:
        """The record of the newest start."""
        return dict(self.record["segments"][-1])

    def may_be(self, planned: Planned) -> bool:
        """Return whether a copy's name allows that it is the planned run: any does that the comparison gives to no
        other variant."""
        own = self.config.run.name
        return planned.config.run.name in (self.folder.name, own) or own not in planned.others

    def status(self, planned: Planned) -> Status:
        """Return what the run is to the planned one, by its settings, whatever its name.

        | status | the run |
        |---|---|
        | `other` | learned or was scored otherwise: `setting` is `found`, not as `asked` |
        | `longer` | is the planned one with a larger budget |
        | `resume` | has not completed, was ended early by a callback, or has a smaller budget |
        | `evaluate` | lacks an evaluation of as many episodes, in the same way |
        | `complete` | is all that is wanted |
        """
        config, wanted = self.config, planned.config
        for setting, found, asked in self._differences(planned):
            if found != asked:
                return Status("other", setting, found, asked)
        if config.total_steps > wanted.total_steps:
            return Status("longer", "total_steps", config.total_steps, wanted.total_steps)
        is_whole = self.record["completed"] and not self.last.get("stopped_early")
        if not is_whole or config.total_steps < wanted.total_steps:
            return Status("resume")
        evaluation, asked_for = final_evaluation(self.folder, self.record), wanted.evaluation
        is_as_wanted = (
            evaluation is not None
            and evaluation["episodes"] >= asked_for.episodes
            and evaluation.get("greedy", False) == asked_for.greedy
        )
        return Status("complete" if is_as_wanted or not asked_for.episodes else "evaluate")

    def _differences(self, planned: Planned) -> Iterator[tuple[str, object, object]]:
        """Yield settings that make a run another than the planned one if they differ, what takes least time first."""
        config, wanted, own = self.config, planned.config, run_folder.from_python(self.last)
        yield "seed", config.seed, wanted.seed
        yield "ranks", self.last.get("ranks"), planned.cell.ranks
        yield "env.id", "from Python" if own.environment else config.env.id, wanted.env.id
        yield "network", "from Python" if own.network else "PALA's", "PALA's"
        for key, (found, asked) in differences(config, wanted).items():
            yield key, found, asked
        for key in _scored_by(wanted) if wanted.evaluation.episodes else ():
            yield f"evaluation.{key}", getattr(config.evaluation, key), getattr(wanted.evaluation, key)


def _scored_by(config: Config) -> list[str]:
    """Return the settings of `evaluation` by which `pala evaluate` scores a run, unless it makes no result of it."""
    explores = ALGORITHMS[config.algorithm].epsilon(config) is not None
    is_read = {"epsilon": explores, "max_episode_steps": not config.env.is_atari}
    return [key for key, holds in is_read.items() if holds]


def made_in(results: Path) -> list[Made]:
    """Read the copies of runs in a folder of results. Raises PalaError if one is damaged."""
    return [Made.read(copy) for copy in copies_in(results)]
