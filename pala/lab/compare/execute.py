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

from pala.config import load_preset
from pala.config.influence import differences
from pala.evaluation.record import final_evaluation
from pala.lab.compare.collect import copies_in, load
from pala.lab.compare.plan import Plan, Planned, options
from pala.report.runs import config_as_computed
from pala.run import run_folder
from pala.run.end_watch import EndWatch
from pala.run.lock import lock_folder
from pala.run.user_code import named_code
from pala.system.errors import PalaError
from pala.system.jobs import launcher_of, run_job
from pala.system.output import tell
from pala.system.text import duration, short_number

_PATIENCE_S = 60.0  # for a job to write its checkpoints and end, after SIGUSR1
_VERBS = {"train": "starts", "resume": "goes on", "evaluate": "is evaluated"}


@dataclass(frozen=True)
class Task:
    """What a planned run still needs."""

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


def task_of(planned: Planned, results: Path) -> Task | None:
    """What a run needs; None if it is complete, here or in the results. Raises PalaError if it was made otherwise than
    the plan wants it."""
    folder = planned.folder
    if not (folder / "run.json").exists():
        copies = [copy for copy in copies_in(results) if _may_be(planned, copy)]
        if any(not _misfits(planned, copy) and _needs(planned, copy) in ("", "evaluate") for copy in copies):
            return None
        if longer := [copy for copy in copies if _hides(copy, planned)]:
            raise PalaError(
                f"'{longer[0]}' is this run with 'total_steps' {run_folder.config_of(longer[0]).total_steps:,}, and "
                f"the comparison now asks for {planned.config.total_steps:,}: of two runs of a seed only the longer "
                "one is reported. Put the preset back, or give the comparison another 'name'."
            )
        over = load_preset(planned.game_preset)
        return _training(planned, "train", [planned.game_preset, *options(planned.config, over)])
    if misfits := _misfits(planned, folder):
        key, (found, asked) = next(iter(misfits.items()))
        if key == "ranks":
            raise WrongRanksError(
                f"Run '{folder}' last ran with {found} ranks, not {asked}, as where hosts fail; move it away to "
                "make it anew."
            )
        raise PalaError(
            f"Run '{folder}' was made with '{key}' {found!r}, but the comparison now asks for {asked!r}. Put the "
            "preset back, give the comparison another 'name', or move the run away."
        )
    needs = _needs(planned, folder)
    trust = ["--trust-run"] if named_code(planned.config) else []  # the preset names it, too
    if needs == "resume":
        over = run_folder.config_of(folder)
        return _training(planned, needs, ["--resume", str(folder), *trust, *options(planned.config, over)])
    if needs == "evaluate":
        wanted = planned.config.evaluation
        numbers = {"episodes": wanted.episodes, "num-envs": wanted.num_envs, "seed": planned.config.seed}
        words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        greedy = "--greedy" if wanted.greedy else "--no-greedy"
        return Task(planned, needs, ["python", "-m", "pala.evaluate", str(folder), *words, greedy, *trust])
    return None


def why_unfinished(task: Task) -> str:
    """A sentence on what a run still lacks."""
    if task.what == "train":
        return "It has not begun."
    if task.what == "evaluate":
        return "It is trained, but not evaluated."
    last = run_folder.read(task.run.folder)["segments"][-1]
    return f"It is not complete; its last start is '{last['status']}' in its record."


def _may_be(planned: Planned, copy: Path) -> bool:
    """Whether a folder of the results is of the game and seed that is planned. It may have another name there, but not
    one that the comparison gives to another variant."""
    found, wanted = run_folder.config_of(copy), planned.config
    if (found.env.id, found.seed) != (wanted.env.id, wanted.seed):
        return False
    last = run_folder.read(copy)["segments"][-1]
    if any(run_folder.from_python(last)):  # the plan's are by its settings alone
        return False
    return wanted.run.name in (copy.name, found.run.name) or found.run.name not in planned.others


def _hides(copy: Path, planned: Planned) -> bool:
    """Whether a page that has the copy would leave out what is planned, as the shorter of two (`is_shorter_than`)."""
    record = run_folder.read(copy)
    made = record["segments"][-1].get("global_steps", 0)
    is_longer = record["completed"] and made > planned.config.total_steps
    return is_longer and _misfits(planned, copy).keys() == {"total_steps"}


def _training(planned: Planned, what: str, arguments: list[str]) -> Task:
    launcher = launcher_of(planned.launcher, planned.cell.ranks + planned.config.run.spares)
    return Task(planned, what, [*launcher, "python", "-m", "pala.train", *arguments])


def _needs(planned: Planned, folder: Path) -> str:
    record, config = run_folder.read(folder), run_folder.config_of(folder)
    ended_early = record["segments"][-1].get("stopped_early")  # by a callback
    if not record["completed"] or ended_early or config.total_steps < planned.config.total_steps:
        return "resume"
    evaluation, wanted = final_evaluation(folder, record), planned.config.evaluation
    if not wanted.episodes:
        return ""
    if (
        evaluation is None
        or evaluation["episodes"] < wanted.episodes
        or evaluation.get("greedy", False) != wanted.greedy
    ):
        return "evaluate"
    return ""


