"""Runs that a plan asks for and that are not there yet: each a job of its own, one after the other, as the machine is
part of what is measured. What a run still needs is read from its record, never from a job's exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pala.config import load_preset
from pala.lab.compare.collect import Made, load, made_in
from pala.lab.compare.plan import Plan, Planned, options
from pala.run import run_folder
from pala.run.end_watch import EndWatch
from pala.run.lock import lock_folder
from pala.run.user_code import named_code
from pala.system.errors import PalaError
from pala.system.jobs import launcher_of, run_job
from pala.system.output import print_result
from pala.system.text import duration, short_number

_PATIENCE_S = 60.0  # for a job to write its checkpoints and end, after SIGUSR1
_VERBS = {"train": "starts", "resume": "continues", "evaluate": "is evaluated"}


@dataclass(frozen=True)
class Task:
    """The step that a planned run still needs."""

    run: Planned
    what: str  # of train, resume, evaluate
    words: list[str]  # the command, with `python` for the interpreter

    @property
    def command(self) -> list[str]:
        """The command, with this interpreter."""
        return [sys.executable if word == "python" else word for word in self.words]

    @property
    def arguments(self) -> list[str]:
        """Those of the program, without what starts it."""
        return self.words[self.words.index("-m") + 2 :]


class WrongRanksError(PalaError):
    """A run that a job has brought to another number of ranks: its own fault, and no reason to stop the others."""


@contextlib.contextmanager
def locked(runs: Iterable[Planned]) -> Iterator[None]:
    """Make these runs' folders, and keep other comparisons out of them. Raises PalaError if one works there."""
    with contextlib.ExitStack() as locks:
        for folder in sorted({run.folder.parent for run in runs}):
            folder.mkdir(parents=True, exist_ok=True)
            if (lock := lock_folder(folder)) is not None:  # None where there are no locks
                locks.enter_context(lock)
        yield


def task_of(planned: Planned, copies: Sequence[Made]) -> Task | None:
    """Return what a run needs; None if it is complete, here or among the `copies` of the results. Raises PalaError if
    it was made otherwise than the plan wants it."""
    if (planned.folder / "run.json").exists():
        return _rest_of(planned, Made.read(planned.folder))
    wanted = planned.config.total_steps
    statuses = [(copy, copy.status(planned).what) for copy in copies if copy.may_be(planned)]
    if any(status in ("complete", "evaluate") for _, status in statuses):
        return None
    for copy, status in statuses:
        if status == "longer" and copy.record["completed"] and copy.last.get("global_steps", 0) > wanted:
            raise PalaError(
                f"'{copy.folder}' is this run with 'total_steps' {copy.config.total_steps:,}, and the comparison now "
                f"asks for {wanted:,}: of two runs of a seed only the longer one is reported. Put the preset back, or "
                "give the comparison another 'name'."
            )
    over = load_preset(planned.game_preset)
    return _training(planned, "train", [planned.game_preset, *options(planned.config, over)])


def _rest_of(planned: Planned, made: Made) -> Task | None:
    """Return what a run needs that has begun in its own folder. Raises PalaError if it was made otherwise."""
    folder = made.folder
    run_folder.check_trains_as_before(folder, "compared")
    needs, setting, found, asked = made.status(planned)
    if setting == "ranks":
        raise WrongRanksError(
            f"Run '{folder}' last ran with {found} ranks, not {asked}, as where hosts fail; move it away to make it "
            "again."
        )
    if setting:
        raise PalaError(
            f"Run '{folder}' was made with '{setting}' {found!r}, but the comparison now asks for {asked!r}. Put the "
            "preset back, give the comparison another 'name', or move the run away."
        )
    trust = trust_of(planned)
    if needs == "resume":
        over = run_folder.config_of(folder, made.record)
        return _training(planned, needs, ["--resume", str(folder), *trust, *options(planned.config, over)])
    if needs == "evaluate":
        wanted = planned.config.evaluation
        numbers = {"episodes": wanted.episodes, "num-envs": wanted.num_envs, "seed": planned.config.seed}
        words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        greedy = "--greedy" if wanted.greedy else "--no-greedy"
        return Task(planned, needs, ["python", "-m", "pala", "evaluate", str(folder), *words, greedy, *trust])
    return None


def trust_of(planned: Planned) -> list[str]:
    """Return the option that lets a run continue which names code of the user's: the preset names it, too."""
    return ["--trust-run"] if named_code(planned.config) else []


def why_unfinished(task: Task) -> str:
    """Return a sentence on what a run still lacks."""
    if task.what == "train":
        return "It has not begun."
    if task.what == "evaluate":
        return "It is trained, but not evaluated."
    last = run_folder.read(task.run.folder)["segments"][-1]
    return f"It is not complete; its last start is '{last['status']}' in its record."


