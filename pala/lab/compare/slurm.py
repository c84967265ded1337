"""A comparison on a cluster: every run that is missing as a job of Slurm of its own size, and a last one that reports.

A job's name tells which run it is for, so that the queue says what need not be submitted again.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pala.lab.compare.collect import made_in
from pala.lab.compare.execute import Task, locked, missing_of, task_of, trust_of, why_unfinished
from pala.lab.compare.plan import Plan, Planned, Preset
from pala.run import run_folder
from pala.system.errors import PalaError
from pala.system.output import print_result

_SCRIPT = Path("launch/slurm/several_nodes.sbatch")
_WHERE = {"partition": "SLURM_JOB_PARTITION", "account": "SLURM_JOB_ACCOUNT", "qos": "SLURM_JOB_QOS"}
_OF_EVERY_JOB = (
    "--account",
    "--partition",
    "--qos",
    "--reservation",
    "--clusters",
    "--time",
    "-A",
    "-M",
    "-p",
    "-q",
    "-t",
)
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # of a job's own variables: they say which cluster, not which job


class Submission:
    """The jobs of a comparison, for those of its runs that are chosen."""

    def __init__(
        self, plan: Plan, runs: Sequence[Planned], results: Path, report: Sequence[str], only: Sequence[str]
    ) -> None:
        """`report`: arguments of pala compare for the last job; `only`: the variants and games by which `runs` were
        chosen. Raises PalaError if a run that exists is not what the plan asks for, or this is not PALA's
        repository."""
        if not _SCRIPT.exists():
            raise PalaError(f"There is no '{_SCRIPT}' here; submit from PALA's repository.")
        if other := [run for run in runs if run.launcher != Preset.launcher]:
            raise PalaError(
                f"{plan.source}: 'launcher' is '{other[0].launcher}', but jobs of Slurm start their ranks by "
                f"'{_SCRIPT}'; leave it out."
            )
        self.unfit: dict[Planned, str] = {}
        """Runs that no job helps, with the reason; the last job names them."""
        self.jobs: list[str] = []
        """Jobs for runs of the comparison that wait or run, after `submit`."""
        self._plan = plan
        self._results = results
        self._runs = runs
        self._report = report
        self._only = only
        self._folder = runs[0].folder.parent

    def commands(self) -> list[list[str]]:
        """Return what would be submitted, were no job waiting or running. Raises PalaError."""
        return [self._command(task) for task in self._tasks({})]

    def submit(self) -> list[Planned]:
        """Submit what is missing and has no job; returns the runs whose job Slurm did not take. Raises PalaError if it
        does not answer, or another comparison works in the same folder."""
        with locked(self._runs):
            return self._submit()

    def _submit(self) -> list[Planned]:
        queue = self._queue()
        refused, fresh = [], []
        for task in self._tasks(queue):
            try:
                run_folder.set_aside(task.run.folder)
                fresh.append(_ask(self._command(task)))
                print_result(f"      {task.run}: job {fresh[-1]}")
            except PalaError as error:
                refused.append(task.run)
                print_result(f"      {task.run}: NOT SUBMITTED. {error}")
        waiting = [(run, queue[_name(run)]) for run in self._plan.runs if _name(run) in queue]
        for run, job in waiting:
            print_result(f"      {run}: job {job} waits or runs")
        self.jobs = [*(job for _, job in waiting), *fresh]
        if fresh or (waiting and self._report_name not in queue):
            self._submit_report(queue.get(self._report_name))
        return refused

    def _tasks(self, queue: dict[str, str]) -> list[Task]:
        """Return what runs without a job still need."""
        tasks, self.unfit = missing_of([run for run in self._runs if _name(run) not in queue], self._results)
        return tasks

    def _submit_report(self, earlier: str | None) -> None:
        """Submit the last job, which judges the chosen runs; one of `earlier` that waits makes place for it."""
        chosen = ["--only", *self._only] if self._only else []
        command = shlex.join([sys.executable, "-m", "pala", "compare", *self._report, *chosen])
        log, after = self._folder / "report.log", f"--dependency=afterany:{':'.join(self.jobs)}"
        asked = [option for option in self._plan.preset.slurm.options if option.startswith(_OF_EVERY_JOB)]
        size = [*asked, "--nodes=1", "--ntasks=1"]
        job = _ask([*_sbatch(self._report_name), *_output(log), *size, after, f"--wrap=exec {command}"])
        print_result(f"      report, after them: job {job}; what it says is in '{log}'")
        if earlier:
            _ask(["scancel", *self._clusters, "--state=PENDING", earlier])

    @property
    def _report_name(self) -> str:
        """Name of the job that makes the report. That of a report on a part alone names the part."""
        return "-".join((f"pala-{self._plan.preset.name}-report", *self._only))

    @property
    def _clusters(self) -> list[str]:
        """The options that say where the jobs are, if not on the cluster of this machine."""
        return [option for option in self._plan.preset.slurm.options if option.startswith(("--clusters=", "-M"))]

    def _queue(self) -> dict[str, str]:
        """Return name -> number of this user's jobs from this folder that wait, run or end."""
        words = ["squeue", *self._clusters, f"--user={os.getuid()}", "--noheader", "--format=%i|%Z|%j"]
        lines = _ask(words).splitlines()
        jobs = [line.split("|", 2) for line in lines if line.count("|") >= 2]
        here = Path.cwd()
        return {name: number for number, folder, name in jobs if Path(folder).resolve() == here}

    def _command(self, task: Task) -> list[str]:
        """Return sbatch with all its words."""
        run, options = task.run, self._plan.preset.slurm.options
        begin = [*_sbatch(_name(run)), *_output(run.log)]
        if task.what == "evaluate":
            return [*begin, "--nodes=1", "--ntasks=1", *options, f"--wrap=exec {shlex.join(task.command)}"]
        ranks = run.cell.ranks + run.config.run.spares
        nodes = self._plan.nodes(ranks)
        on_each = math.ceil(ranks / nodes)
        size = [f"--nodes={nodes}", f"--ntasks-per-node={on_each}"]
        uneven = ["-n", str(run.cell.ranks)] if nodes * on_each != ranks else []  # that train
        again = ["--continue", *trust_of(run)] if task.what == "train" else []  # when it is requeued
        return [*begin, "--requeue", *size, *options, str(_SCRIPT), *uneven, *again, *task.arguments]