def _misfits(planned: Planned, folder: Path) -> dict[str, tuple[object, object]]:
    """Settings that a run was made with and the plan does not want -> both values."""
    record = run_folder.read(folder)
    config, ranks = config_as_computed(folder, record), record["segments"][-1].get("ranks")
    wanted = planned.config
    differing: dict[str, tuple[object, object]] = dict(differences(config, wanted))
    if ranks != planned.cell.ranks:
        differing["ranks"] = (ranks, planned.cell.ranks)
    if config.total_steps > wanted.total_steps:
        differing["total_steps"] = (config.total_steps, wanted.total_steps)
    is_read = {"epsilon": wanted.algorithm == "gorila", "max_episode_steps": not wanted.env.is_atari}
    for key in (key for key, holds in is_read.items() if holds and wanted.evaluation.episodes):
        found, asked = getattr(config.evaluation, key), getattr(wanted.evaluation, key)
        if found != asked:  # by which `pala.evaluate` scores the run, unless it makes no result of it
            differing[f"evaluation.{key}"] = (found, asked)
    return differing


def tasks_of(runs: Sequence[Planned], results: Path) -> tuple[list[Task], dict[Planned, str]]:
    """What runs still need; and why no job helps those that one has brought to another number of ranks. Raises
    PalaError if a run that exists is not what the plan asks for."""
    tasks, unfit = [], {}
    for run in runs:
        try:
            if (task := task_of(run, results)) is not None:
                tasks.append(task)
        except WrongRanksError as error:
            unfit[run] = str(error)
    return tasks, unfit


def chosen(plan: Plan, only: Sequence[str]) -> list[Planned]:
    """The runs of the variants and games that are named; of all where none is. Raises PalaError."""
    variants, games = plan.preset.variants, plan.preset.games
    for word in only:
        if word not in variants and word not in games:
            raise PalaError(f"'--only {word}' is no variant and no game; there are {', '.join((*variants, *games))}.")
    of_variants = [word for word in only if word in variants] or list(variants)
    of_games = [word for word in only if word in games] or list(games)
    return [run for run in plan.runs if run.cell.variant in of_variants and run.cell.game in of_games]


def nothing_missing(results: Path) -> str:
    """What to say if there is no task."""
    return (
        f"Nothing is missing: all runs that were asked for are complete, here or in '{results}'. To make them anew, "
        "give the results another folder, as in `--output results/mine`, and move those in `runs/` away; "
        "`--report-only` makes the report of those that are there."
    )


class Executor:
    """Does the tasks of some planned runs, and says what becomes of each."""

    def __init__(self, plan: Plan, runs: Sequence[Planned], results: Path) -> None:
        """Raises PalaError if a run that exists is not what the plan asks for."""
        self._plan, self._results, self._runs = plan, results, runs
        self.tasks, self.unfit = tasks_of(runs, results)
        self._seconds = self._steps = 0.0  # of runs trained from start to end

    @property
    def is_published(self) -> bool:
        """Whether there is no task because the results have copies of all runs, of which none was made here."""
        return not self.tasks and not self.unfit and not any(run.folder.exists() for run in self._runs)

    def run(self) -> list[Planned]:
        """Returns the runs that failed. An interrupted job has written its checkpoints. Raises PalaError
        if another comparison runs in the same folder."""
        with locked(task.run for task in self.tasks):
            return self._run()

    def _run(self) -> list[Planned]:
        done = len(self._runs) - len(self.tasks) - len(self.unfit)
        tell(f"PALA  {self._plan.preset.name}: {done} of {len(self._runs)} runs are complete")
        if not self.tasks and not self.unfit:
            tell(f"      {nothing_missing(self._results)}")
        for run, why in self.unfit.items():
            tell(f"      {run}: FAILED. {why}")
        failures = list(self.unfit)
        for number, task in enumerate(self.tasks):
            place = f"      {done + number + 1}/{len(self._runs)}  {task.run}"
            tell(f"{place}: {_VERBS[task.what]}")
            begin = time.monotonic()
            fault = self._do(task)
            if fault is not None:
                failures.append(task.run)
                tell(f"{place}: FAILED. {fault}")
                continue
            seconds = time.monotonic() - begin
            if task.what == "train":
                self._seconds, self._steps = self._seconds + seconds, self._steps + task.run.config.total_steps
            tell(f"{place}: {self._became(task)}, {duration(seconds)}{self._rest(number)}")
        return failures

    def _do(self, task: Task) -> str | None:
        """What went wrong, if anything."""
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
            lacks = task_of(task.run, self._results)
            if lacks is None:
                return None
            return fault or f"The job ended, but: {why_unfinished(lacks)} Its output is in '{log}'."
        except PalaError as error:  # it is not what was asked for: a launcher that starts another number of ranks
            return str(error)

    def _became(self, task: Task) -> str:
        try:
            run = load(task.run.folder, self._plan)
        except PalaError as error:  # the report will say so again; the other runs go on
            return str(error)
        speed = f", {run.steps_per_s:,.0f} steps/s" if run.steps_per_s else ""
        score, what = (run.training_score, "in training") if run.score is None else (run.score, "evaluated")
        text = "no episode" if score is None else f"return {short_number(score)} ({what})"
        return f"{text} after {run.last['global_steps']:,} steps{speed}"

    def _rest(self, number: int) -> str:
        left = [task.run.config.total_steps for task in self.tasks[number + 1 :] if task.what != "evaluate"]
        return f"; about {duration(sum(left) * self._seconds / self._steps)} left" if left and self._steps else ""