def _training(planned: Planned, what: str, arguments: list[str]) -> Task:
    launcher = launcher_of(planned.launcher, planned.cell.ranks + planned.config.run.spares)
    return Task(planned, what, [*launcher, "python", "-m", "pala.train", *arguments])


class Missing(NamedTuple):
    """The rest of a comparison."""

    tasks: list[Task]
    unfit: dict[Planned, str]
    """Runs that no job helps, since one has brought them to another number of ranks, with a sentence that says so."""


def missing_of(runs: Sequence[Planned], results: Path) -> Missing:
    """Return what runs still need. Raises PalaError if a run that exists is not what the plan asks for."""
    missing = Missing([], {})
    copies = made_in(results)
    for run in runs:
        try:
            if (task := task_of(run, copies)) is not None:
                missing.tasks.append(task)
        except WrongRanksError as error:
            missing.unfit[run] = str(error)
    return missing


def chosen(plan: Plan, only: Sequence[str]) -> list[Planned]:
    """Return the runs of the variants and games that are named; of all where none is. Raises PalaError."""
    variants, games = plan.preset.variants, plan.preset.games
    for word in only:
        if word not in variants and word not in games:
            raise PalaError(f"'--only {word}' is no variant and no game; there are {', '.join((*variants, *games))}.")
    of_variants = [word for word in only if word in variants] or list(variants)
    of_games = [word for word in only if word in games] or list(games)
    return [run for run in plan.runs if run.cell.variant in of_variants and run.cell.game in of_games]


def nothing_missing(results: Path) -> str:
    """Return what to say if there is no task."""
    return (
        f"Nothing is missing: all runs that were asked for are complete, here or in '{results}'. To make them again, "
        "give the results another folder, as in `--output results/mine`, and move those in `runs/` away; "
        "`--report-only` makes the report of those that are there."
    )


def execute(plan: Plan, runs: Sequence[Planned], results: Path, missing: Missing) -> list[Planned]:
    """Do what is missing of some planned runs, one after the other, and say what becomes of each; returns the runs that
    failed. An interrupted job has written its checkpoints. Raises PalaError if another comparison runs in the same
    folder."""
    tasks, unfit = missing
    done = len(runs) - len(tasks) - len(unfit)
    failures = list(unfit)
    trained_s, trained_steps = 0.0, 0.0  # of runs trained from start to end
    with locked(task.run for task in tasks):
        print_result(f"PALA  {plan.preset.name}: {done} of {len(runs)} runs are complete")
        if not tasks and not unfit:
            print_result(f"      {nothing_missing(results)}")
        for run, why in unfit.items():
            print_result(f"      {run}: FAILED. {why}")
        for number, task in enumerate(tasks, 1):
            place = f"      {done + number}/{len(runs)}  {task.run}"
            print_result(f"{place}: {_VERBS[task.what]}")
            begin = time.monotonic()
            fault = _do(task, results)
            if fault is not None:
                failures.append(task.run)
                print_result(f"{place}: FAILED. {fault}")
                continue
            seconds = time.monotonic() - begin
            if task.what == "train":
                trained_s, trained_steps = trained_s + seconds, trained_steps + task.run.config.total_steps
            left = sum(each.run.config.total_steps for each in tasks[number:] if each.what != "evaluate")
            rest = f"; about {duration(left * trained_s / trained_steps)} left" if left and trained_steps else ""
            print_result(f"{place}: {_became(task, plan)}, {duration(seconds)}{rest}")
    return failures


def _do(task: Task, results: Path) -> str | None:
    """Do a task; returns what went wrong, if anything."""
    log = task.run.log
    try:
        folder = task.run.folder
        run_folder.set_aside(folder)
        watch = EndWatch(folder, run_folder.num_segments(folder))  # an evaluation makes no entry, so it is not over
        run_job(task.command, log, stop_signal=signal.SIGUSR1, patience_s=_PATIENCE_S, is_over=watch.is_over)
        fault = ""
    except PalaError as error:
        fault = str(error)
    try:
        lacks = task_of(task.run, made_in(results))
        if lacks is None:
            return None
        return fault or f"The job ended, but: {why_unfinished(lacks)} Its output is in '{log}'."
    except PalaError as error:  # it is not what was asked for: a launcher that starts another number of ranks
        return str(error)


def _became(task: Task, plan: Plan) -> str:
    """Return what a run is now."""
    try:
        run = load(task.run.folder, plan)
    except PalaError as error:  # the report will say so again; the other runs continue
        return str(error)
    speed = f", {run.steps_per_s:,.0f} steps/s" if run.steps_per_s else ""
    score, what = (run.training_score, "in training") if run.score is None else (run.score, "evaluated")
    text = "no episode" if score is None else f"return {short_number(score)} ({what})"
    return f"{text} after {run.last['global_steps']:,} steps{speed}"