def _name(run: Planned) -> str:
    return f"pala-{run.folder.parent.name}-{run.folder.name}"


def _sbatch(name: str) -> list[str]:
    """Return sbatch's words, with partition, account and quality of service of the job in which this runs, if any."""
    where = [f"--{option}={os.environ[variable]}" for option, variable in _WHERE.items() if os.environ.get(variable)]
    return ["sbatch", "--parsable", f"--job-name={name}", *where]


def _output(log: Path) -> list[str]:
    return [f"--output={log}", "--open-mode=append"]


def _ask(command: list[str]) -> str:
    """Return what a command of Slurm answers. Raises PalaError with what it says if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in _KEPT}
    try:
        done = subprocess.run(
            command, env=environment, text=True, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise PalaError(f"'{command[0]}' was not found: submit where Slurm's commands are installed.") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise PalaError(f"`{command[0]}` failed with status {done.returncode}: {said or 'it does not say why'}")
    return done.stdout.strip().split(";")[0] if command[0] == "sbatch" else done.stdout


def unfinished(runs: Sequence[Planned], results: Path) -> list[tuple[Planned, str]]:
    """Return those of the runs that are missing or not complete, each with why, and where its output is."""
    found: list[tuple[Planned, str]] = []
    copies = made_in(results)
    for run in runs:
        try:
            task = task_of(run, copies)
            why = why_unfinished(task) if task is not None else ""
        except PalaError as error:
            why = str(error)
        if why:
            found.append((run, f"{why} Its output: '{run.log}'." if run.log.exists() else why))
    return found
